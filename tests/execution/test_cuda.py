"""Trials on a CUDA device, or the stand-in for one: forked, capped, measured, and gone without a trace."""

import importlib.util
from typing import Any

import benches
import pytest
from benches import Bench
from conftest import TINY_LLAMA, write_model
from factories import make_facts
from own_trainings import SCRIPT, script

from autotune.training.arguments import effective_tf32
from autotune.training.baseline import NOTHING_GIVEN, baseline_config
from autotune.training.resolve import resolve
from autotune.value import read_value
from autotune.values.config import Parallelism
from autotune.values.hardware import TF32_VARIABLE, cuda_used_bytes, detect, like_devices
from autotune.values.model import Task
from autotune.values.trial import DescribeRequest, Measurement, TrialResult, TrialStatus
from autotune.values.workload import Workload

pytestmark = [pytest.mark.usefixtures("whole_device"), pytest.mark.cuda]

MIB, GIB = 1 << 20, 1 << 30
BUDGET = 2 * GIB
needs_bitsandbytes = pytest.mark.skipif(
    importlib.util.find_spec("bitsandbytes") is None, reason="bitsandbytes is not installed"
)


def measured(bench: Bench, config: dict[str, Any], *, workload: Any = None, **limits: Any) -> Measurement:
    limits = {"memory_bytes": 4 * GIB, "timeout_s": 200, **limits}
    return bench.measured(config=config, workload=workload, limits=limits)


EAGER, INDUCTOR = {"torch_compile_backend": "aot_eager"}, {"torch_compile_backend": "inductor"}


@pytest.mark.parametrize(
    ("config", "effects"),
    [
        ({}, {"precision": "weights float32, layer outputs float32", "torch_empty_cache_steps": "never emptied"}),
        ({"tf32": True}, {"tf32": "tf32"}),
        # attention after rotary positions is told as it ran
        ({"precision": "bf16"}, {"precision": "weights float32, layer outputs bfloat16",
                                 "attn_implementation": "sdpa (flash)"}),
        ({"precision": "fp16"}, {"precision": "weights float32, layer outputs float16"}),
        ({"precision": "pure_bf16"}, {"precision": "weights bfloat16, layer outputs bfloat16"}),
        ({"optim": "adamw_torch"}, {}),
        ({"optim": "adafactor"}, {}),
        pytest.param({"optim": "adamw_bnb_8bit"}, {}, marks=needs_bitsandbytes),
        pytest.param({"optim": "paged_adamw_8bit"}, {}, marks=needs_bitsandbytes),
        ({"checkpointing": "full"}, {"checkpointing": "2 checkpointed calls in the first step"}),
        ({"attn_implementation": "eager"}, {"attn_implementation": "eager"}),
        ({"torch_empty_cache_steps": 1}, {"torch_empty_cache_steps": "every 1 steps, 1 times in the first"}),
        ({"expandable_segments": True}, {}),
        ({"dataloader_num_workers": 2, "dataloader_pin_memory": True}, {"dataloader_num_workers": "2"}),
        ({"adapter": {"rank": 8}, "precision": "bf16"}, {"adapter": "lora, 16384 of 155968 parameters trained"}),
        # adapters on packed weights train in pure bf16
        *(
            pytest.param({"adapter": {"rank": 8}, "quantization": packed, "precision": "pure_bf16"}, {
                "precision": "weights bfloat16/float32, layer outputs bfloat16"}, marks=needs_bitsandbytes)
            for packed in ("nf4", "int8")
        ),
        (INDUCTOR, {}),
        ({**INDUCTOR, "precision": "bf16", "checkpointing": "full"}, {}),
        # compiled, TF32 is on whatever was asked for, but in fp16
        (EAGER, {"tf32": "tf32"}),
        *(({**EAGER, "precision": precision}, {"tf32": "tf32"}) for precision in ("bf16", "pure_bf16")),
        ({**EAGER, "tf32": True}, {"tf32": "tf32"}),
        ({**EAGER, "precision": "fp16"}, {"tf32": "none"}),
        ({**EAGER, "precision": "fp16", "tf32": True}, {"tf32": "tf32"}),
    ],
    ids=str,
)  # fmt: skip
def test_each_knob_takes_effect(cuda, config, effects):
    seen = measured(cuda, config).effects
    assert seen == {**seen, **effects}


