"""A model of each family trains on a CUDA device, and its speed is the device's."""

import pytest
from conftest import write_model
from model_families import FAMILIES

from autotune.training.resolve import default_task, resolve
from autotune.values.trial import TrialStatus

pytestmark = pytest.mark.usefixtures("whole_device")

# On the stand-in one family in fp32, the next in bf16. The loss of DeBERTa's classifier looks for the labels that
# count, which takes arithmetic.
EACH = [
    pytest.param(
        name, precision, marks=pytest.mark.gpu if name == "DeBERTa" or (number + half) % 2 else pytest.mark.cuda
    )
    for number, name in enumerate(FAMILIES)
    for half, precision in enumerate(("fp32", "bf16"))
]


@pytest.mark.parametrize(("name", "precision"), EACH)
def test_a_model_of_each_family_trains(cuda, tmp_path, name, precision):
    spec = resolve(str(write_model(tmp_path / "model", FAMILIES[name])))
    result = cuda.run(
        workload={"model": spec, "task": default_task(spec), "target_length": 8 if name == "Whisper" else None},
        config={"precision": precision, "attn_implementation": None},
    )
    assert result.status is TrialStatus.COMPLETED, result.outcome


@pytest.mark.gpu
def test_step_times_are_those_of_the_device(cuda):
    """A step that computes a hundred times as much takes longer, though launching its kernels doesn't."""
    small, large = (
        cuda.measured(config={"per_device_train_batch_size": size}, limits={"memory_bytes": 32 << 30})
        for size in (8, 8192)
    )
    assert min(large.step_times_s) > min(small.step_times_s)
