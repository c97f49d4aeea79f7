"""Trials on a CUDA device, or the stand-in for one: forked, capped, measured, and gone without a trace."""

from __future__ import annotations

import importlib.util
import json
import statistics
from typing import Any

import pytest
from benches import Bench
from conftest import write_model
from model_families import FAMILIES

from autotune.training.resolve import default_task, resolve
from autotune.values.config import Parallelism
from autotune.values.hardware import cuda_count, cuda_used_bytes, detect, like_devices
from autotune.values.trial import Measurement, TrialStatus

pytestmark = pytest.mark.usefixtures("whole_device")

MIB, GIB = 1 << 20, 1 << 30
needs_bitsandbytes = pytest.mark.skipif(
    importlib.util.find_spec("bitsandbytes") is None, reason="bitsandbytes is not installed"
)


def measured(bench: Any, config: dict[str, Any], **limits: Any) -> Measurement:
    result = bench.run(config=config, limits={"memory_bytes": 4 * GIB, "timeout_s": 200, **limits})
    assert result.status is TrialStatus.COMPLETED, result.outcome
    return result.outcome


@pytest.mark.cuda
@pytest.mark.parametrize(
    ("config", "effects"),
    [
        ({}, {"precision": "weights float32, layer outputs float32"}),
        ({"tf32": True}, {"tf32": "tf32"}),
        ({"precision": "bf16"}, {"precision": "weights float32, layer outputs bfloat16"}),
        ({"precision": "fp16"}, {"precision": "weights float32, layer outputs float16"}),
        ({"precision": "pure_bf16"}, {"precision": "weights bfloat16, layer outputs bfloat16"}),
        ({"optim": "adamw_torch"}, {}),
        ({"optim": "adafactor"}, {}),
        pytest.param({"optim": "adamw_bnb_8bit"}, {}, marks=needs_bitsandbytes),
        pytest.param({"optim": "paged_adamw_8bit"}, {}, marks=needs_bitsandbytes),
        ({"checkpointing": "full"}, {"checkpointing": "2 checkpointed calls in the first step"}),
        ({"attn_implementation": "eager"}, {"attn_implementation": "eager"}),
        ({}, {"torch_empty_cache_steps": "never emptied"}),
        ({"torch_empty_cache_steps": 1}, {"torch_empty_cache_steps": "every 1 steps, 1 times in the first"}),
        ({"expandable_segments": True}, {}),
        ({"dataloader_num_workers": 2, "dataloader_pin_memory": True}, {"dataloader_num_workers": "2"}),
        ({"adapter": {"rank": 8}, "precision": "bf16"}, {"adapter": "lora, 16384 of 155968 parameters trained"}),
        ({"torch_compile_backend": "inductor"}, {}),
        ({"torch_compile_backend": "inductor", "precision": "bf16", "checkpointing": "full"}, {}),
    ],
    ids=str,
)
def test_each_knob_takes_effect(cuda, config, effects):
    seen = measured(cuda, config).effects
    assert seen == {**seen, **effects}


@pytest.fixture
def clocked(model, tmp_path, monkeypatch):
    """Trials on a chip that is 30 % slower when it is cold, and warm after seconds of computing."""
    monkeypatch.setenv("FAKECUDA_CLOCK", "ramp=0.3")
    bench = Bench(model, tmp_path / "run", device="cuda:0")
    with bench.runner:
        yield bench


@pytest.mark.cuda
def test_the_steps_that_compile_record_graphs_or_warm_the_chip_are_not_measured(clocked):
    """As with quick effort, which discards a step and half a second."""
    config = {"torch_compile_backend": "inductor", "torch_compile_mode": "reduce-overhead"}
    limits = {"discarded_s": 0.5, "measure_steps": 5, "least_time_s": 2.0, "relative_interval": 0.04}
    times = measured(clocked, config, **limits).step_times_s
    assert times[0] < 2 * statistics.median(times)
    assert len(times) > 5


@pytest.mark.cuda
def test_trials_are_forked(cuda):
    """Importing the libraries has not touched the device, and a fork can use it."""
    ready = cuda.runner.start()
    assert ready.forkable


@pytest.mark.cuda
def test_the_devices_memory_is_told_in_full(cuda):
    memory = measured(cuda, {}).memory
    assert 0 < memory.allocated_bytes <= memory.reserved_bytes <= memory.device_bytes
    assert memory.peak_bytes == memory.device_bytes
    assert memory.device_bytes - memory.reserved_bytes > 50 * MIB  # the context and the kernels


