"""Predicted memory against torch's own allocator: a trial for each rule, on a CUDA device or its stand-in."""

from dataclasses import replace

import own_modules
import pytest
from factories import make_limits, make_request, make_workload
from vision_language import tiny_vision_language, with_images

from autotune.api import planned, subject_of
from autotune.cost.family import family_of, shape_of
from autotune.cost.model import CostModel
from autotune.cost.profiler import profile
from autotune.cost.rates import rates_by_table
from autotune.execution.runner import LocalRunner
from autotune.planning.options import SearchOptions
from autotune.search.cost_model import cost_model
from autotune.search.run import backend_of
from autotune.storage.run_directory import RunDirectory
from autotune.training.resolve import default_task, resolve
from autotune.values.budget import SoakTask
from autotune.values.config import Parallelism, TrainConfig
from autotune.values.estimate import Evaluation
from autotune.values.hardware import detect
from autotune.values.time_spent import Stopwatch
from autotune.values.trial import Purpose
from autotune.values.workload import Workload

pytestmark = [pytest.mark.cuda, pytest.mark.timeout(600)]

LORA = {"kind": "lora", "rank": 8}


@pytest.fixture(scope="module")
def device():
    return detect("cuda:0")


@pytest.fixture(scope="module")
def runner(tmp_path_factory, device):
    with LocalRunner(tmp_path_factory.mktemp("run"), device) as made:
        yield made


CHECKPOINTED, LIGER = {"precision": "bf16", "checkpointing": "full"}, {"use_liger_kernel": True}
RULES = {
    "math for grouped keys in fp32": ("Qwen/Qwen2-0.5B", 1024, 2, {}),
    "efficient in fp32": ("gpt2", 1000, 4, {}),
    "a trained bias": ("t5-small", 512, 8, CHECKPOINTED),
    "log-probabilities of 16 bits": ("t5-small", 128, 32, {**CHECKPOINTED, "adapter": LORA}),
    "softmax multiplies first": ("bert-base-uncased", 512, 8, {"attn_implementation": "eager", "adapter": LORA}),
    "a leaf out of the embeddings": (
        "bert-base-uncased", 512, 16, {"adapter": LORA, "checkpointing": "full", "optim": "sgd"}
    ),
    "tied gradients are not added in place": (
        "Qwen/Qwen2-0.5B", 256, 4,
        {"attn_implementation": "eager", "checkpointing": "full", "optim": "paged_adamw_8bit"},
    ),
    "blocks that are larger than what was asked for": (
        "t5-base", 256, 4, {"precision": "pure_bf16", "checkpointing": "full", "optim": "rmsprop"}
    ),
    "scales of their own": ("gpt2-medium", 256, 8, {**CHECKPOINTED, "optim": "adamw_bnb_8bit"}),
    "expandable segments": ("gpt2-medium", 256, 8, {**CHECKPOINTED, "expandable_segments": True}),
    "a loss in chunks": ("Qwen/Qwen2-0.5B", 1024, 2, {"precision": "bf16", "chunked_loss": True}),
    "logits of an evaluation": ("gpt2", 512, 4, {"precision": "bf16"}, 32),
    "large blocks of an evaluation": ("bert-base-uncased", 512, 8, {"adapter": LORA}, 64),
    "Liger: weights of the head, cast and cached": ("Qwen/Qwen2-0.5B", 1024, 4, {**LIGER, "precision": "bf16"}),
    "Liger: gradients of the head in fp32": ("Qwen/Qwen2-0.5B", 1000, 3, LIGER),
    "programs of inductor, dropout and all": (
        "distilbert/distilgpt2", 256, 4, {**CHECKPOINTED, "torch_compile_backend": "inductor"}
    ),
    "products in fp8": ("EleutherAI/pythia-70m", 512, 8, {"precision": "fp8", "torch_compile_backend": "inductor"}),
    "Liger: long": ("meta-llama/Llama-3.2-1B", 16384, 1, {**LIGER, **CHECKPOINTED}),
}  # fmt: skip


@pytest.mark.parametrize("rule", RULES)
def test_the_prediction_is_allocated(runner, device, rule):
    model, length, size, fields, *batch = RULES[rule]
    if "use_liger_kernel" in fields:
        pytest.importorskip("liger_kernel")
    if fields.get("precision") == "fp8" and not device.has_fp8:
        pytest.skip("needs compute capability 8.9")
    workload = named(model, length, size, target_length=length)
    config = {"per_device_train_batch_size": size, "attn_implementation": "sdpa", **fields}
    check(runner, device, workload, TrainConfig.model_validate(config), *(Evaluation(batch=n) for n in batch))


def named(model: str, length: int, batch: int, **sizes) -> Workload:
    spec = resolve(model)
    return make_workload(model=spec, task=default_task(spec), sequence_length=length, global_batch_size=batch, **sizes)


def test_the_prediction_of_ddp_is_allocated(device, tmp_path):
    """Without checkpointing it looks for unused parameters and hands out a copy of the outputs; buckets take memory."""
    if device.count < 2:
        pytest.skip("needs two devices")
    with LocalRunner(tmp_path, device) as runner:
        check(runner, device, named("t5-small", 128, 32, target_length=128), over_two(16))


def over_two(size: int, *, knobs=(), **spread) -> TrainConfig:
    return TrainConfig(
        per_device_train_batch_size=size, precision="bf16", attn_implementation="sdpa",
        parallelism=Parallelism(world_size=2, **spread), **dict(knobs),
    )  # fmt: skip


LONG = {"checkpointing": "full", "chunked_loss": True}
FULL, GRAD_OP = ({"sharding": sharding} for sharding in ("fsdp_full", "fsdp_grad_op"))
RING = {"sharding": "fsdp_full", "sequence_parallel": 2}


