"""A search of a recorded table: one loop that asks a sampler, and a table that answers and counts."""

from __future__ import annotations

import math
import random
from typing import NamedTuple

import optuna
from optuna.samplers import BaseSampler
from searching.replay import ReplayClock, ReplayRunner
from searching.tables import Table

from autotune.planning.plan import SearchPlan, request_of
from autotune.space.space import Point, SearchSpace
from autotune.storage.writer import TrialConverter
from autotune.values.config import TrainConfig
from autotune.values.trial import Purpose, TrialResult, TrialStatus


class Replayed(NamedTuple):
    """A trial that was replayed."""

    config: TrainConfig
    status: TrialStatus
    ended_at_s: float


# A sampler that asks so often in a row for what is known already has nothing left to say.
_PATIENCE = 200

# What failed is told as this much of the worst that was seen, beside a constraint that it breaks: Optuna's Gaussian
# process learns from completed trials alone.
_FAILED = 0.5


def tightened(table: Table, share: float) -> Table:
    """Return `table` as if recorded with less memory: just enough for that share of its points.

    What needs more ran out of memory in its first step, the last whose memory isn't known yet.
    """
    peaks = sorted(
        max((t.measurement.memory.peak_bytes for t in p.trials if t.measurement), default=0) for p in table.points
    )
    fitting = [peak for peak in peaks if peak]
    budget = fitting[min(len(fitting), max(1, round(share * len(peaks)))) - 1]
    header = table.header.model_copy(update={"memory_bytes": budget})
    points = (p.model_copy(update={"trials": tuple(t.within(budget) for t in p.trials)}) for p in table.points)
    return Table(header=header, points=tuple(points))


class Oracle:
    """Answers configurations from a table, each by one of its trials; asking again for one is no trial.

    Args:
        table: What was recorded.
        plan: The search; its seed draws among the trials of a configuration, its budget limits their number.
    """

    def __init__(self, table: Table, plan: SearchPlan) -> None:
        self._plan = plan
        self._clock = ReplayClock()
        self._runner = ReplayRunner(table, self._clock, seed=plan.workload.seed)
        self._recorded = frozenset(point.config for point in table.points)
        self._known: dict[TrainConfig, TrialResult] = {}
        self.trials: list[Replayed] = []

    @property
    def is_spent(self) -> bool:
        """Whether no trial is left."""
        most = self._plan.budget.max_trials + 1  # the baseline isn't counted in a search either
        return len(self.trials) >= min(most, len(self._recorded))

    def run(self, config: TrainConfig) -> TrialResult | None:
        """Return what a configuration gave; None if it wasn't recorded, since it can't be tried."""
        if config not in self._recorded:
            return None
        if config not in self._known:
            timeout_s, number = self._plan.budget.trial_timeout_s, len(self.trials)
            request = request_of(self._plan, config, Purpose.SEARCH, number=number, timeout_s=timeout_s)
            self._known[config] = self._runner.run(request)
            self.trials.append(Replayed(config, self._known[config].status, self._clock.now()))
        return self._known[config]


def searched(sampler: BaseSampler, table: Table, plan: SearchPlan, *, from_baseline: bool = False) -> list[Replayed]:
    """Return the trials of a search in their order: a study that asks a sampler, and a table that answers.

    It ends when the sampler says so, if it can; when it asks for nothing new any more; or when trials are spent.

    Args:
        sampler: Proposes.
        table: Answers.
        plan: The search.
        from_baseline: Whether the baseline is measured first, for a sampler that doesn't know of it.
    """
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    space, oracle = plan.search_space, Oracle(table, plan)
    trials = TrialConverter(plan)
    study = optuna.create_study(direction="maximize", sampler=sampler)
    if from_baseline:
        study.enqueue_trial(space.choices_of(plan.baseline))
    is_done = getattr(sampler, "is_done", lambda study: False)
    worst, idle = math.inf, 0
    while idle < _PATIENCE and not oracle.is_spent and not is_done(study):
        trial, before = study.ask(), len(oracle.trials)
        result = oracle.run(suggested(space, trial))
        idle = 0 if len(oracle.trials) > before else idle + 1
        if result is None:
            study.tell(trial, state=optuna.trial.TrialState.FAIL)
            continue
        frozen = trials.frozen(result)
        for name, value in frozen.constraints.items():
            trial.set_constraint(name, value)
        worst = min(worst, frozen.value or worst)
        study.tell(trial, frozen.value or _FAILED * (worst if worst < math.inf else 1.0))
    return oracle.trials


def in_any_order(table: Table, plan: SearchPlan) -> list[Replayed]:
    """Return the trials of every point, or of as many as there may be, in an order drawn from the seed."""
    oracle = Oracle(table, plan)
    for point in random.Random(plan.workload.seed).sample(table.points, len(table.points)):
        if not oracle.is_spent:
            oracle.run(point.config)
    return oracle.trials


def suggested(space: SearchSpace, trial: optuna.Trial) -> TrainConfig:
    """Return the configuration of a trial that was asked of a study."""
    point: Point = {}
    for dimension in space.dimensions:
        if space.is_active(dimension, point):
            point[dimension.name] = trial.suggest_categorical(dimension.name, dimension.choices)
    return space.config(point)
