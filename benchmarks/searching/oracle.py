"""What a search strategy sees of a recorded table: it asks for trials, and they are counted."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from autotune.execution.replay import ReplayClock, ReplayRunner
from autotune.planning.plan import SearchPlan, request_of
from autotune.units import show_memory
from autotune.values.config import TrainConfig
from autotune.values.recorded_table import Table, TableTrial
from autotune.values.trial import Purpose, TrialStatus


class Replayed(NamedTuple):
    """A trial that was replayed."""

    config: TrainConfig
    status: TrialStatus
    ended_at_s: float


# From a table and the plan of a search on it to the trials before the finals, in their order.
Strategy = Callable[[Table, SearchPlan], list[Replayed]]


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
    points = (p.model_copy(update={"trials": tuple(_within(t, budget) for t in p.trials)}) for p in table.points)
    return Table(header=header, points=tuple(points))


def _within(trial: TableTrial, budget_bytes: int) -> TableTrial:
    found = trial.measurement
    if found is None or found.memory.peak_bytes <= budget_bytes:
        return trial
    return TableTrial(
        number=trial.number,
        status=TrialStatus.OUT_OF_MEMORY,
        duration_s=min(trial.duration_s, found.startup_s + found.first_step_s),
        cause=f"needed {show_memory(found.memory.peak_bytes)} when it was recorded",
    )


class Spent(Exception):
    """The trials of a search are used up; ends a strategy."""


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
        self._rates: dict[TrainConfig, float | None] = {}
        self.trials: list[Replayed] = []

    def is_legal(self, config: TrainConfig) -> bool:
        """Whether a configuration can be tried at all; that costs no trial."""
        return config in self._recorded

    def run(self, config: TrainConfig) -> float | None:
        """Return the samples/s of a configuration, None if it failed.

        Raises:
            Spent: No trial is left.
        """
        if config not in self._rates:
            if len(self.trials) > self._plan.budget.max_trials:  # the baseline isn't counted in a search either
                raise Spent
            request = request_of(
                self._plan,
                config,
                Purpose.SEARCH,
                number=len(self.trials),
                timeout_s=self._plan.budget.trial_timeout_s,
            )
            result = self._runner.run(request)
            self.trials.append(Replayed(config, result.status, self._clock.now()))
            self._rates[config] = result.measurement.samples_per_second if result.measurement else None
        return self._rates[config]
