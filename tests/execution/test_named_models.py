"""Real trials of a tiny Llama: every knob takes effect, and what goes wrong has a status and a line."""

import math
import statistics
from typing import Any

import pytest
from conftest import TINY_LLAMA, write_model

from autotune.training.resolve import resolve
from autotune.values.trial import TrialStatus

MIB = 1 << 20


@pytest.mark.parametrize(
    "config",
    [
        {"adapter": {}, "precision": "bf16", "quantization": "nf4-double", "checkpointing": "full"},
        {"adapter": {}, "precision": "pure_bf16", "optim": "adamw_bnb_8bit"},
        {"precision": "bf16", "checkpointing": "full", "dataloader_num_workers": 1},
    ],
    ids=str,
)
def test_knobs_go_together(bench, config):
    assert math.isfinite(bench.measured(config=config).loss)


@pytest.mark.slow
@pytest.mark.parametrize("config", [{}, {"precision": "bf16", "checkpointing": "full"}], ids=str)
def test_inductor_compiles(bench, config):
    measurement = bench.measured(config={"torch_compile_backend": "inductor", **config})
    assert measurement.effects["torch_compile_backend"].startswith("inductor: ")
    assert measurement.first_step_s > 10 * statistics.fmean(measurement.step_times_s)


def test_fp16_on_a_cpu_is_invalid_and_says_what_happened_instead(bench):
    result = bench.run(config={"precision": "fp16"})
    assert result.status is TrialStatus.INVALID
    assert result.outcome.cause.startswith("fp16 was asked for, but autocast is off")
    assert result.outcome.memory.resident_bytes < 100 * MIB


def test_rates_are_those_of_the_workload(bench):
    measurement = bench.measured(
        config={"per_device_train_batch_size": 2}, workload={"global_batch_size": 6, "sequence_length": 16}
    )
    mean = statistics.fmean(measurement.step_times_s)
    assert measurement.accumulation_steps == 3
    assert measurement.samples_per_second == pytest.approx(6 / mean)
    interval = measurement.samples_per_second_interval
    assert interval.low <= measurement.samples_per_second <= interval.high
    assert 0 <= measurement.data_wait_share < 1


@pytest.mark.slow
def test_gradients_of_the_last_micro_step_are_kept_during_the_next(bench, tmp_path):
    """So that a trial of two micro-steps meets the memory of any number of them."""
    wide = {"vocab_size": 32000, "hidden_size": 512, "intermediate_size": 32, "num_hidden_layers": 1}
    model = resolve(str(write_model(tmp_path / "model", {**TINY_LLAMA, **wide})))
    gradients, config = 2 * 32000 * 512 * 4, {"optim": "sgd", "per_device_train_batch_size": 1}
    one, two, four = (
        bench.measured(config=config, workload={"model": model, "global_batch_size": steps}).memory.peak_bytes
        for steps in (1, 2, 4)
    )
    assert two > one + gradients / 4
    assert four == pytest.approx(two, abs=gradients / 4)


@pytest.mark.parametrize(
    ("config", "fixed", "cause"),
    [
        ({}, {"lr_scheduler_type": "square"}, "ValueError: "),
        ({}, {"no_such_argument": 1}, "TypeError: "),
        ({"attn_implementation": "flash_attention_2"}, {}, ""),
        ({}, {"learning_rate": 1e30}, "the loss became nan: not trainable like this"),
    ],
    ids=str,
)
def test_a_refusal_of_a_library_or_a_loss_that_is_no_number_is_invalid_with_its_reason(bench, config, fixed, cause):
    result = bench.run(config=config, workload={"fixed_arguments": fixed})
    assert result.status is TrialStatus.INVALID
    assert result.outcome.cause.startswith(cause)
    assert "\n" not in result.outcome.cause


def test_the_users_own_arguments_are_trained_with(bench):
    """A learning rate of zero leaves the weights alone, so that the loss is that of the untrained model."""
    still, moving = ({"learning_rate": rate, "warmup_steps": 0} for rate in (0.0, 0.1))
    losses = {bench.measured(workload={"fixed_arguments": fixed}).loss for fixed in (still, moving)}
    assert len(losses) == 2


@pytest.fixture(scope="module")
def texts(bench, tmp_path_factory) -> dict[str, Any]:
    """A workload of texts of many lengths, tokenized where trials look for them."""
    from autotune.training.texts import prepare
    from autotune.values.workload import Workload

    file = tmp_path_factory.mktemp("texts") / "texts.txt"
    file.write_text("\n".join("x" * (2 + 7 * i % 59) for i in range(200)))
    fields = {"sequence_length": 64, "global_batch_size": 8, "dataset": str(file)}
    workload = Workload(model=bench.request().workload.model, task="causal-lm", **fields)
    lengths, _ = prepare(workload, bench.run_directory / "data")
    return {**fields, "lengths": lengths}


def test_packing_and_padding_to_a_multiple_train_the_same(bench, texts):
    config = {"per_device_train_batch_size": 4}
    padded = bench.measured(config=config, workload=texts)
    for name, value, seen in (("packing", True, "one row each"), ("pad_to_multiple_of", 32, "to multiples of 32")):
        other = bench.measured(config={**config, name: value}, workload=texts)
        assert other.effects[name] == seen
        assert other.loss == pytest.approx(padded.loss, rel=1e-5)


@pytest.mark.parametrize(
    ("strategy", "seen"),
    [
        ("random", "of the same number of samples"),
        ("group_by_length", "of the same number of samples"),
        ("batch_rebalance", "of the same cost in tokens"),
    ],
)
def test_the_order_of_the_samples_is_in_effect(bench, texts, strategy, seen):
    config = {"per_device_train_batch_size": 2, "train_sampling_strategy": strategy}
    measured = bench.measured(config=config, workload=texts, limits={"measure_steps": 8, "relative_interval": 1e-9})
    assert measured.effects["train_sampling_strategy"] == seen
    assert measured.accumulation_steps == 4
