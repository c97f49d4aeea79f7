"""What a user's own code decides isn't changed, and the reason is given."""

import pytest
from factories import make_config, make_facts, make_hardware, make_workload

from autotune.space.rules import refusals
from autotune.values.config import Parallelism
from autotune.values.user_code import Barred, Held, OwnCode

CODE = OwnCode(
    kind="script",
    shown="python train.py",
    command=("train.py",),
    directory="/",
    held={"optim": Held(value="adamw_torch", reason="the script hands over an optimizer")},
    barred=(Barred(knob="precision", value="pure_bf16", reason="it casts nothing"),),
)


def refused(**fields):
    config = make_config(**{"optim": "adamw_torch", **fields})
    return refusals(config, make_workload(own_code=CODE), make_facts(), make_hardware())


def test_what_is_not_held_may_change():
    assert refused() == []
    assert refused(precision="bf16", checkpointing="full") == []


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"optim": "adafactor"}, "optim stays as it is: the script hands over an optimizer"),
        ({"precision": "pure_bf16"}, "precision pure_bf16: it casts nothing"),
        ({"parallelism": Parallelism(world_size=2)}, "a training of your own is one process on one device"),
    ],
    ids=str,
)
def test_what_is_held_or_barred_is_refused_with_the_reason(fields, reason):
    assert reason in refused(**fields)


def test_without_own_code_there_is_nothing_to_hold():
    config = make_config(optim="adafactor")
    assert refusals(config, make_workload(), make_facts(), make_hardware()) == []