SLOW_FSDP = [
    ("meta-llama/Llama-3.2-1B", 32768, FULL, LONG, 2),  # peaks beside a tied head
    ("meta-llama/Llama-3.2-1B", 2048, FULL, {}, 1),
    ("EleutherAI/pythia-410m", 512, FULL, {}, 2),
    ("Qwen/Qwen3-0.6B", 4096, GRAD_OP, LONG, 2),
    ("Qwen/Qwen3-0.6B", 16384, RING, {**LONG, "adapter": LORA}, 2),
    ("meta-llama/Llama-3.2-1B", 65536, RING, LONG, 2),
]


@pytest.mark.parametrize(
    ("model", "length", "spread", "knobs", "micro_batches"),
    [
        ("EleutherAI/pythia-160m", 2048, FULL, LONG, 2),  # peaks in the loss, beside the head
        ("Qwen/Qwen3-0.6B", 8192, RING, {}, 1),
        *(pytest.param(*row, marks=pytest.mark.slow) for row in SLOW_FSDP),
    ],
)
def test_the_prediction_of_fsdp_is_allocated_also_where_devices_pass_on_keys_and_values(
    device, tmp_path, model, length, spread, knobs, micro_batches
):
    if device.count < 2:
        pytest.skip("needs two devices")
    config = over_two(1, knobs=knobs, **spread)
    with LocalRunner(tmp_path, device) as runner:
        workload = named(model, length, micro_batches * config.parallelism.data_parallel)
        check(runner, device, workload, config, allocated=0.005)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "length", "spread"),
    [
        ("meta-llama/Llama-3.2-1B", 1024, {"sharding": "zero_1"}),  # peaks at the step
        ("meta-llama/Llama-3.2-1B", 1024, {"sharding": "zero_2"}),
        ("meta-llama/Llama-3.2-1B", 1024, {"sharding": "zero_3"}),
        ("Qwen/Qwen3-0.6B", 16384, {"sharding": "zero_3", "sequence_parallel": 2}),
        ("meta-llama/Llama-3.2-1B", 32768, {"sharding": "zero_3", "sequence_parallel": 2}),
    ],
)
def test_the_prediction_of_zero_is_allocated_also_where_devices_share_the_tokens(
    device, tmp_path, model, length, spread
):
    """Reserved memory is more, which nothing predicts: DeepSpeed makes and frees large blocks before it trains."""
    pytest.importorskip("deepspeed")
    if device.count < 2:
        pytest.skip("needs two devices")
    config = over_two(1, knobs={"checkpointing": "full"} if length > 1024 else {}, **spread)
    with LocalRunner(tmp_path, device, entry="unchecked_ranks:run_trial") as runner:
        check(runner, device, named(model, length, config.parallelism.data_parallel), config, reserved=0.2)


# The others compute from values on the device how images are cut, and on the stand-in those are zero.
@pytest.mark.parametrize("name", ["llava", "paligemma", "internvl", "gemma3"])
def test_the_prediction_of_images_and_texts_is_allocated(runner, device, tmp_path, name):
    workload = with_images(tiny_vision_language(tmp_path, name, wide=8, vocabulary=16000), name, global_batch_size=16)
    check(runner, device, workload, TrainConfig(per_device_train_batch_size=8, attn_implementation="sdpa"))


SLOW = [
    pytest.param(name, marks=pytest.mark.slow) for name in ("language, checkpointed by itself", "towers", "around BERT")
]


@pytest.mark.parametrize("name", ["Llama, taught", *SLOW])
def test_the_prediction_of_a_training_of_ones_own_is_allocated(device, tmp_path, name):
    words = ["python", own_modules.__file__, name, "--output_dir", "out", "--bf16", "True"]
    subject, directory = subject_of(SearchOptions(model=""), script=words), RunDirectory(tmp_path)
    with backend_of(subject.options.fleet, tmp_path, device=device.device) as backend:
        plan = planned(subject, directory, backend, print, Stopwatch("planning"))
        model = cost_model(plan, backend.asker, tmp_path, print)
        result = backend.pool.run(plan.request_of(plan.baseline, Purpose.BASELINE, number=0, timeout_s=300.0))
    assert result.measurement, result.outcome
    told, memory = model.estimate(plan.baseline).memory, result.measurement.memory
    assert told.allocated_peak_bytes == pytest.approx(memory.allocated_bytes, rel=0.015)
    assert told.reserved_peak_bytes == pytest.approx(memory.reserved_bytes, rel=0.1)


def check(runner, device, workload, config, evaluation=None, allocated=0.015, reserved=0.1):
    """Hold the prediction for a configuration against a trial of it, or against a soak that evaluates."""
    request = make_request(
        config=config, workload=workload, device=device.device, accumulation_steps=workload.accumulation_steps(config),
        task=SoakTask(eval_batch_sizes=(evaluation.batch,)) if evaluation else None,
        limits=make_limits(memory_bytes=device.memory_bytes, discarded_steps=1, measure_steps=2, timeout_s=500),
    )  # fmt: skip
    result = runner.run(request)
    assert result.measurement, result.outcome
    traced = profile(workload.model, family_of(config, device), shape_of(workload))
    model = replace(CostModel.of(workload, device, rates_by_table(device), [traced]), evaluation=evaluation)
    expected = model.breakdown(config, traced)
    memory = result.measurement.memory
    assert expected.allocated_peak_bytes == pytest.approx(memory.allocated_bytes, rel=allocated)
    assert expected.reserved_peak_bytes == pytest.approx(memory.reserved_bytes, rel=reserved)  # t5-small: 8 %
