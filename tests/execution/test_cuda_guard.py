"""The cap on CUDA's allocator: it leaves room for what lies beside it, and follows that as it grows."""

from __future__ import annotations

import json

import benches
import pytest

from autotune.value import read_value
from autotune.values.trial import TrialResult, TrialStatus

pytestmark = pytest.mark.cuda

MIB, GIB = 1 << 20, 1 << 30
BUDGET = 2 * GIB


@pytest.fixture(scope="module")
def seen(cuda) -> dict:
    """What a process saw that takes memory beside the allocator; see `misbehaving.grow_beside_the_allocator`."""
    result = cuda.misbehave("grow_beside_the_allocator", memory_bytes=BUDGET)
    return json.loads((cuda.directory(result) / "seen.json").read_text())


def test_the_cap_follows_what_lies_beside_the_allocator(seen):
    """All that the allocator may have is taken: at the start, and after 300 MiB came to lie beside it."""
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
    result = cuda.misbehave(misbehaviour, memory_bytes=BUDGET)
    before, *after = json.loads((cuda.directory(result) / "seen.json").read_text())
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
    result = cuda.run(
        config={"per_device_train_batch_size": 1 << 20},
        workload=benches.misbehaviour("be_crowded_out"),
        limits={"memory_bytes": 3 * GIB, "timeout_s": 200},
    )
    assert result.status is TrialStatus.OUT_OF_MEMORY


def test_the_cause_is_one_line_of_our_own(cuda):
    result = cuda.run(config={"per_device_train_batch_size": 1 << 19}, limits={"memory_bytes": 1 * GIB})
    assert result.status is TrialStatus.OUT_OF_MEMORY
    assert "were asked for with" in result.outcome.cause
    assert result.outcome.cause.endswith("in use; the budget is 1.00 GiB")
    assert "CUDA out of memory. Tried to allocate" in result.outcome.log_tail


def test_steps_in_which_the_allocator_gave_its_cache_back_are_counted(cuda):
    result = cuda.misbehave("thrash", memory_bytes=BUDGET, discarded_steps=2)
    assert result.status is TrialStatus.COMPLETED, result.outcome
    assert result.outcome.alloc_retries >= 2
    assert any("allocator" in warning for warning in result.outcome.warnings)
    assert cuda.run(limits={"memory_bytes": BUDGET}).outcome.alloc_retries == 0
