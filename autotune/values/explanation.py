"""The contribution of each of a winner's knobs to its throughput; `verification.attribution` computes it."""

from __future__ import annotations

import math
from typing import Literal

from pydantic import Field

from autotune.value import Value
from autotune.values.config import TrainConfig
from autotune.values.problem import Change
from autotune.values.trial import Interval

# in turn: measured in the same rounds as the winner; once: by one trial of the search; elsewhere: by two trials of the
# search that differ in the knob, neither of them the winner; fails: without the knob the winner doesn't run; slow:
# without it a trial exceeds its time limit.
Basis = Literal["in turn", "once", "elsewhere", "fails", "slow", "unknown"]


class Contribution(Value):
    """Effect of putting a knob of the winner, with the knobs that depend on it, back to the baseline's value."""

    changes: tuple[Change, ...] = Field(min_length=1, description="the knob, then those that depend on it")
    config: TrainConfig | None = Field(description="the winner without the knob; None: no such configuration exists")
    basis: Basis
    ratio: float | None = Field(default=None, description="throughput with it over throughput without it")
    interval: Interval | None = Field(default=None, description="of the ratio")
    samples_per_second: float | None = Field(default=None, description="without the knob; None: unknown")
    trials: tuple[str, ...] = Field(default=(), description="trials that the ratio was computed from")
    cause: str | None = Field(default=None, description="why there is no ratio")

    @property
    def is_settled(self) -> bool:
        """Whether further measurements would change nothing."""
        return self.basis in ("in turn", "fails", "slow")


class Explanation(Value):
    """The contribution of each knob of a winner, and their interaction."""

    winner: TrainConfig
    winner_samples_per_second: float | None
    baseline_samples_per_second: float | None = Field(description="None: the baseline did not complete")
    total: float | None = Field(description="the winner's throughput over the baseline's")
    total_interval: Interval | None = Field(
        default=None, description="interval of the total, if both were measured again"
    )
    contributions: tuple[Contribution, ...] = Field(
        description="in descending order of the ratio, those without one last"
    )

    @property
    def is_settled(self) -> bool:
        """Whether further measurements would change no contribution."""
        return all(c.is_settled for c in self.contributions)

    @property
    def together(self) -> float | None:
        """The interaction: the total ratio over the product of the single ratios.

        Below 1 the knobs overlap, above 1 they reinforce each other; it includes knobs without a ratio. None for a
        single knob, whose ratio is the total.
        """
        if self.total is None or len(self.contributions) < 2 or not any(c.ratio for c in self.contributions):
            return None
        return self.total / math.prod(c.ratio for c in self.contributions if c.ratio)

    @property
    def together_interval(self) -> Interval | None:
        """The interval of the interaction, from those of total and parts as if they were independent."""
        together = self.together
        parts = [c.interval for c in self.contributions if c.ratio]
        halves = [_log_half_width(interval) for interval in (self.total_interval, *parts)]
        if together is None or any(half is None for half in halves):
            return None
        half = math.sqrt(sum(half**2 for half in halves if half is not None))
        return Interval(low=together * math.exp(-half), high=together * math.exp(half))


def _log_half_width(interval: Interval | None) -> float | None:
    """Return half the width of an interval's logarithm, or None for an unbounded interval."""
    if interval is None or interval.low <= 0 or not math.isfinite(interval.high):
        return None
    return math.log(interval.high / interval.low) / 2
