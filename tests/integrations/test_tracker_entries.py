"""What trackers are told: every figure of a trial, under plain names."""

from __future__ import annotations

import pytest
from factories import OUT_OF_MEMORY, make_config, make_failure, make_measurement, make_plan, make_result
from finished_searches import BEST, make_search

from autotune.integrations.tracker_entries import about, answer_of, entry_of, params_of
from autotune.units import GIB
from autotune.values.trial import Memory, Prediction, TrialStatus

PLAN = make_plan()


def test_a_completed_trial():
    prediction = Prediction(samples_per_second=12.0, peak_bytes=2 * GIB)
    entry = entry_of(PLAN, make_result(make_config(16), 10.0, number=7, prediction=prediction))
    assert (entry.name, entry.step, entry.completed) == ("trial-0007", 7, True)
    assert entry.params["per_device_train_batch_size"] == 16
    assert entry.metrics["samples_per_second"] == 10.0
    assert entry.metrics["peak_memory_gib"] == 1.0
    assert entry.metrics["predicted_samples_per_second"] == 12.0
    assert entry.metrics["predicted_peak_memory_gib"] == 2.0
    assert entry.tags["status"] == "completed"
    assert entry.tags["changes"] == "micro-batch 16"


def test_a_trial_that_failed_says_why():
    failure = make_failure(TrialStatus.OUT_OF_MEMORY, "x" * 5000, memory=Memory(resident_bytes=GIB))
    entry = entry_of(PLAN, make_result(outcome=failure))
    assert not entry.completed
    assert entry.tags["status"] == "out of memory"
    assert len(entry.tags["cause"]) == 1000
    assert entry.metrics["peak_memory_gib"] == 1.0
    assert "samples_per_second" not in entry.metrics
    assert "peak_memory_gib" not in entry_of(PLAN, make_result(outcome=OUT_OF_MEMORY)).metrics


def test_what_cant_be_told_is_left_out():
    own_loop = make_measurement(data_wait_share=None, loss=None)
    metrics = entry_of(PLAN, make_result(outcome=own_loop)).metrics
    assert not {"data_wait_share", "loss", "tokens_per_second"} & set(metrics)


@pytest.mark.parametrize(
    ("config", "shown"),
    [
        (make_config(), {"adapter": "none", "torch_compile_backend": "none", "tf32": False}),
        (make_config(adapter={"rank": 8}), {"adapter": "lora", "adapter.rank": 8}),
        (make_config(parallelism={"world_size": 2}), {"parallelism.world_size": 2}),
    ],
)
def test_a_configuration_is_plain_parameters(config, shown):
    params = params_of(config)
    assert {name: params[name] for name in shown} == shown
    assert any(name.startswith("parallelism") for name in params) == (not config.parallelism.is_single)


def test_the_answer(tmp_path):
    _, result = make_search(tmp_path / "run")
    entry = answer_of(result)
    assert entry.name == "answer"
    assert entry.params == params_of(BEST)
    assert entry.metrics["speedup"] == result.speedup.ratio
    assert entry.metrics["baseline_samples_per_second"] == pytest.approx(10.0)
    assert entry.tags["status"] == "faster"


def test_what_a_search_is_about():
    assert about(PLAN)["model"] == "tiny"
    assert about(PLAN)["memory_budget_gib"] == "8.00"