def test_the_steps_that_compile_or_record_graphs_are_not_measured(cuda):
    result = cuda.run(
        config={**INDUCTOR, "torch_compile_mode": "reduce-overhead"},
        workload=benches.misbehaviour("count_compilations"),
        limits={"memory_bytes": 4 * GIB, "timeout_s": 200, "discarded_s": 0.0, "discarded_steps": 1},
    )
    count, by_step = len(result.outcome.step_times_s), cuda.seen(result)
    assert by_step[-1] == by_step[-1 - count]
    assert min(by_step[-1].values()) > 0


def test_trials_are_forked_and_see_one_device_and_its_memory_in_full(cuda):
    """Importing the libraries has not touched the device, and a fork can use it."""
    assert cuda.runner.start().forkable
    assert cuda.seen(cuda.misbehave("count_devices")) == {"devices": 1}
    memory = measured(cuda, {}).memory
    assert 0 < memory.allocated_bytes <= memory.reserved_bytes <= memory.device_bytes
    assert memory.peak_bytes == memory.device_bytes
    assert memory.device_bytes - memory.reserved_bytes > 50 * MIB  # the context and the kernels


@needs_bitsandbytes
def test_paged_states_count_although_the_driver_names_no_process_for_them(cuda, tmp_path):
    wide = {"model": resolve(str(write_model(tmp_path, {**TINY_LLAMA, "vocab_size": 60_000})))}
    found = (measured(cuda, {"optim": name}, workload=wide).memory for name in ("adamw_bnb_8bit", "paged_adamw_8bit"))
    usual, paged = (memory.device_bytes - memory.reserved_bytes for memory in found)
    # Two states each: of the embedding in 32 bits, of the head in 8; the matrices of layers are too small to be paged.
    assert paged - usual >= 2 * (4 + 1) * 60_000 * TINY_LLAMA["hidden_size"]


def test_trials_in_turn_are_measured_beside_each_other_and_each_has_its_own_memory(cuda):
    configs = [{}, {"precision": "bf16", "per_device_train_batch_size": 8}]
    alone = [measured(cuda, config).memory.device_bytes for config in configs]
    results = cuda.in_turn(*configs, memory_bytes=4 * GIB, measure_time_s=1.0)
    assert [r.status for r in results] == [TrialStatus.COMPLETED] * 2, [r.outcome for r in results]
    assert all(r.measurement.steps_per_turn for r in results)
    assert [r.measurement.memory.device_bytes for r in results] == pytest.approx(alone, abs=32 * MIB)


def test_running_out_of_memory_is_told_in_a_line_of_our_own_and_the_next_trial_runs(cuda):
    result = cuda.run(config={"per_device_train_batch_size": 1 << 19}, limits={"memory_bytes": GIB})
    assert result.status is TrialStatus.OUT_OF_MEMORY
    assert "were asked for with" in result.outcome.cause
    assert result.outcome.cause.endswith("in use; the budget is 1.00 GiB")
    assert "CUDA out of memory. Tried to allocate" in cuda.log(result)
    assert cuda.run(limits={"memory_bytes": 10 * MIB}).status is TrialStatus.OUT_OF_MEMORY  # less than the context
    assert measured(cuda, {}).step_times_s


