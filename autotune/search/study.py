"""What a trial of an Optuna study says of a configuration, and how a result is told to a study. Pure."""

from __future__ import annotations

import optuna
from optuna.distributions import CategoricalDistribution
from optuna.trial import FrozenTrial, TrialState

from autotune.planning.plan import SearchPlan, request_of
from autotune.space.space import Point, SearchSpace
from autotune.values.config import TrainConfig
from autotune.values.trial import (
    Failure,
    Interval,
    Measurement,
    Memory,
    Purpose,
    TrialRequest,
    TrialResult,
    TrialStatus,
)

# The constraint's name: peak memory beyond the budget, as a share of the budget.
MEMORY = "memory"

# What a trial that ran out of memory is told to have needed beyond the budget: the peak that was seen may lie below it.
_BEYOND_BUDGET = 0.01

_UNKNOWN = Memory()


class StudyTrials:
    """The trials of the studies of one search: from parameters to configurations, from results to values, and back.

    Args:
        plan: The search.
        space: Its space, whose parameters are the study's.
    """

    def __init__(self, plan: SearchPlan, space: SearchSpace) -> None:
        self._plan = plan
        self._space = space
        self.distributions = {d.name: CategoricalDistribution(d.choices) for d in space.dimensions}

    def frozen(self, result: TrialResult) -> FrozenTrial:
        """Return a finished trial as one of a study."""
        params = self.params(result.request.config)
        return optuna.create_trial(
            state=self.state(result.status),
            value=self.value(result),
            params=params,
            distributions={name: self.distributions[name] for name in params},
            constraints=self.constraints(result),
        )

    def is_ours(self, trial: FrozenTrial) -> bool:
        """Whether a trial has parameters of the space; one that ended before any was suggested hasn't."""
        return bool(trial.params.keys() & self.distributions.keys()) or not self.distributions

    def config(self, params: Point) -> TrainConfig:
        """Return the configuration of a trial's parameters; what they don't name is the baseline's."""
        config = self._space.config(self._space.complete(params))
        return self._plan.baseline if self.params(config) == self.params(self._plan.baseline) else config

    def params(self, config: TrainConfig) -> Point:
        """Return the part of a configuration's point that the study has parameters for."""
        whole = self._space.complete(self._space.point(config))
        return {name: value for name, value in whole.items() if value in self.distributions[name].choices}

    def value(self, result: TrialResult) -> float | None:
        """Return the samples per second that a result counts for, None where it failed."""
        return self._plan.objective.rate(result.measurement) if result.measurement else None

    def state(self, status: TrialStatus) -> TrialState:
        """Return the state in which samplers learn what they can: out of memory as pruned, worse than any value."""
        if status is TrialStatus.COMPLETED:
            return TrialState.COMPLETE
        return TrialState.PRUNED if status is TrialStatus.OUT_OF_MEMORY else TrialState.FAIL

    def constraints(self, result: TrialResult) -> dict[str, float]:
        """Return memory beyond the budget as a share of it, where it is known: positive means too much."""
        if result.status is TrialStatus.OUT_OF_MEMORY:
            return {MEMORY: _BEYOND_BUDGET}
        if result.measurement is None or not result.measurement.memory.is_known:
            return {}
        return {MEMORY: result.measurement.memory.peak_bytes / self._plan.memory_bytes - 1}

    def result(self, trial: FrozenTrial) -> TrialResult:
        """Return a finished trial of a study as a result: all that its state, value and constraints say."""
        config = self.config(trial.params)
        if trial.state is TrialState.PRUNED or any(value > 0 for value in trial.constraints.values()):
            return self._failed(config, trial.number, TrialStatus.OUT_OF_MEMORY)
        if trial.state is TrialState.FAIL or trial.value is None or trial.value <= 0:
            return self._failed(config, trial.number, TrialStatus.CRASHED)
        share = trial.constraints.get(MEMORY)
        peak_bytes = None if share is None else round((1 + share) * self._plan.memory_bytes)
        memory = Memory(**{"resident_bytes" if self._plan.hardware.is_cpu else "device_bytes": peak_bytes})
        return self.assumed(config, trial.value, memory, number=trial.number)

    def _failed(self, config: TrainConfig, number: int, status: TrialStatus) -> TrialResult:
        request = self._request(config, number)
        return TrialResult(request=request, outcome=Failure(status=status, cause="as the study says"), duration_s=0.0)

    def assumed(self, config: TrainConfig, rate: float, memory: Memory = _UNKNOWN, *, number: int = 0) -> TrialResult:
        """Return a trial of which no more is known, or assumed, than its samples per second and its peak memory."""
        request = self._request(config, number)
        step_s = request.workload.samples_per_step(config) / rate
        measurement = Measurement(
            step_times_s=(step_s,),
            accumulation_steps=request.accumulation_steps,
            samples_per_second=rate,
            samples_per_second_interval=Interval(low=rate, high=rate),
            memory=memory,
            startup_s=0.0,
            first_step_s=step_s,
            data_wait_share=None,
            loss=0.0,
            effects={},
        )
        return TrialResult(request=request, outcome=measurement, duration_s=0.0)

    def _request(self, config: TrainConfig, number: int) -> TrialRequest:
        purpose = Purpose.BASELINE if config == self._plan.baseline else Purpose.SEARCH
        return request_of(self._plan, config, purpose, number=number, timeout_s=self._plan.budget.trial_timeout_s)
