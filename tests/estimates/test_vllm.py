"""Which share vLLM may take beside a training."""

import pytest
from factories import GIB
from profiles import make_group, make_profile

from autotune.cost.profile import REFERENCE, Completions
from autotune.estimates.estimate import vllm_note
from autotune.values.estimate import MemoryBreakdown, Phase
from autotune.values.trial import Interval

SURE = Interval(low=1.0, high=1.0)
GENERATION = Completions(
    prompt=256, completion=256, length=256, work=(), storages=make_profile().storages, cache_bytes=1 << 20,
    caches=((4, 1 << 20),), weights_bytes=0, words=10,
)  # fmt: skip

MEMORY = MemoryBreakdown(
    weights_bytes=GIB, gradients_bytes=GIB, optimizer_state_bytes=3 * GIB, activations_bytes=0, temporaries_bytes=0,
    framework_bytes=0, allocated_peak_bytes=20 * GIB, reserved_peak_bytes=20 * GIB, device_peak_bytes=20 * GIB,
    allocated_interval=SURE, reserved_interval=SURE, device_interval=SURE, phase="generation",
    phases=(
        Phase(name="generation", operator="", allocated_bytes=20 * GIB),
        Phase(name="forward and backward", operator="", allocated_bytes=10 * GIB),
    ),
)  # fmt: skip


def told(device_gib: float, *, completions: int = 8, generation: Completions | None = GENERATION) -> str | None:
    """4 GiB of weights and states, 10 GiB where training peaks, 20 GiB in transformers' generation; 2 GiB for vLLM."""
    profile = make_profile(parameters=(make_group(1 << 15, 1 << 15),)).model_copy(update={"generation": generation})
    return vllm_note(MEMORY, profile, int(device_gib * GIB), completions)


def test_a_references_weights_are_not_vllms():
    groups = (make_group(1 << 15, 1 << 15), make_group(1 << 15, 1 << 15, trained=False))
    profile = make_profile(parameters=groups).model_copy(update={"generation": GENERATION})
    assert profile.made == list(groups)
    profile = profile.model_copy(update={"names": ("weight", f"{REFERENCE}.weight")})
    assert "vLLM's weights taking 2.00 GiB" in vllm_note(MEMORY, profile, 80 * GIB, 8)


@pytest.mark.parametrize(
    ("device_gib", "said"),
    [
        # Keys and values of a completion take 1 GiB in 16 bits. Beside the training 5.92 GiB are left, 2 for weights.
        (16, "2.00 GiB: up to 0.37, which holds at most 3 of 8 completions at once; with vllm_enable_sleep_mode"),
        (40, "up to 0.75, which holds all 8 completions at once; with"),
        (12, "no share fits beside the training; with vllm_enable_sleep_mode up to 0.66, which holds at most 5 of 8"),
        (6, "no share fits beside the training; nor with vllm_enable_sleep_mode"),
    ],
)  # fmt: skip
def test_training_keeps_its_room_and_with_sleep_mode_that_of_weights_and_states(device_gib, said):
    assert said in told(device_gib)


@pytest.mark.parametrize("generation", [None, GENERATION.model_copy(update={"caches": ()})], ids=["none", "no keys"])
def test_a_training_that_generates_nothing_or_keeps_no_keys_is_told_nothing(generation):
    assert told(16, generation=generation) is None