def test_a_trial_that_has_ended_or_is_killed_gives_its_memory_back(cuda):
    before = cuda_used_bytes("cuda:0")
    result = cuda.run(config={"per_device_train_batch_size": 1024}, limits={"memory_bytes": 8 * GIB})
    assert (result.status, result.warnings) == (TrialStatus.COMPLETED, ())
    assert cuda_used_bytes("cuda:0") - before < 128 * MIB
    result = cuda.misbehave("hold_device_memory", timeout_s=10)
    assert result.status is TrialStatus.TIMED_OUT
    assert cuda.seen(result)["held"] - before > 900 * MIB
    assert cuda_used_bytes("cuda:0") - before < 128 * MIB


@pytest.mark.parametrize("sharding", ["none", "fsdp_full"])
def test_two_ranks_have_a_device_each_and_their_messages_are_within_the_budget(cuda, sharding):
    if len(devices := like_devices("cuda:0")[:2]) < 2:
        pytest.skip("needs two devices alike")
    idle = [cuda_used_bytes(device) for device in devices]
    found = measured(cuda, {"parallelism": Parallelism(world_size=2, sharding=sharding)})
    assert found.effects["parallelism"].startswith("DDP over 2" if sharding == "none" else "FSDP2 over 2")
    assert found.memory.device_bytes > found.memory.reserved_bytes + 100 * MIB  # contexts, and what NCCL keeps
    assert all(cuda_used_bytes(device) - before < 128 * MIB for device, before in zip(devices, idle, strict=True))


# The cap on CUDA's allocator leaves room for what lies beside it, and follows that as it grows.


def test_the_cap_follows_what_lies_beside_the_allocator(cuda):
    """The allocator is filled up to its cap: at the start, and after 300 MiB were taken beside it."""
    seen = cuda.seen(cuda.misbehave("grow_beside_the_allocator", memory_bytes=BUDGET))
    assert seen["entered"]["reserved"] == 0  # loading kernels leaves nothing there
    assert BUDGET - 200 * MIB < seen["full"]["used"] <= BUDGET
    assert BUDGET - 40 * MIB < seen["full_again"]["used"] <= BUDGET
    assert seen["full_again"]["reserved"] < seen["full"]["reserved"] - 150 * MIB
    assert seen["full_again"]["used"] <= seen["peak"] <= BUDGET
    assert seen["over"]["used"] > BUDGET  # for a moment, by what was loaded amid the step
    assert seen["too_much"].startswith("needed 2.")
    assert seen["settled"]["used"] < seen["settled"]["peak"] == BUDGET  # the longest samples may not come again
    assert seen["outgrown"].startswith("needed 2.")
    assert seen["outgrown"].endswith("more than the budget of 2.00 GiB")
    for name in ("known", "after_attempt"):  # the peak of an attempt that was given up is forgotten
        assert seen[name] == pytest.approx(seen["before_attempt"], abs=4 * MIB)


@pytest.mark.parametrize(
    "misbehaviour", ["see_another_take_memory", "see_another_begin_meanwhile", "see_untold_memory_come_and_go"]
)
def test_memory_that_other_processes_take_or_give_back_is_not_the_trials(cuda, misbehaviour):
    before, *after = cuda.seen(cuda.misbehave(misbehaviour, memory_bytes=BUDGET))
    assert before > 50 * MIB
    assert after == [pytest.approx(before, abs=64 * MIB)] * len(after)


@pytest.mark.parametrize(
    ("misbehaviour", "status", "times"),
    [("be_crowded_out_once", TrialStatus.COMPLETED, 1), ("be_crowded_out", TrialStatus.CRASHED, 2)],
)
def test_a_trial_that_finds_the_device_filled_by_others_runs_again_once(cuda, monkeypatch, misbehaviour, status, times):
    monkeypatch.setattr("autotune.execution.runner.IDLE_LIMIT_S", 0.0)
    result = cuda.run(
        config={"per_device_train_batch_size": 1 << 14},
        workload=benches.misbehaviour(misbehaviour),
        limits={"memory_bytes": 8 * GIB},
    )
    assert result.status is status, result.outcome
    crowded = (cuda.run_directory / "trials" / "times.txt").read_text().split()
    assert crowded.count(cuda.directory(result).name) == times
    assert any("ran again" in warning for warning in result.warnings)
    assert read_value(TrialResult, cuda.directory(result) / "result.json") == result
    if status is TrialStatus.CRASHED:
        assert "other processes" in result.outcome.cause
        assert "other processes" in cuda.directory(result).joinpath("rank-0.json").read_text()


