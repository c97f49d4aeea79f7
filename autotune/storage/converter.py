"""Converts between trials of an Optuna study and results of a search."""

from __future__ import annotations

import datetime
import math

import optuna
from optuna.distributions import CategoricalDistribution
from optuna.trial import FrozenTrial, TrialState

from autotune.planning.plan import SearchPlan, request_of
from autotune.space.space import Point, SearchSpace
from autotune.units import GIB
from autotune.values.config import TrainConfig
from autotune.values.result import TrialRow
from autotune.values.trial import Failure, Interval, Measurement, Memory, Outcome, Purpose, TrialResult, TrialStatus

# The constraint's name: peak memory beyond the budget, as a share of the budget.
MEMORY = "memory"

# The user attribute that holds a whole `TrialResult` as JSON.
RESULT = "result"

# Constraint of a trial that ran out of memory; the measured peak may lie below the budget and would say that it fits.
_BEYOND_BUDGET = 0.01

# States for samplers: TPE ranks pruned trials below completed ones, and ignores failed trials.
_STATES = {TrialStatus.COMPLETED: TrialState.COMPLETE, TrialStatus.OUT_OF_MEMORY: TrialState.PRUNED}

_UNKNOWN = Memory()


class TrialConverter:
    """Converts parameters, which are those of `space`, to configurations, and results to values and constraints."""

    def __init__(self, plan: SearchPlan, space: SearchSpace) -> None:
        self._plan = plan
        self._space = space
        self.distributions = {d.name: CategoricalDistribution(d.choices) for d in space.dimensions}

    def frozen(self, result: TrialResult) -> FrozenTrial:
        """Return a result as a finished trial of a study.

        Its value is the samples per second by the objective; None if the trial failed. Its constraint is the peak
        divided by the budget, less 1, so that positive means too much; there is none if the peak isn't known.
        """
        params, row, measured = self.params(result.request.config), TrialRow.of(result), result.measurement
        constraints = {}
        if result.status is TrialStatus.OUT_OF_MEMORY:
            constraints[MEMORY] = _BEYOND_BUDGET
        elif measured is not None and measured.memory.is_known:
            constraints[MEMORY] = measured.memory.peak_bytes / self._plan.memory_bytes - 1
        trial = optuna.create_trial(
            state=_STATES.get(result.status, TrialState.FAIL),
            value=self._plan.objective.rate(measured) if measured else None,
            params=params,
            distributions={name: self.distributions[name] for name in params},
            constraints=constraints,
            user_attrs={
                "trial": row.number,
                "purpose": str(row.purpose),
                "status": str(row.status),
                **({"peak memory GiB": row.peak_bytes / GIB} if row.peak_bytes is not None else {}),
                **({"cause": row.cause} if row.cause else {}),
                RESULT: result.model_dump_json(),
            },
        )
        if result.began is not None:
            trial.datetime_start = datetime.datetime.fromtimestamp(result.began)
            trial.datetime_complete = datetime.datetime.fromtimestamp(result.began + result.duration_s)
        return trial

    def is_ours(self, trial: FrozenTrial) -> bool:
        """Whether a trial has parameters of the space, with values of the space.

        A trial that ended before any was suggested has none; one of another space may have other values.
        """
        ours = trial.params.keys() & self.distributions.keys()
        return all(trial.params[name] in self.distributions[name].choices for name in ours) and (
            bool(ours) or not self.distributions
        )

    def config(self, params: Point) -> TrainConfig:
        """Return the configuration of a trial's parameters; all others have the values of the baseline.

        Raises:
            ValueError: The parameters contradict each other.
        """
        config = self._space.config(self._space.complete(params))
        return self._plan.baseline if self.params(config) == self.params(self._plan.baseline) else config

    def params(self, config: TrainConfig) -> Point:
        """Return the parameters of a configuration whose values are choices of the study."""
        return self._space.choices_of(config)

    def result(self, trial: FrozenTrial) -> TrialResult:
        """Return a finished trial of a study as a result.

        That is the whole result if the trial has one, else as much as its state, value and constraint "memory" define.
        A pruned trial was ended as too slow, unless the constraint says that it was out of memory.

        Raises:
            ValueError: Its parameters contradict each other.
        """
        if (whole := trial.user_attrs.get(RESULT)) is not None:
            try:
                return TrialResult.model_validate_json(whole)
            except ValueError:  # of another version
                pass
        config, share = self.config(trial.params), trial.constraints.get(MEMORY)
        status = TrialStatus.COMPLETED
        if share is not None and share > 0:
            status = TrialStatus.OUT_OF_MEMORY
        elif trial.state is TrialState.PRUNED:
            status = TrialStatus.TIMED_OUT
        elif trial.state is TrialState.FAIL or trial.value is None or not 0 < trial.value < math.inf:
            status = TrialStatus.CRASHED
        if status is not TrialStatus.COMPLETED or trial.value is None:
            return self._result(config, trial.number, Failure(status=status, cause="as the study says"))
        peak_bytes = None if share is None or share <= -1 else round((1 + share) * self._plan.memory_bytes)
        memory = Memory(**{"resident_bytes" if self._plan.hardware.is_cpu else "device_bytes": peak_bytes})
        return self.assumed(config, trial.value, memory, number=trial.number)

    def assumed(self, config: TrainConfig, rate: float, memory: Memory = _UNKNOWN, *, number: int = 0) -> TrialResult:
        """Return a completed trial with the given samples per second and peak memory, and nothing else known."""
        step_s = self._plan.workload.samples_per_step(config) / rate
        measurement = Measurement(
            step_times_s=(step_s,),
            accumulation_steps=self._plan.workload.accumulation_steps(config),
            samples_per_second=rate,
            samples_per_second_interval=Interval(low=rate, high=rate),
            memory=memory,
            startup_s=0.0,
            first_step_s=step_s,
            data_wait_share=None,
            loss=0.0,
            effects={},
        )
        return self._result(config, number, measurement)

    def _result(self, config: TrainConfig, number: int, outcome: Outcome) -> TrialResult:
        purpose = Purpose.BASELINE if config == self._plan.baseline else Purpose.SEARCH
        limit_s = self._plan.budget.trial_timeout_s
        request = request_of(self._plan, config, purpose, number=number, timeout_s=limit_s)
        return TrialResult(request=request, outcome=outcome, duration_s=0.0)
