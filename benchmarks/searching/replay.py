"""Runs trials out of a recorded table: a whole search in seconds, on any machine.

Time doesn't pass: the recorded duration of a trial is added to a clock that the search reads. The limits of a request
hold as in a real trial: a recorded peak above its memory is out of memory, a recorded duration above its time limit is
timed out. How long to measure has no effect: a final trial, too, gives what was recorded.
"""

from __future__ import annotations

import random
from collections import Counter

from searching.tables import Table

from autotune.execution.runner import Runner
from autotune.values.config import TrainConfig
from autotune.values.trial import Failure, Outcome, TrialRequest, TrialResult, TrialStatus


class ReplayClock:
    """Time that passes only when a replayed trial takes it."""

    def __init__(self) -> None:
        self._now_s = 0.0

    def now(self) -> float:
        """Return the seconds that have passed."""
        return self._now_s

    def advance(self, seconds: float) -> None:
        """Let `seconds` pass."""
        self._now_s += seconds


class ReplayRunner(Runner):
    """Answers requests from a table: of a configuration's trials the first, then the next, then from the start again.

    Args:
        table: What was recorded.
        clock: Advanced by the time each trial took.
        seed: Draws which of a configuration's trials is its first; None: the one that was run first.
    """

    def __init__(self, table: Table, clock: ReplayClock, *, seed: int | None = None) -> None:
        self._seed = seed
        self._trials = {point.config: point.trials for point in table.points}
        self._clock = clock
        self._asked: Counter[TrainConfig] = Counter()

    def run(self, request: TrialRequest) -> TrialResult:
        """Return what was recorded for the request's configuration; one that wasn't recorded is invalid."""
        config = request.config
        recorded = self._trials.get(config)
        if recorded is None:
            outcome: Outcome = Failure(status=TrialStatus.INVALID, cause=f"the table has no trial of {_named(config)}")
            return TrialResult(request=request, outcome=outcome, duration_s=0.0)
        trial = recorded[(self._first(config) + self._asked[config]) % len(recorded)]
        self._asked[config] += 1
        trial, timeout_s = trial.within(request.limits.memory_bytes), request.limits.timeout_s
        outcome, duration_s = trial.outcome, trial.duration_s
        if duration_s > timeout_s:
            outcome = Failure(status=TrialStatus.TIMED_OUT, cause=f"no result within {timeout_s:.0f} s")
            duration_s = timeout_s
        self._clock.advance(duration_s)
        return TrialResult(request=request, outcome=outcome, duration_s=duration_s)

    def _first(self, config: TrainConfig) -> int:
        if self._seed is None:
            return 0
        return random.Random(f"{self._seed} {config.config_id}").randrange(len(self._trials[config]))


def _named(config: TrainConfig) -> str:
    return f"{config.config_id}: {config.model_dump_json(exclude_defaults=True)}"
