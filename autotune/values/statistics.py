"""Means, ratios and their 95 % intervals, for a handful of timings.

The steps of one trial are correlated (placement, clocks, other processes), so a trial counts as one sample. Two or
three trials hardly determine their own spread, so it is pooled over all configurations of the finals, with a prior from
the spread of single steps. Intervals are Student's t on logarithms: with two trials of ten steps on both sides they
cover the truth in 99 of 100 cases where trials spread as much as steps, and in 90 where they spread twice as much;
percentile intervals of the bootstrap in 66 and 67 (counted by `tests/values/test_statistics.py`).
"""

import math
import statistics
from collections.abc import Sequence
from itertools import chain
from typing import NamedTuple, Self

from pydantic import Field

from autotune.value import Value
from autotune.values.trial import Interval

# Two-sided 95 % quantiles of Student's t by degrees of freedom (any table, e.g. NIST/SEMATECH e-Handbook 1.3.6.7.2).
_T95 = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131,
    2.120, 2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042,
)  # fmt: skip

# Prior of the standard deviation of the logarithm of the ratio of two processes that train the same, beyond the spread
# of their turns or steps, and its number of pairs. Ten ratios deviated from 1 by 1.2 %, and their turns alone explain
# 1.5 % (`benchmarks/results/2026-11-23-amd-epyc-alike-llama-3m.json`): an upper bound, of a CPU; no GPU was measured.
PROCESS_SPREAD = 0.01
PROCESS_PAIRS = 10

# Parts of a trial in turn, which lasts a minute or more: they show how a machine drifts meanwhile.
PARTS = 5

# Standard deviation of the logarithm of a machine's speed between a search and other times, which the few minutes of
# finals can't show. CPU: of 120 fresh runs of six answers, beyond the spread of parts; 89 of them fell into intervals
# without it, 114 into those with it (`benchmarks/results/*-repeat-*`). GPU: of twelve trials of two trainings, whose
# host hesitated at times (`2026-11-26-nvidia-h200-steps.json` there).
DRIFT = {"cpu": 0.067, "cuda": 0.047}

# Prior of the standard deviation of trials' means, in standard deviations of single steps of a trial: the median over
# 169 points of three models that were measured twice (1.3 and 1.0 for the two of `benchmarks/tables`). Outliers raise
# the root mean square to 2.3, so the prior has few degrees of freedom, and measured trials soon outweigh it.
TRIAL_SPREAD = 1.2
PRIOR_DEGREES = 3

Trials = Sequence[Sequence[float]]  # seconds of the steps of each trial


def t95(degrees_of_freedom: float) -> float:
    """Return the two-sided 95 % quantile of Student's t, rounding the degrees of freedom down."""
    whole = int(degrees_of_freedom)
    if whole < 1:
        return math.inf
    return _T95[whole - 1] if whole <= len(_T95) else 1.960 + 2.5 / whole


def half_width(values: Sequence[float]) -> float:
    """Return half the 95 % interval of the mean of `values`; infinite for fewer than two."""
    if len(values) < 2:
        return math.inf
    return t95(len(values) - 1) * statistics.stdev(values) / math.sqrt(len(values))


def relative_half_width(values: Sequence[float]) -> float:
    return half_width(values) / statistics.fmean(values) if len(values) >= 2 else math.inf


def rate_interval(step_times_s: Sequence[float], samples_per_step: int) -> Interval:
    mean, half = statistics.fmean(step_times_s), half_width(step_times_s)
    low = samples_per_step / (mean + half) if math.isfinite(half) else 0.0
    return Interval(low=low, high=samples_per_step / (mean - half) if half < mean else math.inf)


