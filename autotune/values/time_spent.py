"""How the wall time of a search divides into measuring and overheads; and a stopwatch with laps.

A resumed search counts the trials of all its parts, but the time between trials of the last part alone.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from typing import Self

from pydantic import Field, NonNegativeFloat

from autotune.value import Value
from autotune.values.trial import TrialResult

# `time.perf_counter()` when the command began; None: `find` or `resume` was called by a program of the user's.
command_began: ContextVar[float | None] = ContextVar("command_began", default=None)


class Spent(Value):
    """Seconds of a search by kind of work; they sum up to `total_s`."""

    # Before the first trial: planning, launching (imports), tracing, measuring operators ...
    starting: dict[str, NonNegativeFloat] = Field(default_factory=dict)
    first_steps_s: NonNegativeFloat  # each trial's first step, compilation included
    warm_up_s: NonNegativeFloat  # further discarded steps
    measured_s: NonNegativeFloat
    checks_s: NonNegativeFloat  # work of checks beside training, such as evaluating and saving in a soak
    trials_overhead_s: NonNegativeFloat  # rest of the trials: starting the process, model, data and Trainer, closing
    lost_s: NonNegativeFloat  # trials without recorded phases: they died, or were killed at their time limit
    own_s: NonNegativeFloat  # between trials: choosing, predicting, writing
    at_once_s: NonNegativeFloat = 0.0  # part of all these that ran in parallel with another trial

    @property
    def parts(self) -> dict[str, float]:
        """Seconds of each kind of work; those of parallel trials add up."""
        return {
            "measured steps": self.measured_s,
            "first steps and compiling": self.first_steps_s,
            "warm-up": self.warm_up_s,
            "checks": self.checks_s,
            "lost trials": self.lost_s,
            "setting trials up": self.trials_overhead_s,
            "starting the search": sum(self.starting.values()),
            "between trials": self.own_s,
        }

    @property
    def total_s(self) -> float:
        return sum(self.parts.values())

    @property
    def passed_s(self) -> float:
        """Seconds that passed, in which trials ran in parallel."""
        return self.total_s - self.at_once_s

    def shares(self) -> dict[str, float]:
        found = sorted(self.parts.items(), key=lambda part: -part[1])
        return {kind: seconds / self.total_s for kind, seconds in found if seconds > 0}

    @classmethod
    def of(cls, results: Sequence[TrialResult], search_time_s: float, starting: Mapping[str, float]) -> Self:
        """Return how a search was spent: `starting` until its first trial was chosen, then `search_time_s`."""
        busy_s = wall_s(results)
        phases = [phases for r in results if (phases := r.outcome.phases) is not None]
        return cls(
            starting=dict(starting),
            first_steps_s=sum(p.first_step_s for p in phases),
            warm_up_s=sum(p.discarded_s for p in phases),
            measured_s=sum(p.measured_s for p in phases),
            checks_s=sum(p.check_s for p in phases),
            trials_overhead_s=sum(r.overhead_s or 0.0 for r in results),
            lost_s=sum(r.duration_s for r in results if r.overhead_s is None),
            own_s=max(0.0, search_time_s - busy_s),
            at_once_s=max(0.0, sum(r.active_s for r in results) - busy_s),
        )


def _busy(results: Sequence[TrialResult]) -> list[tuple[float, float]]:
    """Return the spans of time in which at least one trial ran, in order."""
    spans: list[tuple[float, float]] = []
    for began, ended in sorted((r.began, r.began + r.duration_s) for r in results):
        if spans and began <= spans[-1][1]:
            spans[-1] = (spans[-1][0], max(spans[-1][1], ended))
        else:
            spans.append((began, ended))
    return spans


def wall_s(results: Sequence[TrialResult]) -> float:
    """Return the seconds in which at least one trial ran."""
    return sum(ended - began for began, ended in _busy(results))


def ends_s(results: Sequence[TrialResult]) -> list[float]:
    """Return the seconds in which trials had run when each ended, pauses left out."""
    spans, ends = _busy(results), [r.began + r.duration_s for r in results]
    return [sum(min(end, stop) - start for start, stop in spans if start < end) for end in ends]


class Stopwatch:
    """Measures named laps without gaps, the first from `since` on, by default from its construction."""

    def __init__(self, lap: str, *, since: float | None = None, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._lap = lap
        self._since = self.started_at = clock() if since is None else since
        self._laps: dict[str, float] = {}

    def enter(self, lap: str) -> None:
        """End the current lap and begin `lap`, or continue it if there was one of that name."""
        now = self._clock()
        self._laps[self._lap] = self._laps.get(self._lap, 0.0) + now - self._since
        self._lap, self._since = lap, now

    def elapsed_s(self) -> float:
        return self._clock() - self.started_at

    def laps(self) -> dict[str, float]:
        self.enter(self._lap)
        return dict(self._laps)
