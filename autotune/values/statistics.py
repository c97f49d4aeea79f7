"""Means, ratios and their 95 % intervals, for a handful of timings.

Pure. The steps of one process share its luck (placement, clocks, what else runs), so the trial counts as one draw and
not its steps. Two or three draws hardly tell their own spread: it is taken together for all configurations of the
finals, and starts from what the spread of single steps lets expect.

Student's t on logarithms, not the bootstrap: of two trials there are three different resamples, of single steps the
bootstrap doesn't see the luck they share. With two trials of ten steps on both sides, and trials that spread as much
as steps, percentile intervals cover the truth in 66 of 100 cases resampling trials and in 53 resampling steps, these
in 99; where trials spread twice as much as steps, in 67, 41 and 90 (`tests/values/test_statistics.py` counts it).
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import NamedTuple

from autotune.values.trial import Interval

# Two-sided 95 % quantiles of Student's t by degrees of freedom (any table, e.g. NIST/SEMATECH e-Handbook 1.3.6.7.2).
_T95 = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131,
    2.120, 2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042,
)  # fmt: skip

# How much the means of trials spread, in standard deviations of single steps of one trial, before trials tell: the
# median over 169 points of three models that were measured twice (1.3 and 1.0 for the two of `benchmarks/tables`).
# Outliers make the root of its mean square 2.3, so it counts for few degrees of freedom, and trials soon outweigh it.
TRIAL_SPREAD = 1.2
PRIOR_DEGREES = 3


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
    """Return `half_width` as a share of the mean."""
    return half_width(values) / statistics.fmean(values) if len(values) >= 2 else math.inf


def rate_interval(step_times_s: Sequence[float], samples_per_step: int) -> Interval:
    """Return the 95 % interval of samples per second from the times of single steps."""
    mean, half = statistics.fmean(step_times_s), half_width(step_times_s)
    low = samples_per_step / (mean + half) if math.isfinite(half) else 0.0
    return Interval(low=low, high=samples_per_step / (mean - half) if half < mean else math.inf)


def ratio_of_means(
    numerator: Sequence[Sequence[float]],
    denominator: Sequence[Sequence[float]],
    others: Sequence[Sequence[Sequence[float]]] = (),
) -> tuple[float, Interval]:
    """Return the ratio of two mean times and its 95 % interval.

    Each argument holds the step times of one configuration, one sequence per trial, in the order of the rounds. What
    all trials of a round have in common, as a machine that became slower, doesn't count: the ratio is that of
    neighbours, round by round.

    Args:
        numerator: The one.
        denominator: The other.
        others: Further configurations of the same rounds: they too tell how much trials spread.
    """
    steps_half = _pooled_half_width(_flat(numerator), _flat(denominator))
    if not math.isfinite(steps_half):
        ratio = statistics.fmean(_flat(numerator)) / statistics.fmean(_flat(denominator))
        return ratio, Interval(low=0.0, high=math.inf)
    spread = trial_spread([numerator, denominator], others)
    ours, theirs = _log_means(numerator), _log_means(denominator)
    ratio = math.exp(statistics.fmean(ours) - statistics.fmean(theirs))
    half = max(steps_half, t95(spread.degrees) * spread.deviation * math.sqrt(1 / len(ours) + 1 / len(theirs)))
    return ratio, Interval(low=ratio * math.exp(-half), high=ratio * math.exp(half))


class Spread(NamedTuple):
    """Standard deviation of the logarithm of a trial's mean, and how well it is known."""

    deviation: float
    degrees: float


def trial_spread(
    sides: Sequence[Sequence[Sequence[float]]],
    others: Sequence[Sequence[Sequence[float]]] = (),
    *,
    by_round: bool = True,
) -> Spread:
    """Return how much the means of trials of one configuration spread.

    Args:
        sides: For each configuration in question its trials' step times.
        others: Those of configurations whose trials tell too, but not their steps.
        by_round: Leave out what the trials of a round have in common, where all configurations ran in all rounds.
    """
    prior = TRIAL_SPREAD**2 * _step_variance([trial for side in sides for trial in side])
    means = [_log_means(side) for side in (*sides, *others) if side]
    rounds = {len(side) for side in means}
    residuals = [[value - statistics.fmean(side) for value in side] for side in means]
    degrees = sum(len(side) - 1 for side in means)
    if by_round and len(rounds) == 1 and len(means) > 1:
        common = [statistics.fmean(values) for values in zip(*residuals, strict=True)]
        residuals = [[value - c for value, c in zip(side, common, strict=True)] for side in residuals]
        degrees -= len(common) - 1
    squares = sum(value**2 for side in residuals for value in side)
    return Spread(math.sqrt((PRIOR_DEGREES * prior + squares) / (PRIOR_DEGREES + degrees)), PRIOR_DEGREES + degrees)


def next_run_interval(trials: Sequence[Sequence[float]], spread: Spread, samples_per_step: int) -> Interval:
    """Return the interval of samples per second in which the next run of a configuration falls, in 95 of 100 cases.

    Args:
        trials: Its step times, one sequence per trial.
        spread: Of trials on this machine.
        samples_per_step: Samples of an optimizer step.
    """
    times = _flat(trials)
    rate = samples_per_step / statistics.fmean(times)
    steps = _step_variance(trials) / max(1, min(len(trial) for trial in trials))
    half = t95(spread.degrees) * math.sqrt(max(spread.deviation**2, steps) * (1 + 1 / len(trials)))
    return Interval(low=rate * math.exp(-half), high=rate * math.exp(half))


def drift(trials: Sequence[Sequence[float]]) -> float:
    """Return by which share a configuration became slower from its fastest trial to its slowest, 0 if that is noise.

    Noise is what the spread of the steps explains, at 99.7 % (three standard errors).
    """
    known = [trial for trial in trials if len(trial) >= 2]
    if len(known) < 2:
        return 0.0
    fastest, slowest = min(known, key=statistics.fmean), max(known, key=statistics.fmean)
    error = math.sqrt(sum(_log_variance(trial) / len(trial) for trial in (fastest, slowest)))
    change = statistics.fmean(slowest) / statistics.fmean(fastest)
    return change - 1 if math.log(change) > 3 * error else 0.0


def _flat(trials: Sequence[Sequence[float]]) -> list[float]:
    return [value for trial in trials for value in trial]


def _log_means(side: Sequence[Sequence[float]]) -> list[float]:
    return [math.log(statistics.fmean(trial)) for trial in side]


def _log_variance(values: Sequence[float]) -> float:
    """Not by `statistics.variance`, whose exact fractions took half of what a search computes between its trials."""
    logs = [math.log(v) for v in values]
    mean = statistics.fmean(logs)
    return math.fsum((log - mean) ** 2 for log in logs) / (len(logs) - 1)


def _step_variance(trials: Sequence[Sequence[float]]) -> float:
    """Return the variance of the logarithm of a step's time within a trial, pooled over the trials."""
    known = [trial for trial in trials if len(trial) >= 2]
    degrees = sum(len(trial) - 1 for trial in known)
    return sum((len(trial) - 1) * _log_variance(trial) for trial in known) / degrees if degrees else 0.0


def _pooled_half_width(a: Sequence[float], b: Sequence[float]) -> float:
    """Student's interval with one variance for both sides: the same machine makes the noise of both."""
    if min(len(a), len(b)) < 2:
        return math.inf
    degrees = len(a) + len(b) - 2
    pooled = ((len(a) - 1) * _log_variance(a) + (len(b) - 1) * _log_variance(b)) / degrees
    return t95(degrees) * math.sqrt(pooled * (1 / len(a) + 1 / len(b)))