def test_a_trial_that_needs_more_than_the_budget_is_out_of_memory_whatever_others_hold(cuda):
    workload, limits = benches.misbehaviour("be_crowded_out"), {"memory_bytes": 3 * GIB, "timeout_s": 200}
    result = cuda.run(config={"per_device_train_batch_size": 1 << 20}, workload=workload, limits=limits)
    assert result.status is TrialStatus.OUT_OF_MEMORY


def test_steps_in_which_the_allocator_gave_its_cache_back_are_counted(cuda):
    result = cuda.misbehave("thrash", memory_bytes=BUDGET, discarded_steps=2)
    assert result.status is TrialStatus.COMPLETED, result.outcome
    assert result.outcome.alloc_retries >= 2
    assert any("allocator" in warning for warning in result.outcome.warnings)
    assert cuda.run(limits={"memory_bytes": BUDGET}).outcome.alloc_retries == 0


# TF32: what is said of it is what a trial's process does.


def test_a_process_that_begins_with_tf32_as_images_of_vendors_have_it_is_the_baselines(model, tmp_path, monkeypatch):
    monkeypatch.setenv(TF32_VARIABLE, "1")
    baseline = baseline_config(NOTHING_GIVEN, 8, make_facts(), detect("cuda:0"))
    assert baseline.tf32
    with (bench := Bench(model, tmp_path / "run", device="cuda:0")).runner:
        for config in ({}, {"precision": "bf16"}, EAGER):
            assert measured(bench, {"tf32": baseline.tf32, **config}).effects["tf32"] == "tf32"


@pytest.mark.parametrize(
    "config",
    [
        {"precision": "bf16", "torch_compile_mode": "max-autotune"},
        {"precision": "pure_bf16", "torch_compile_mode": "max-autotune-no-cudagraphs"},
        {"precision": "fp32", "torch_compile_mode": "max-autotune"},
        {"precision": "fp32", "torch_compile_mode": "max-autotune", "tf32": True},
        {"precision": "fp16", "torch_compile_mode": "max-autotune"},
    ],
    ids=str,
)
def test_inductors_autotuning_can_ask_for_the_precision_of_products(cuda, config):
    """It asks by torch's older interface, which raises after the newer was used alone."""
    result = cuda.run(config={**INDUCTOR, **config}, workload=benches.misbehaviour("ask_for_the_precision"))
    assert cuda.seen(result) == effective_tf32(result.request.config, detect("cuda:0"))


@pytest.mark.parametrize(
    ("prologue", "arguments", "is_on", "is_held"),
    [
        ("", (), False, False),
        ("", ("--tf32", "True"), True, False),
        ("", ("--torch_compile", "True"), False, False),
        ("import torch; torch.backends.cuda.matmul.allow_tf32 = True", (), True, True),
        ("import torch; torch.set_float32_matmul_precision('high')", ("--tf32", "False"), True, True),
        ("import torch; torch.backends.fp32_precision = 'tf32'", (), True, True),
    ],
)
def test_the_baseline_has_a_scripts_own_tf32_which_stays(cuda, tmp_path, prologue, arguments, is_on, is_held):
    code = script(tmp_path, f"{prologue}\n{SCRIPT}", "--output_dir", "out", *arguments)
    workload = Workload(model=cuda._model, task=Task.OWN, sequence_length=1, global_batch_size=None, own_code=code)
    found = cuda.runner.describe(DescribeRequest(workload=workload)).own
    assert bool(found.arguments.get("tf32")) == is_on
    assert ("tf32" in found.held) == is_held
