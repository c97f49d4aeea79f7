"""Real trials of two processes, each way of spreading a training: what took effect, and the losses of one process.

On a CPU accelerate has to be told that processes can shard (`sharding_on_cpu`); DeepSpeed and DDP need nothing.
"""

import functools
from typing import Any

import pytest
from benches import Bench, completed
from conftest import write_model

from autotune.execution.runner import LocalRunner
from autotune.training.resolve import resolve
from autotune.training.texts import prepare
from autotune.values.budget import LossTask
from autotune.values.config import Parallelism
from autotune.values.hardware import detect
from autotune.values.model import Task
from autotune.values.trial import Measurement

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

STEPS = 4
TASK = LossTask(steps=STEPS, pass_steps=STEPS, seed=1)
LIMITS = {
    "memory_bytes": 2 << 30,
    "timeout_s": 300,  # DeepSpeed compiles for a minute, the first time
    "measure_steps": STEPS,
    "measure_time_s": 1e9,
    "relative_interval": 1e-12,
}
# AdamW takes the same step whatever the gradients are multiplied by, and so does anything that is clipped.
SGD, UNCLIPPED = {"optim": "sgd"}, {"max_grad_norm": 0.0, "learning_rate": 0.3}
TINY_T5 = {
    "model_type": "t5", "vocab_size": 512, "d_model": 64, "d_ff": 128, "d_kv": 16, "num_layers": 2, "num_heads": 4,
    "dropout_rate": 0.0, "decoder_start_token_id": 0,
}  # fmt: skip


@pytest.fixture(scope="module")
def ranks(tmp_path_factory, tiny_llama):
    """Return a function that runs a trial of a tiny model on two processes, whose losses are kept."""
    bench = Bench(resolve(str(tiny_llama)), tmp_path_factory.mktemp("ranks"))
    bench.runner = LocalRunner(bench.run_directory, detect("cpu"), entry="sharding_on_cpu:run_trial")
    t5 = {"model": resolve(str(write_model(tmp_path_factory.mktemp("tiny-t5"), TINY_T5))), "task": Task.SEQ2SEQ_LM}
    with bench.runner:
        yield functools.partial(spread_trial, bench, t5 | {"target_length": 16})


def spread_trial(bench, t5, model="llama", *, world_size=2, micro_batch=2, knobs=None, data=None, **spread):
    config = {"per_device_train_batch_size": micro_batch, **(knobs or {})}
    config["parallelism"] = Parallelism(world_size=world_size, **spread)
    workload = {"fixed_arguments": UNCLIPPED if config.get("optim") == "sgd" else {}, "global_batch_size": 8}
    if model == "t5":
        config["attn_implementation"] = "eager"
        workload |= t5
    if data is not None:
        workload |= data
        prepare(bench.request(workload=workload).workload, bench.run_directory / "data")
    return bench.check(TASK, config=config, workload=workload, limits=LIMITS)


@pytest.fixture(scope="module")
def alone(ranks):
    """Return a function that gives the losses of one process at the same global batch."""

    @functools.cache
    def losses(model: str = "llama", **knobs: Any) -> tuple[float, ...]:
        return completed(ranks(model, world_size=1, micro_batch=4, knobs=knobs)).curve.losses

    return losses


CHECKPOINTING = {"knobs": {"checkpointing": "full"}}
FOUR = {"world_size": 4, "tensor_parallel": 2, "sharding": "fsdp_full", "micro_batch": 4}
DDP = {"ddp_bucket_cap_mb": 1, "ddp_find_unused_parameters": False, "ddp_broadcast_buffers": False}
WAYS: dict[str, tuple[dict[str, Any], str]] = {
    "ddp": ({}, "DDP over 2, buckets of 25 MB"),
    "ddp, less": ({**DDP, "micro_batch": 4}, "DDP over 2, buckets of 1 MB, outputs not copied, buffers not sent"),
    "fsdp full": ({"sharding": "fsdp_full"}, "FSDP2 over 2, 6 units"),
    "fsdp grad-op": ({"sharding": "fsdp_grad_op"}, "FSDP2 over 2, 6 units"),
    "fsdp offload": ({"sharding": "fsdp_full", "offload": "parameters"}, "FSDP2 over 2, 6 units, offloaded"),
    # a checkpointed layer and its wrapper
    "fsdp checkpointing": ({"sharding": "fsdp_full", **CHECKPOINTING}, "FSDP2 over 2, 8 units"),
    "fsdp loss in chunks": ({"sharding": "fsdp_full", "knobs": {"chunked_loss": True}}, "FSDP2 over 2, 6 units"),
    "tensor parallel beside fsdp": (FOUR, "tensor parallel 2, FSDP2 over 2"),
    "tensor parallel": ({"tensor_parallel": 2, "micro_batch": 4}, "tensor parallel 2"),
    "zero 3 checkpointing": ({"sharding": "zero_3", **CHECKPOINTING}, "DeepSpeed ZeRO-3 over 2"),
}
for stage, what in ((1, "optimizer"), (2, "optimizer"), (3, "parameters")):
    sharding, seen = {"sharding": f"zero_{stage}"}, f"DeepSpeed ZeRO-{stage} over 2"
    WAYS[f"zero {stage}"] = (sharding, seen)
    WAYS[f"zero {stage} offload"] = ({**sharding, "offload": what}, f"{seen}, {what} offloaded to the host")
