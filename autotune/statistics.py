"""Means, ratios and their 95 % intervals, for a handful of timings.

Pure. Timings of one process share its luck (placement, clocks), so `ratio_of_means` looks at the means of whole
trials as well as at single steps and gives the wider interval of the two.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from autotune.trial import Interval

# Two-sided 95 % quantiles of Student's t by degrees of freedom (any table, e.g. NIST/SEMATECH e-Handbook 1.3.6.7.2).
_T95 = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131,
    2.120, 2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042,
)  # fmt: skip


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
    numerator: Sequence[Sequence[float]], denominator: Sequence[Sequence[float]]
) -> tuple[float, Interval]:
    """Return the ratio of two mean times and its 95 % interval (Student's on the logarithms).

    Each argument holds the step times of one configuration, one sequence per trial. With two or more trials on both
    sides the spread between trials is looked at too, and the wider interval wins.
    """
    ratio = statistics.fmean(_flat(numerator)) / statistics.fmean(_flat(denominator))
    half = _pooled_half_width(_flat(numerator), _flat(denominator))
    if min(len(numerator), len(denominator)) >= 2:
        half = max(half, _pooled_half_width(*_trial_means(numerator, denominator)))
    return ratio, Interval(low=ratio * math.exp(-half), high=ratio * math.exp(half))


def _flat(trials: Sequence[Sequence[float]]) -> list[float]:
    return [value for trial in trials for value in trial]


def _trial_means(*sides: Sequence[Sequence[float]]) -> list[list[float]]:
    return [[statistics.fmean(trial) for trial in side] for side in sides]


def _log_variance(values: Sequence[float]) -> float:
    return statistics.variance([math.log(v) for v in values])


def _pooled_half_width(a: Sequence[float], b: Sequence[float]) -> float:
    """Student's interval with one variance for both sides: the same machine makes the noise of both."""
    if min(len(a), len(b)) < 2:
        return math.inf
    degrees = len(a) + len(b) - 2
    pooled = ((len(a) - 1) * _log_variance(a) + (len(b) - 1) * _log_variance(b)) / degrees
    return t95(degrees) * math.sqrt(pooled * (1 / len(a) + 1 / len(b)))