class Speedup(Value):
    """Throughput of a configuration over another's, mostly the baseline's, both measured again in turn."""

    ratio: float = Field(allow_inf_nan=True)  # not a number: there are no pairs
    interval: Interval

    @property
    def bound(self) -> float | None:
        """The factor by which it is faster at most; None: the interval is too wide to tell, and ends above 1.1."""
        return self.interval.high if self.interval.is_narrow or self.interval.high <= 1.1 else None

    @classmethod
    def of_means(cls, numerator: Trials, denominator: Trials, others: Sequence[Trials] = ()) -> Self:
        """Return the ratio of two mean times and its 95 % interval, from step times, a sequence per trial and round.

        Deviations that all trials of a round share, as when the machine became slower, don't widen the interval.
        `others` are further configurations of these rounds, to estimate the spread of trials.
        """
        above, below = list(chain.from_iterable(numerator)), list(chain.from_iterable(denominator))
        if min(len(above), len(below)) < 2:
            ratio = statistics.fmean(above) / statistics.fmean(below)
            return cls(ratio=ratio, interval=Interval(low=0.0, high=math.inf))
        # Student's interval of the log ratio, with one variance of the steps pooled over both sides.
        degrees = len(above) + len(below) - 2
        pooled = sum((len(side) - 1) * _log_variance(side) for side in (above, below)) / degrees
        steps_half = t95(degrees) * math.sqrt(pooled * (1 / len(above) + 1 / len(below)))
        spread = Spread.of_trials([numerator, denominator], others)
        ours, theirs = _log_means(numerator), _log_means(denominator)
        ratio = math.exp(statistics.fmean(ours) - statistics.fmean(theirs))
        half = max(steps_half, t95(spread.degrees) * spread.deviation * math.sqrt(1 / len(ours) + 1 / len(theirs)))
        return cls(ratio=ratio, interval=Interval(low=ratio * math.exp(-half), high=ratio * math.exp(half)))

    @classmethod
    def of_pairs(cls, runs: Sequence[Sequence[tuple[float, float]]], *, spread: float = PROCESS_SPREAD) -> Self:
        """Return the ratio of two times and its 95 % interval, from pairs in turn, a sequence per pair of processes.

        The estimate is the median of the means of all two logarithms (Hodges and Lehmann 1963), the interval is from
        the signed-rank test: of twelve pairs or more, one may be disturbed at will. It is widened for influences that a
        process keeps for its life, such as the place of its memory: by Student's t of the prior `spread` pooled with
        that of pairs.
        """
        import numpy as np

        logs = [[math.log(a / b) for a, b in run] for run in runs if run]
        flat = np.array([log for run in logs for log in run])
        one, other = np.triu_indices(len(flat))
        averages = np.sort((flat[one] + flat[other]) / 2)  # thousands of turns have millions
        middle, count = float(np.median(averages)) if len(averages) else math.nan, len(flat)
        # The number of Walsh averages below the interval, by the normal approximation of the signed-rank distribution.
        outside = round(count * (count + 1) / 4 - 1.96 * math.sqrt(count * (count + 1) * (2 * count + 1) / 24))
        if count < 6 or outside < 1:  # of fewer the signed-rank test has no 95 % interval
            return cls(ratio=math.exp(middle), interval=Interval(low=0.0, high=math.inf))
        of_processes = [statistics.median(run) for run in logs]
        squares = sum((log - statistics.fmean(of_processes)) ** 2 for log in of_processes)
        degrees = PROCESS_PAIRS - 1 + len(logs) - 1
        deviation = math.sqrt(((PROCESS_PAIRS - 1) * spread**2 + squares) / degrees)
        kept_for_life = t95(degrees) * deviation / math.sqrt(len(logs))
        below, above = middle - float(averages[outside - 1]), float(averages[-outside]) - middle
        low, high = middle - math.hypot(below, kept_for_life), middle + math.hypot(above, kept_for_life)
        return cls(ratio=math.exp(middle), interval=Interval(low=math.exp(low), high=math.exp(high)))

    def over(self, other: Self) -> Self:
        """Return the quotient of two ratios to the same reference that were measured apart, and its 95 % interval."""
        ratio = self.ratio / other.ratio
        if not all(c.interval.low > 0 and c.interval.high < math.inf for c in (self, other)):
            return type(self)(ratio=ratio, interval=Interval(low=0.0, high=math.inf))
        below = math.hypot(math.log(self.ratio / self.interval.low), math.log(other.interval.high / other.ratio))
        above = math.hypot(math.log(self.interval.high / self.ratio), math.log(other.ratio / other.interval.low))
        return type(self)(ratio=ratio, interval=Interval(low=ratio * math.exp(-below), high=ratio * math.exp(above)))


class Spread(NamedTuple):
    """Standard deviation of the logarithm of a trial's mean, and its degrees of freedom."""

    deviation: float
    degrees: float

    @classmethod
    def of_trials(cls, sides: Sequence[Trials], others: Sequence[Trials] = (), *, by_round: bool = True) -> Self:
        """Return the pooled spread of the means of each configuration's trials, from step times, a sequence per trial.

        Trials of `others` count for the spread, but not their steps for its prior. `by_round` removes deviations that
        the trials of a round share, if all configurations ran in all rounds.
        """
        prior = _trial_prior([trial for side in sides for trial in side])
        means = [_log_means(side) for side in (*sides, *others) if side]
        rounds = {len(side) for side in means}
        residuals = [[value - statistics.fmean(side) for value in side] for side in means]
        degrees = sum(len(side) - 1 for side in means)
        if by_round and len(rounds) == 1 and len(means) > 1:
            common = [statistics.fmean(values) for values in zip(*residuals, strict=True)]
            residuals = [[value - c for value, c in zip(side, common, strict=True)] for side in residuals]
            degrees -= len(common) - 1
        squares = sum(value**2 for side in residuals for value in side)
        return cls(math.sqrt((PRIOR_DEGREES * prior + squares) / (PRIOR_DEGREES + degrees)), PRIOR_DEGREES + degrees)

    @classmethod
    def of_parts(cls, sides: Sequence[Trials]) -> Self:
        """Return the spread of runs, taken from the parts of trials in turn, a sequence of parts per configuration."""
        means = [_log_means(side) for side in sides]
        squares = sum((value - statistics.fmean(side)) ** 2 for side in means for value in side)
        degrees = sum(len(side) - 1 for side in means)
        return cls(math.sqrt(squares / degrees), degrees)

    def next_run(self, trials: Trials, samples_per_step: int, *, later: float = 0.0) -> Interval:
        """Return the 95 % prediction interval of the next run's samples/s; `later`: log deviation of other times."""
        rate = samples_per_step / statistics.fmean(chain.from_iterable(trials))
        steps = _step_variance(trials) / max(1, min(len(trial) for trial in trials))
        now = t95(self.degrees) * math.sqrt(max(self.deviation**2, steps) * (1 + 1 / len(trials)))
        half = math.hypot(now, 1.96 * later)
        return Interval(low=rate * math.exp(-half), high=rate * math.exp(half))


