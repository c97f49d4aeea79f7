"""What each of a winner's knobs brought; `verification.attribution` computes it from trials."""

from __future__ import annotations

import math
from typing import Literal

from pydantic import Field

from autotune.value import Value
from autotune.values.config import TrainConfig
from autotune.values.problem import Change
from autotune.values.trial import Interval

# in turn: measured beside the winner, in the same rounds; once: by one trial of the search; elsewhere: by two trials of
# the search that differ in it, neither of them the winner; fails: without it the winner doesn't run; slow: it runs, but
# a trial takes longer than any may.
Basis = Literal["in turn", "once", "elsewhere", "fails", "slow", "unknown"]


class Contribution(Value):
    """One knob of the winner, or several of which one can't do without the other, put back to the baseline's value."""

    changes: tuple[Change, ...] = Field(min_length=1, description="what is put back; the first is the knob meant")
    config: TrainConfig | None = Field(description="the winner without it; None: there is no such configuration")
    basis: Basis
    ratio: float | None = Field(default=None, description="throughput with it over throughput without it")
    interval: Interval | None = Field(default=None, description="of the ratio")
    samples_per_second: float | None = Field(default=None, description="without it; of basis 'elsewhere' unknown")
    trials: tuple[str, ...] = Field(default=(), description="that the ratio was read from")
    cause: str | None = Field(default=None, description="why there is no ratio")

    @property
    def is_settled(self) -> bool:
        """Whether further measurements would change nothing."""
        return self.basis in ("in turn", "fails", "slow")


class Explanation(Value):
    """What each knob of a winner brought, and what they bring together beyond that."""

    winner: TrainConfig
    winner_samples_per_second: float | None
    baseline_samples_per_second: float | None = Field(description="None: the baseline did not complete")
    total: float | None = Field(description="the winner's throughput over the baseline's")
    total_interval: Interval | None = Field(default=None, description="of the total, where both were measured again")
    contributions: tuple[Contribution, ...] = Field(description="the largest first, what has no ratio last")

    @property
    def is_settled(self) -> bool:
        """Whether every knob has been measured beside the winner, as far as it can be."""
        return all(c.is_settled for c in self.contributions)

    @property
    def together(self) -> float | None:
        """What the total has beyond the product of the parts.

        Below 1 the knobs overlap, above 1 they help each other; what has no ratio of its own is in it, too. None of a
        single knob, which is the whole.
        """
        if self.total is None or len(self.contributions) < 2 or not any(c.ratio for c in self.contributions):
            return None
        return self.total / math.prod(c.ratio for c in self.contributions if c.ratio)

    @property
    def together_interval(self) -> Interval | None:
        """The interval of what they bring together: the uncertainties of total and parts, as if independent."""
        together = self.together
        parts = [c.interval for c in self.contributions if c.ratio]
        halves = [_log_half_width(interval) for interval in (self.total_interval, *parts)]
        if together is None or any(half is None for half in halves):
            return None
        half = math.sqrt(sum(half**2 for half in halves if half is not None))
        return Interval(low=together * math.exp(-half), high=together * math.exp(half))


def _log_half_width(interval: Interval | None) -> float | None:
    """Return half of an interval in logarithms, None where it has no end."""
    if interval is None or interval.low <= 0 or not math.isfinite(interval.high):
        return None
    return math.log(interval.high / interval.low) / 2
