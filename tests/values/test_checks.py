"""The checks' values: how many steps are planned, and how a soak is told."""

import pytest

from autotune.errors import InputError
from autotune.values.budget import Effort
from autotune.values.checks import Soaked, planned_loss_steps


def planned(asked=None, effort=Effort.STANDARD, *, free_batch=False, exhaustive=False):
    return planned_loss_steps(asked, effort, free_batch=free_batch, exhaustive=exhaustive)


@pytest.mark.parametrize(("effort", "steps"), [(Effort.QUICK, 0), (Effort.STANDARD, 20), (Effort.THOROUGH, 20)])
def test_the_effort_decides_unless_the_user_does(effort, steps):
    assert planned(effort=effort) == steps
    assert planned(50, effort) == 50
    assert planned(0, effort) == 0


@pytest.mark.parametrize(
    ("how", "why"),
    [
        ({"asked": 20, "free_batch": True}, "--check-loss 20: with --global-batch any"),
        ({"asked": 20, "exhaustive": True}, "--check-loss 20: --exhaustive crowns no winner"),
        ({"asked": 9}, "--check-loss 9: fewer than 10 steps"),
    ],
)
def test_what_can_not_be_compared_is_refused_if_asked_for_and_left_out_otherwise(how, why):
    with pytest.raises(InputError, match=why):
        planned(**how)
    if how["asked"] == 20:
        assert planned(**{**how, "asked": None}) == 0


def test_a_soak_is_told_in_a_line():
    assert str(Soaked(eval_batch_size=32, checkpoint_bytes=3 << 20)) == "evaluation batch 32, checkpoint saved (3 MiB)"
    kept = Soaked(
        eval_batch_size=8,
        eval_accumulation_steps=1,
        predicted_samples=5000,
        predictions_bytes=3 << 30,
        checkpoint_bytes=1,
    )
    assert str(kept).startswith(
        "evaluation batch 8, predictions of 5,000 samples kept (3.00 GiB), eval_accumulation_steps 1"
    )
    assert kept.arguments == {"per_device_eval_batch_size": 8, "eval_accumulation_steps": 1}
    full = Soaked(eval_batch_size=32, checkpoint_bytes=None, not_saved="no checkpoint was saved: no room")
    assert str(full) == "evaluation batch 32; no checkpoint was saved: no room"
