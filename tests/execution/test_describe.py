"""A Trainer of TRL's that is about to train is described; others in `test_trial`."""

from types import SimpleNamespace

import pytest
from factories import make_workload
from transformers import Trainer

from autotune.cost.family import shape_of
from autotune.execution.describe import Training
from autotune.values.model import Task
from autotune.values.workload import OwnCode


def training(kind):
    """Return a training by a Trainer of this kind, with the attributes that are looked at."""
    made = object.__new__(Training)
    made.trainer, made.task, made.lengths, made.is_of_library = object.__new__(kind), Task.CAUSAL_LM, [1], True
    return made


def test_checkpointing_of_some_layers_is_barred_where_trl_switches_it_off_and_on():
    trl = pytest.importorskip("trl")

    def values(kind):
        return {bar.value for bar in training(type("Mine", (kind,), {}))._barred() if bar.knob == "checkpointing"}

    assert values(trl.DPOTrainer) >= {"every-2nd", "every-4th"}
    assert values(trl.SFTTrainer) == values(Trainer) == set()


@pytest.mark.parametrize(
    ("kind", "fields", "recipe"),
    [
        ("DPOTrainer", {}, "dpo"),
        ("DPOTrainer", {"precompute_ref_log_probs": True}, None),
        ("SFTTrainer", {"loss_type": "nll", "packing": False}, "sft"),
        ("SFTTrainer", {"loss_type": "dft", "packing": False}, None),
        ("GRPOTrainer", {}, None),
    ],
    ids=str,
)
def test_a_trainer_of_trls_is_predicted_with_its_own_passes_and_reference(kind, fields, recipe):
    members = {"__module__": "trl.trainer", "args": SimpleNamespace(**fields), "compute_loss_func": None}
    assert training(type(kind, (), members))._recipe() == recipe
    code = OwnCode(kind="script", shown="train.py", directory="/", recipe=recipe)
    assert shape_of(make_workload(own_code=code)).recipe == recipe
