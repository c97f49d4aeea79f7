"""Where the wall time of a search went: into measuring, and into all that measuring takes; and a stopwatch with laps.

A search that was resumed counts the trials of all its parts, and the time between trials of the last part alone.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence

from pydantic import Field

from autotune.value import Value
from autotune.values.trial import TrialResult


class Spent(Value):
    """Seconds of a search by what they were spent on; they sum up to `total_s`."""

    starting: dict[str, float] = Field(
        default_factory=dict,
        description="before the first trial: planning, launching (importing the libraries), describing, tracing",
    )
    first_steps_s: float = Field(description="each trial's first step, compilation included")
    warm_up_s: float = Field(description="further steps that were discarded")
    measured_s: float
    checks_s: float = Field(description="evaluating and saving in a soak, and such")
    trials_overhead_s: float = Field(description="the rest of the trials: process, model, data, Trainer, end")
    lost_s: float = Field(description="trials that died without a word, or were ended at their time limit")
    own_s: float = Field(description="between trials: choosing, predicting, writing")
    at_once_s: float = Field(default=0.0, description="of all these, what ran beside another trial")
    overhead_per_trial_s: float | None = Field(description="median over the trials after the first; None: no such")

    @property
    def total_s(self) -> float:
        """The whole search, trials that ran at the same time added up."""
        return sum(self._parts().values())

    @property
    def elapsed_s(self) -> float:
        """The whole search, by the clock."""
        return self.total_s - self.at_once_s

    @property
    def outside_share(self) -> float:
        """Share of the whole outside of steps and checks; a lost trial was busy with its steps."""
        outside_s = sum(self.starting.values()) + self.trials_overhead_s + self.own_s
        return outside_s / self.total_s if self.total_s else 0.0

    def shares(self) -> dict[str, float]:
        """Return the share of the whole that each kind of work took, the largest first."""
        total_s = self.total_s
        found = sorted(self._parts().items(), key=lambda part: -part[1])
        return {what: seconds / total_s for what, seconds in found if seconds > 0}

    def _parts(self) -> dict[str, float]:
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


def wall_s(results: Sequence[TrialResult]) -> float:
    """Return how long at least one of `results` ran; those without a known start count as if they ran alone."""
    spans = sorted((r.began, r.began + r.duration_s) for r in results if r.began is not None)
    total, until = sum(r.duration_s for r in results if r.began is None), float("-inf")
    for began, ended in spans:
        total += max(0.0, ended - max(began, until))
        until = max(until, ended)
    return total


def spent_on(results: Sequence[TrialResult], search_time_s: float, starting: Mapping[str, float]) -> Spent:
    """Return where the time went.

    Args:
        results: All trials.
        search_time_s: Wall time, from the first trial's choice on, the trials of an earlier, stopped part counted in.
        starting: Seconds before that, by what they were for.
    """
    busy_s = wall_s(results)
    phases = [phases for r in results if (phases := r.outcome.phases) is not None]
    overheads = [(r.request.number, r.overhead_s) for r in results if r.overhead_s is not None]
    first = min((number for number, _ in overheads), default=0)
    later = [overhead for number, overhead in overheads if number != first]
    return Spent(
        starting=dict(starting),
        first_steps_s=sum(p.first_step_s for p in phases),
        warm_up_s=sum(p.discarded_s for p in phases),
        measured_s=sum(p.measured_s for p in phases),
        checks_s=sum(p.check_s for p in phases),
        trials_overhead_s=sum(overhead for _, overhead in overheads),
        lost_s=sum(r.duration_s for r in results if r.overhead_s is None),
        own_s=max(0.0, search_time_s - busy_s),
        at_once_s=max(0.0, sum(r.duration_s for r in results) - busy_s),
        overhead_per_trial_s=statistics.median(later) if later else None,
    )


class Stopwatch:
    """Runs from its making on, with exactly one named lap at every moment, so that they sum up to the whole.

    Args:
        lap: Name of the first lap.
        clock: Seconds from some moment on.
    """

    def __init__(self, lap: str, *, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._lap = lap
        self._since = self.started_at = clock()
        self._laps: dict[str, float] = {}

    def enter(self, lap: str) -> None:
        """End the present lap and begin `lap`, or go on with it if there was one of that name."""
        now = self._clock()
        self._laps[self._lap] = self._laps.get(self._lap, 0.0) + now - self._since
        self._lap, self._since = lap, now

    def laps(self) -> dict[str, float]:
        """Return the seconds of each lap so far, the present one included."""
        self.enter(self._lap)
        return dict(self._laps)
