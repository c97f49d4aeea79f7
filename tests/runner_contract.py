"""What every runner promises; a runner's tests subclass it and bring the fixtures."""

from autotune.execution.runner import Runner
from autotune.trial import Failure, TrialRequest, TrialStatus


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


def failure(runner: Runner, request: TrialRequest) -> Failure:
    """Run what fails; the cause is one line."""
    result = runner.run(request)
    assert result.request == request
    assert isinstance(result.outcome, Failure)
    assert result.outcome.cause
    assert "\n" not in result.outcome.cause
    return result.outcome