@pytest.mark.cuda
@needs_bitsandbytes
def test_paged_states_count_although_the_driver_names_no_process_for_them(tiny_llama, tmp_path):
    wide = {**json.loads((tiny_llama / "config.json").read_text()), "vocab_size": 60_000}
    (tmp_path / "config.json").write_text(json.dumps(wide))
    bench = Bench(resolve(str(tmp_path)), tmp_path / "run", device="cuda:0")
    with bench.runner:
        beside = {}
        for optim in ("adamw_bnb_8bit", "paged_adamw_8bit"):
            memory = measured(bench, {"optim": optim}).memory
            beside[optim] = memory.device_bytes - memory.reserved_bytes
    embedding = 60_000 * wide["hidden_size"]
    # Two states each: of the embedding in 32 bits, of the head in 8; the matrices of layers are too small to be paged.
    assert beside["paged_adamw_8bit"] - beside["adamw_bnb_8bit"] >= 2 * (4 + 1) * embedding


@pytest.mark.cuda
def test_trials_in_turn_are_measured_beside_each_other_and_each_has_its_own_memory(cuda):
    configs = [{}, {"precision": "bf16", "per_device_train_batch_size": 8}]
    alone = [measured(cuda, config).memory.device_bytes for config in configs]
    limits = {"memory_bytes": 4 * GIB, "measure_time_s": 1.0, "measure_steps": 4000}
    requests = [cuda.request(config=config, limits=limits) for config in configs]
    numbers = tuple(request.number for request in requests)
    results = cuda.runner.run_in_turn([r.model_copy(update={"in_turn_with": numbers}) for r in requests])
    assert [r.status for r in results] == [TrialStatus.COMPLETED] * 2, [r.outcome for r in results]
    assert all(r.measurement.steps_per_turn for r in results)
    assert [r.measurement.memory.device_bytes for r in results] == pytest.approx(alone, abs=32 * MIB)


@pytest.mark.cuda
def test_running_out_of_memory_is_real_and_the_next_trial_runs(cuda):
    large = {"per_device_train_batch_size": 4096}
    result = cuda.run(config=large, limits={"memory_bytes": 1 * GIB})
    assert result.status is TrialStatus.OUT_OF_MEMORY
    assert "CUDA out of memory" in result.outcome.cause or "budget" in result.outcome.cause
    assert measured(cuda, {}).step_times_s


@pytest.mark.cuda
def test_a_budget_below_the_context_is_out_of_memory(cuda):
    assert cuda.run(limits={"memory_bytes": 10 * MIB}).status is TrialStatus.OUT_OF_MEMORY


@pytest.mark.cuda
def test_the_memory_is_given_back(cuda):
    before = cuda_used_bytes("cuda:0")
    result = cuda.run(config={"per_device_train_batch_size": 1024}, limits={"memory_bytes": 8 * GIB})
    assert result.status is TrialStatus.COMPLETED
    assert result.warnings == ()
    assert cuda_used_bytes("cuda:0") - before < 128 * MIB


@pytest.mark.cuda
def test_a_trial_that_is_killed_gives_its_memory_back(cuda):
    before = cuda_used_bytes("cuda:0")
    result = cuda.misbehave("hold_device_memory", timeout_s=15)
    assert result.status is TrialStatus.TIMED_OUT
    held = json.loads((cuda.directory(result) / "seen.json").read_text())["held"]
    assert held - before > 900 * MIB
    assert cuda_used_bytes("cuda:0") - before < 128 * MIB


@pytest.mark.cuda
def test_a_trial_sees_one_device(cuda):
    result = cuda.misbehave("count_devices")
    assert json.loads((cuda.directory(result) / "seen.json").read_text()) == {"devices": 1}
    assert detect("cuda:0").kind == "cuda"


@pytest.mark.gpu
def test_step_times_are_those_of_the_device(cuda):
    """A step that computes a hundred times as much takes longer, though launching its kernels doesn't."""
    small = measured(cuda, {"per_device_train_batch_size": 8}, memory_bytes=32 * GIB)
    large = measured(cuda, {"per_device_train_batch_size": 8192}, memory_bytes=32 * GIB)
    assert min(large.step_times_s) > min(small.step_times_s)


@pytest.mark.cuda
@pytest.mark.parametrize("sharding", ["none", "fsdp_full"])
def test_two_ranks_have_a_device_each_and_their_messages_are_within_the_budget(cuda, sharding):
    if cuda_count() < 2 or len(like_devices("cuda:0")) < 2:
        pytest.skip("needs two devices alike")
    idle = [cuda_used_bytes(device) for device in like_devices("cuda:0")[:2]]
    found = measured(cuda, {"parallelism": Parallelism(world_size=2, sharding=sharding)})
    assert found.effects["parallelism"].startswith("DDP over 2" if sharding == "none" else "FSDP2 over 2")
    assert found.memory.device_bytes > found.memory.reserved_bytes + 100 * MIB  # contexts, and what NCCL keeps
    after = [cuda_used_bytes(device) for device in like_devices("cuda:0")[:2]]
    assert all(now - before < 128 * MIB for now, before in zip(after, idle, strict=True))


# On the stand-in one family in fp32, the next in bf16. The loss of DeBERTa's classifier looks for the labels that
# count, which takes arithmetic.
EACH = [
    pytest.param(
        name,
        precision,
        marks=pytest.mark.gpu if name == "DeBERTa" or (number + half) % 2 else pytest.mark.cuda,
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
