"""A Gaussian process over configurations: the effect of each knob alone, and a residual that similar ones share.

The value of a configuration is the sum of a weight for each of its features and of a residual, which is correlated
between configurations that differ in few knobs (Rasmussen and Williams, Gaussian Processes for Machine Learning, 2.2
and 2.7). The standard deviations of residuals and noise are learned too: by the likelihood of what was observed, over a
grid. Pure.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from autotune.cost.profile import Vector

Features = Mapping[str, float]

# The one feature with more values than 0 and 1: the logarithm to base 16 of the micro-batch.
SIZE = "samples"

# By how much the logarithm of the correlation of two residuals falls with each knob that differs, and with each
# doubling of the micro-batch.
_PER_KNOB, _PER_DOUBLING = 0.5, 0.4


class Scales(NamedTuple):
    """Standard deviations of residuals and of noise, and the factor on the priors of surprising features."""

    residual: float
    noise: float
    surprise: float


# The grid of scales, and what is expected before anything is observed, if not said: each is log-normal around that,
# with a standard deviation of 1.
_RESIDUALS, _NOISES = (0.02, 0.04, 0.08, 0.15, 0.25), (0.02, 0.04, 0.08, 0.15, 0.25)
_SURPRISES = (1.0, 3.0, 8.0)
EXPECTED = Scales(0.08, 0.04, 1.0)

# Scales that are less probable than this share of the most probable ones are left out.
_IMPROBABLE = 0.02

# The scales are judged by so many of the latest observations. Where there are more, the most probable scales stand for
# all: what so many leave open hardly matters, while grids and means over hundreds of observations take their time.
_MOST_JUDGED = 60


class Process:
    """The posterior after a set of observations.

    Few observations leave the scales open, so predictions are the mean over all scales that are probable enough, with
    the variance of that mixture.

    Args:
        priors: Standard deviation of each feature's weight, whose mean is 0, by the feature's name up to an "=".
        other: Prior standard deviation for features not in `priors`.
        surprising: Features whose weight now and then is far larger: the priors of all of them by a factor that is
            learned.
        rows: Features of what was observed.
        values: What was observed, in the same order.
        expected: The scales that are expected.
    """

    def __init__(
        self,
        priors: Features,
        other: float,
        surprising: frozenset[str],
        rows: Sequence[Features],
        values: Sequence[float],
        expected: Scales = EXPECTED,
    ) -> None:
        self._priors = priors
        self._other = other
        self._surprising = surprising
        self._rows = list(rows)
        self._values = np.array(values, dtype=float)
        self._weights = self._weigh_scales(expected)

    @property
    def residual(self) -> float:
        """Standard deviation of residuals: the root mean square over the probable scales."""
        return math.sqrt(sum(weight * scales.residual**2 for scales, weight in self._weights.items()))

    @property
    def noise(self) -> float:
        """Standard deviation of the noise, in the same way."""
        return math.sqrt(sum(weight * scales.noise**2 for scales, weight in self._weights.items()))

    def predict(self, features: Sequence[Features], reference: Features | None = None) -> tuple[Vector, Vector]:
        """Return for each configuration the expected value and its standard deviation, without noise.

        With a `reference`, of the difference to its value.
        """
        # Configurations share few objects (`corrections.time_features`), each of which is looked at once.
        ids = np.fromiter(map(id, features), dtype=np.int64, count=len(features))
        _, firsts, again = np.unique(ids, return_index=True, return_inverse=True)
        order = np.argsort(firsts)  # as they come, wherever they lie in memory
        distinct, again = [features[first] for first in firsts[order]], np.argsort(order)[again]
        names = _names(itertools.chain(self._rows, distinct, [reference or {}]))
        known, asked = _matrix(self._rows, names), _matrix(distinct, names)
        beside = None if reference is None else _matrix([reference], names)
        lengths = np.ones(len(asked))  # of the residual's variance
        alike, seen = _correlation(known, asked), _correlation(known, known)
        if beside is not None:
            lengths = 2 - 2 * _correlation(asked, beside)[:, 0]
            alike = alike - _correlation(known, beside)
            asked = asked - beside
        means, variances = [], []
        for scales in self._weights:
            priors = self._deviations(names, scales.surprise)
            mean, variance = np.zeros(len(asked)), np.sum((asked * priors) ** 2, axis=1)
            variance += scales.residual**2 * lengths
            if self._rows:
                lower = _lower(known * priors, seen, scales)
                cross = (known * priors**2) @ asked.T + scales.residual**2 * alike
                solved = np.linalg.solve(lower, np.column_stack((cross, self._values)))
                mean = solved[:, :-1].T @ solved[:, -1]
                variance -= np.sum(solved[:, :-1] ** 2, axis=0)
            means.append(mean)
            variances.append(variance)
        weights, all_means = np.array(list(self._weights.values())), np.array(means)
        mixed: Vector = weights @ all_means
        deviation: Vector = np.sqrt(np.maximum(weights @ (np.array(variances) + (all_means - mixed) ** 2), 1e-12))
        return mixed[again], deviation[again]

    def _deviations(self, names: Sequence[str], surprise: float) -> Vector:
        """Return the prior standard deviations of features' weights."""
        kinds = [name.partition("=")[0] for name in names]
        return np.array(
            [self._priors.get(k, self._other) * (surprise if k in self._surprising else 1.0) for k in kinds]
        )

    def _weigh_scales(self, expected: Scales) -> dict[Scales, float]:
        """Return how probable each choice of scales is after what was observed, without the improbable ones."""
        if len(self._rows) < 2:
            return {expected: 1.0}
        values, rows = self._values[-_MOST_JUDGED:], self._rows[-_MOST_JUDGED:]
        names = _names(rows)
        known = _matrix(rows, names)
        seen = _correlation(known, known)
        found: dict[Scales, float] = {}
        for scales in itertools.starmap(Scales, itertools.product(_RESIDUALS, _NOISES, _SURPRISES)):
            lower = _lower(known * self._deviations(names, scales.surprise), seen, scales)
            white = np.linalg.solve(lower, values)
            prior = sum((math.log(x / e)) ** 2 for x, e in zip(scales, expected, strict=True))
            found[scales] = float(-0.5 * white @ white - np.log(np.diag(lower)).sum() - 0.5 * prior)
        if len(self._rows) > _MOST_JUDGED:
            return {max(found, key=found.__getitem__): 1.0}
        highest = max(found.values())
        weights = {scales: math.exp(value - highest) for scales, value in found.items()}
        total = sum(weight for weight in weights.values() if weight > _IMPROBABLE)
        return {scales: weight / total for scales, weight in weights.items() if weight > _IMPROBABLE}


def _names(rows: Iterable[Features]) -> list[str]:
    return list(dict.fromkeys([SIZE, *itertools.chain(*rows)]))


def _matrix(rows: Sequence[Features], names: Sequence[str]) -> Vector:
    return np.array([[row.get(name, 0.0) for name in names] for row in rows]).reshape(len(rows), len(names))


def _correlation(left: Vector, right: Vector) -> Vector:
    """Return the correlation of residuals, (left, right), by the micro-batch in the first column and other features."""
    ours, theirs = left[:, 1:], right[:, 1:]
    different = np.maximum(ours.sum(axis=1)[:, None], theirs.sum(axis=1)) - ours @ theirs.T
    doublings = 4.0 * np.abs(left[:, :1] - right[:, 0])  # of the micro-batch
    correlation: Vector = np.exp(-_PER_KNOB * different - _PER_DOUBLING * doublings)
    return correlation


def _lower(weighted: Vector, correlation: Vector, scales: Scales) -> Vector:
    """Return the Cholesky factor of the covariance of what was observed, noise included."""
    noise = scales.noise**2 * np.eye(len(weighted))
    return np.asarray(np.linalg.cholesky(weighted @ weighted.T + scales.residual**2 * correlation + noise), dtype=float)
