"""What every runner promises; a runner's tests subclass it and bring the fixtures."""

import pytest

from autotune.execution.runner import Runner
from autotune.values.trial import Failure, TrialRequest, TrialStatus


class RunnerContract:
    """Fixtures: `runner`, and the requests `completing`, `starved` of memory, `hurried` by its limit, `impossible`."""

    def test_a_trial_that_completes_is_measured(self, runner: Runner, completing: TrialRequest):
        result = runner.run(completing)
        assert result.request == completing
        assert result.status is TrialStatus.COMPLETED
        assert result.measurement.samples_per_second > 0
        assert result.measurement.memory.peak_bytes <= completing.limits.memory_bytes
        assert result.duration_s > 0

    def test_running_out_of_memory_is_a_status(self, runner: Runner, starved: TrialRequest):
        assert failure(runner, starved).status is TrialStatus.OUT_OF_MEMORY

    def test_a_time_limit_is_a_status(self, runner: Runner, hurried: TrialRequest):
        assert failure(runner, hurried).status is TrialStatus.TIMED_OUT

    def test_a_trial_that_can_not_be_run_is_a_result(self, runner: Runner, impossible: TrialRequest):
        assert failure(runner, impossible).status not in (TrialStatus.OUT_OF_MEMORY, TrialStatus.TIMED_OUT)

    def test_a_trial_runs_whatever_came_before_it(
        self, runner: Runner, starved: TrialRequest, impossible: TrialRequest, completing: TrialRequest
    ):
        runner.run(starved)
        runner.run(impossible)
        assert runner.run(completing).status is TrialStatus.COMPLETED


class TrainingContract(RunnerContract):
    """Of a runner whose trials train: it brings `runner`, the test suite's `bench` and `misbehaviour` the requests."""

    @pytest.fixture
    def completing(self, bench):
        return bench.request()

    @pytest.fixture
    def starved(self, bench):
        return bench.request(config={"per_device_train_batch_size": 256}, limits={"memory_bytes": 20 << 20})

    @pytest.fixture
    def hurried(self, bench, misbehaviour):
        return bench.request(workload=misbehaviour("ignore_sigterm"), limits={"timeout_s": 1})

    @pytest.fixture
    def impossible(self, bench, misbehaviour):
        return bench.request(workload=misbehaviour("raise_an_error"))


def failure(runner: Runner, request: TrialRequest) -> Failure:
    """Run what fails; the cause is one line."""
    result = runner.run(request)
    assert result.request == request
    assert isinstance(result.outcome, Failure)
    assert result.outcome.cause
    assert "\n" not in result.outcome.cause
    return result.outcome