CASES = [("llama", way) for way in WAYS] + [("t5", way) for way in ("ddp", "zero 1", "zero 2", "zero 3")]


@pytest.mark.parametrize(("model", "way"), CASES)
def test_two_processes_train_as_one_does(ranks, alone, model, way):
    if way.startswith("zero"):
        pytest.importorskip("deepspeed")
    spread, seen = WAYS[way]
    result = completed(ranks(model, **spread))
    assert result.effects["parallelism"] == seen
    assert result.curve.losses == pytest.approx(alone(model), rel=1e-4)


@pytest.mark.parametrize("sharding", ["none", "fsdp_full", "zero_2"])
def test_micro_batches_are_balanced_over_processes(ranks, tmp_path, sharding):
    if sharding.startswith("zero"):
        pytest.importorskip("deepspeed")
    file = tmp_path / "texts.txt"
    file.write_text("\n".join("x" * (2 + 7 * i % 59) for i in range(200)))
    data, knobs = {"dataset": str(file)}, {"train_sampling_strategy": "batch_rebalance"}
    balanced = completed(ranks(knobs=knobs, data=data, sharding=sharding))
    assert balanced.effects["train_sampling_strategy"] == "of the same cost in tokens"
    one = completed(ranks(world_size=1, micro_batch=4, data=data))
    assert balanced.curve.losses == pytest.approx(one.curve.losses, rel=1e-4)


SHARED = {"sharding": "zero_3", "sequence_parallel": 2, "micro_batch": 4}


@pytest.mark.parametrize(
    ("spread", "seen"),
    [
        (SHARED, "DeepSpeed ZeRO-3 over 2, sequence parallel 2"),
        ({**SHARED, "world_size": 4, "micro_batch": 2}, "DeepSpeed ZeRO-3 over 4, sequence parallel 2"),
        ({**SHARED, "knobs": {**SGD, "checkpointing": "full"}}, "sequence parallel 2"),
    ],
)
def test_ranks_that_share_the_tokens_of_samples_train_as_one_process_does(ranks, alone, spread, seen):
    pytest.importorskip("deepspeed")
    result = completed(ranks(**{"knobs": SGD, **spread}))
    assert seen in result.effects["parallelism"]
    assert result.curve.losses == pytest.approx(alone(**SGD), rel=1e-4)
    steps = result.step_times_s
    assert result.samples_per_second == pytest.approx(8 * len(steps) / sum(steps))  # a shared sample counts once


RING = {"sharding": "fsdp_full", "sequence_parallel": 2, "micro_batch": 4}


@pytest.mark.parametrize(
    "spread",
    [RING, {**RING, "world_size": 4, "micro_batch": 2}, {**RING, "knobs": {**SGD, "chunked_loss": True}}],
)
def test_ranks_that_pass_on_keys_and_values_train_as_one_process_does(ranks, alone, spread):
    spread = {"knobs": SGD, **spread}
    result = completed(ranks(**spread | {"knobs": {**spread["knobs"], "attn_implementation": "sdpa"}}))
    assert ", sequence parallel 2, " in result.effects["parallelism"]
    assert result.curve.losses == pytest.approx(alone(**SGD), rel=1e-4)


def test_zero_2_makes_the_gradients_of_shared_samples_too_large(ranks, alone):
    pytest.importorskip("deepspeed")
    losses = completed(ranks(**{**SHARED, "sharding": "zero_2", "knobs": SGD})).curve.losses
    assert losses[0] == pytest.approx(alone(**SGD)[0], rel=1e-5)
    assert losses != pytest.approx(alone(**SGD), rel=1e-4)


@pytest.mark.parametrize(
    ("spread", "why"),
    [
        ({"sharding": "fsdp_full"}, "is shared with a parameter already managed by another FSDP group"),
        ({"tensor_parallel": 2, "micro_batch": 4}, "`T5ForConditionalGeneration` has no `tp_plan`"),
    ],
)
def test_a_spread_that_is_refused_for_t5_would_indeed_fail(ranks, spread, why):
    outcome = ranks("t5", **spread).outcome
    assert not isinstance(outcome, Measurement)
    assert why in outcome.cause


def test_a_spread_that_silently_becomes_ddp_is_no_result(tmp_path, tiny_llama):
    with (bench := Bench(resolve(str(tiny_llama)), tmp_path / "run")).runner:
        outcome = spread_trial(bench, {}, sharding="fsdp_full").outcome
    assert not isinstance(outcome, Measurement)
    assert "fsdp_full was asked for, but the model is wrapped as DistributedDataParallel" in outcome.cause
