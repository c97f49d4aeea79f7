"""Trials of a study as results, and results as trials of a study."""

import optuna
import pytest
from factories import CRASHED, OUT_OF_MEMORY, make_config, make_measurement, make_plan, make_result, make_space_file
from optuna.trial import TrialState

from autotune.storage.writer import MEMORY, TrialConverter
from autotune.units import GIB
from autotune.values.trial import Memory, Purpose, TrialStatus

PARAMETERS = {
    "precision": ["fp32", "bf16"],
    "per_device_train_batch_size": {"choices": "lattice"},
    "adapter": [None, "lora"],
    "adapter.rank": {"choices": [8, 64], "when": {"adapter": ["lora"]}},
}
CONFIG = make_config(2, precision="bf16", adapter={"rank": 64})


@pytest.fixture
def trials() -> TrialConverter:
    plan = make_plan(space=make_space_file(PARAMETERS), memory_bytes=2 * GIB)
    return TrialConverter(plan, plan.search_space)


def test_every_legal_configuration_is_that_of_its_parameters():
    plan = make_plan(space=make_space_file(PARAMETERS))
    trials = TrialConverter(plan, plan.search_space)
    for config in plan.every_config():
        assert trials.config(trials.params(config)) == config


def test_a_completed_trial_is_told_with_its_throughput_and_its_headroom(trials):
    frozen = trials.frozen(make_result(CONFIG, make_measurement(12.0, memory=Memory(resident_bytes=GIB))))
    assert (frozen.state, frozen.value) == (TrialState.COMPLETE, 12.0)
    assert frozen.constraints == {"memory": -0.5}
    assert frozen.params == trials.params(CONFIG)


def test_running_out_of_memory_is_told_as_pruned_beyond_the_budget(trials):
    frozen = trials.frozen(make_result(CONFIG, OUT_OF_MEMORY))
    assert (frozen.state, frozen.value) == (TrialState.PRUNED, None)
    assert frozen.constraints["memory"] > 0


def test_a_crash_is_told_as_failed_without_a_constraint(trials):
    frozen = trials.frozen(make_result(CONFIG, CRASHED))
    assert (frozen.state, frozen.constraints) == (TrialState.FAIL, {})


def told(trials: TrialConverter, state: TrialState, value: float | None = None, config=CONFIG, **constraints: float):
    """A finished trial of a study that knows nothing of autotune."""
    params = trials.params(config)
    distributions = {name: trials.distributions[name] for name in params}
    study = optuna.create_study(direction="maximize")
    study.add_trial(
        optuna.create_trial(
            state=state, value=value, params=params, distributions=distributions, constraints=constraints
        )
    )
    return study.trials[0]


def test_value_and_constraint_are_samples_per_second_and_peak_memory(trials):
    result = trials.result(told(trials, TrialState.COMPLETE, 8.0, **{MEMORY: -0.25}))
    assert result.request.config == CONFIG
    assert result.measurement.samples_per_second == 8.0
    assert result.measurement.step_times_s == (2.0,)  # 16 samples
    assert result.measurement.memory.peak_bytes == 1.5 * GIB


@pytest.mark.parametrize(
    ("state", "value", "constraints", "status"),
    [
        (TrialState.PRUNED, None, {"memory": 0.1}, TrialStatus.OUT_OF_MEMORY),
        (TrialState.PRUNED, None, {}, TrialStatus.TIMED_OUT),
        (TrialState.COMPLETE, 8.0, {"memory": 0.1}, TrialStatus.OUT_OF_MEMORY),
        (TrialState.FAIL, None, {}, TrialStatus.CRASHED),
        (TrialState.COMPLETE, 0.0, {}, TrialStatus.CRASHED),
    ],
)
def test_what_did_not_run_or_broke_a_constraint_has_failed(trials, state, value, constraints, status):
    assert trials.result(told(trials, state, value, **constraints)).status is status


def test_the_baseline_is_known_by_its_parameters(trials):
    results = [trials.result(told(trials, TrialState.COMPLETE, 8.0, config)) for config in (make_config(), CONFIG)]
    assert [result.request.purpose for result in results] == [Purpose.BASELINE, Purpose.SEARCH]


def test_a_trial_without_a_parameter_of_the_space_is_not_ours(trials):
    assert not trials.is_ours(optuna.create_trial(state=TrialState.FAIL))
    assert trials.is_ours(told(trials, TrialState.FAIL))
