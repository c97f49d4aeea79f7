"""A trial of each kind of model on a CUDA device, or the stand-in for one: its kernels are there, and it fits."""

from __future__ import annotations

import pytest
from conftest import write_model
from model_families import FAMILIES

from autotune.training.heads import default_task
from autotune.training.resolve import resolve
from autotune.values.trial import TrialStatus

pytestmark = pytest.mark.usefixtures("whole_device")

# The loss of DeBERTa's classifier looks for the labels that count, which takes arithmetic.
EACH = [pytest.param(name, marks=pytest.mark.gpu if name == "DeBERTa" else pytest.mark.cuda) for name in FAMILIES]


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("name", EACH)
def test_a_model_of_each_family_trains(cuda, tmp_path, name, precision):
    spec = resolve(str(write_model(tmp_path / "model", FAMILIES[name])))
    result = cuda.run(
        workload={"model": spec, "task": default_task(spec), "target_length": 8 if name == "Whisper" else None},
        config={"precision": precision, "attn_implementation": None},
    )
    assert result.status is TrialStatus.COMPLETED, result.outcome
