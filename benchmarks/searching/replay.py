"""Searches of a recorded table: trials run out of it, in seconds, on any machine, and one loop that asks a sampler.

Time doesn't pass: the recorded duration of a trial is added to a clock that the search reads. The limits of a request
hold as in a real trial: a recorded peak above its memory is out of memory, a recorded duration above its time limit is
timed out. How long to measure has no effect: a final trial, too, gives what was recorded.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from typing import NamedTuple

import optuna
from optuna.samplers import BaseSampler
from searching.tables import Table

from autotune.execution.runner import Runner
from autotune.planning.plan import SearchPlan
from autotune.space.space import Point, SearchSpace
from autotune.storage.writer import TrialConverter
from autotune.values.config import TrainConfig
from autotune.values.trial import Failure, Outcome, Purpose, TrialRequest, TrialResult, TrialStatus

# A sampler that asks so often in a row for what is known already has nothing left to say.
_PATIENCE = 200

# What failed is told as this much of the worst that was seen, beside a constraint that it breaks: Optuna's Gaussian
# process learns from completed trials alone.
_FAILED = 0.5


class ReplayRunner(Runner):
    """Answers requests from a table: of a configuration's trials the first, then the next, then from the start again.

    `seed` draws which of a configuration's trials is its first; None: the one that was run first. `now_s` is the time
    that trials have taken.
    """

    def __init__(self, table: Table, *, seed: int | None = None) -> None:
        self._seed = seed
        self._trials = {point.config: point.trials for point in table.points}
        self._asked: Counter[TrainConfig] = Counter()
        self.now_s = 0.0

    def run(self, request: TrialRequest) -> TrialResult:
        """Return what was recorded for the request's configuration; one that wasn't recorded is invalid."""
        config = request.config
        recorded = self._trials.get(config)
        if recorded is None:
            named = f"{config.config_id}: {config.model_dump_json(exclude_defaults=True)}"
            outcome: Outcome = Failure(status=TrialStatus.INVALID, cause=f"the table has no trial of {named}")
            return TrialResult(request=request, outcome=outcome, duration_s=0.0)
        drawn = random.Random(f"{self._seed} {config.config_id}")
        first = 0 if self._seed is None else drawn.randrange(len(recorded))
        trial = recorded[(first + self._asked[config]) % len(recorded)]
        self._asked[config] += 1
        trial, timeout_s = trial.within(request.limits.memory_bytes), request.limits.timeout_s
        outcome, duration_s = trial.outcome, trial.duration_s
        if duration_s > timeout_s:
            outcome = Failure(status=TrialStatus.TIMED_OUT, cause=f"no result within {timeout_s:.0f} s")
            duration_s = timeout_s
        began, self.now_s = self.now_s, self.now_s + duration_s
        return TrialResult(request=request, outcome=outcome, duration_s=duration_s, began=began)


class Replayed(NamedTuple):
    config: TrainConfig
    status: TrialStatus
    ended_at_s: float


def tightened(table: Table, share: float) -> Table:
    """Return `table` as if recorded with less memory: just enough for that share of its points.

    What needs more ran out of memory in its first step, the last whose memory isn't known yet.
    """
    peaks = [max((t.measurement.memory.peak_bytes for t in p.trials if t.measurement), default=0) for p in table.points]
    fitting = sorted(peak for peak in peaks if peak)
    budget = fitting[min(len(fitting), max(1, round(share * len(peaks)))) - 1]
    header = table.header.model_copy(update={"memory_bytes": budget})
    points = (p.model_copy(update={"trials": tuple(t.within(budget) for t in p.trials)}) for p in table.points)
    return Table(header=header, points=tuple(points))


class Oracle:
    """Answers configurations from a table, each by one of its trials; asking again for one is no trial.

    The plan's seed draws among the trials of a configuration, its budget limits their number.
    """

    def __init__(self, table: Table, plan: SearchPlan) -> None:
        self._plan, self._runner = plan, ReplayRunner(table, seed=plan.workload.seed)
        self._recorded = frozenset(point.config for point in table.points)
        self._known: dict[TrainConfig, TrialResult] = {}
        self.trials: list[Replayed] = []

    @property
    def is_spent(self) -> bool:
        most = self._plan.budget.max_trials + 1  # the baseline isn't counted in a search either
        return len(self.trials) >= min(most, len(self._recorded))

    def run(self, config: TrainConfig) -> TrialResult | None:
        """Return what a configuration gave; None if it wasn't recorded, since it can't be tried."""
        if config in self._recorded and config not in self._known:
            timeout_s, number = self._plan.budget.trial_timeout_s, len(self.trials)
            request = self._plan.request_of(config, Purpose.SEARCH, number=number, timeout_s=timeout_s)
            self._known[config] = self._runner.run(request)
            self.trials.append(Replayed(config, self._known[config].status, self._runner.now_s))
        return self._known.get(config)


def searched(sampler: BaseSampler, table: Table, plan: SearchPlan, *, from_baseline: bool = False) -> list[Replayed]:
    """Return the trials of a search in their order: a study that asks a sampler, and a table that answers.

    It ends when the sampler says so, if it can; when it asks for nothing new any more; or when trials are spent.
    `from_baseline`: the baseline is measured first, for a sampler that doesn't know of it.
    """
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    space, oracle, trials = plan.search_space, Oracle(table, plan), TrialConverter(plan)
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