class Single(NamedTuple):
    """A configuration that a search measured once; rates as logarithms."""

    rate: float
    again: float | None  # by the finals; None: not measured again
    predicted: float | None  # before its trial; None: there was no prediction
    was_chosen: bool  # as one that may be fast: all but the baseline
    step_times_s: Sequence[float]


def expected_rates(singles: Sequence[Single]) -> list[float]:
    """Return the posterior means of the rates of single trials, as logarithms and on the scale of the finals.

    The highest of several noisy values is likely to have been lucky: each is drawn towards its prediction or towards
    their mean, whichever it deviates less from, by the share of noise. That is the spread of trials
    (`Spread.of_trials`) and the change of those measured again beyond the whole machine's.
    """
    moves = [single.rate - single.again for single in singles if single.again is not None]
    squares = sum((move - statistics.fmean(moves)) ** 2 for move in moves)
    noise = PRIOR_DEGREES * _trial_prior([single.step_times_s for single in singles]) + squares
    noise /= PRIOR_DEGREES + max(0, len(moves) - 1)
    rates = [single.rate for single in singles]
    chosen = [n for n, single in enumerate(singles) if single.was_chosen]
    if len(chosen) > 2:
        errors = [[rates[n] - (singles[n].predicted or math.nan) for n in chosen], [rates[n] for n in chosen]]
        known = [[e - statistics.fmean(side) for e in side] for side in errors if not math.isnan(sum(side))]
        deviations = min(known, key=lambda side: sum(d**2 for d in side))
        pull = min(1.0, noise / (statistics.variance(deviations) or math.inf))
        for n, deviation in zip(chosen, deviations, strict=True):
            rates[n] -= pull * deviation
    offsets = [rate - single.again for rate, single in zip(rates, singles, strict=True) if single.again is not None]
    return [rate - statistics.fmean(offsets or [0.0]) for rate in rates]


def parts_of(trial: Sequence[float]) -> Trials:
    """Return the step times of a trial in `PARTS` parts, or as one where a part would have a single step."""
    size = len(trial) // PARTS
    if size < 2:
        return [trial]
    return [trial[n * size : (n + 1) * size if n + 1 < PARTS else len(trial)] for n in range(PARTS)]


def drift(trials: Trials) -> float:
    """Return by how much the slowest trial takes longer than the fastest; 0 within three standard errors (99.7 %)."""
    known = [trial for trial in trials if len(trial) >= 2]
    if len(known) < 2:
        return 0.0
    fastest, slowest = min(known, key=statistics.fmean), max(known, key=statistics.fmean)
    error = math.sqrt(sum(_log_variance(trial) / len(trial) for trial in (fastest, slowest)))
    change = statistics.fmean(slowest) / statistics.fmean(fastest)
    return change - 1 if math.log(change) > 3 * error else 0.0


def _log_means(side: Trials) -> list[float]:
    return [math.log(statistics.fmean(trial)) for trial in side]


def _log_variance(values: Sequence[float]) -> float:
    """Return the sample variance of logarithms; `statistics.variance` computes in exact fractions, which is slow."""
    logs = [math.log(v) for v in values]
    mean = statistics.fmean(logs)
    return math.fsum((log - mean) ** 2 for log in logs) / (len(logs) - 1)


def _trial_prior(trials: Trials) -> float:
    """Return the prior variance of the logarithm of a trial's mean: where steps hardly differ, processes still do."""
    return TRIAL_SPREAD**2 * _step_variance(trials) + PROCESS_SPREAD**2 / 2


def _step_variance(trials: Trials) -> float:
    """Return the variance of the logarithm of a step's time within a trial, pooled over the trials."""
    known = [trial for trial in trials if len(trial) >= 2]
    degrees = sum(len(trial) - 1 for trial in known)
    return sum((len(trial) - 1) * _log_variance(trial) for trial in known) / degrees if degrees else 0.0
