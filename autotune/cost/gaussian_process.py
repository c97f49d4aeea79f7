"""A Gaussian process over configurations: the effect of each knob alone, and a residual that similar ones share.

The value of a configuration is the sum of a weight for each of its features and of a residual, which is correlated
between configurations that differ in few knobs (Rasmussen and Williams, Gaussian Processes for Machine Learning, 2.2
and 2.7). The standard deviations of residuals and noise are learned too: by the likelihood of what was observed, over a
grid. Pure.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Matrix = NDArray[np.float64]
Features = Mapping[str, float]

# The one feature with more values than 0 and 1: the logarithm to base 16 of the micro-batch.
SIZE = "samples"
_DOUBLINGS = 4.0  # of the micro-batch in a unit of it

# By how much the logarithm of the correlation of two residuals falls with each knob that differs, and with each
# doubling of the micro-batch.
_PER_KNOB, _PER_DOUBLING = 0.5, 0.4


class Scales(NamedTuple):
    """Standard deviations of residuals and of noise, and the factor on the priors of surprising features."""

    residual: float
    noise: float
    surprise: float


# The grid of scales, and what is expected before anything is observed, if not said: each is log-normal around that.
_RESIDUALS, _NOISES = (0.02, 0.04, 0.08, 0.15, 0.25), (0.02, 0.04, 0.08, 0.15, 0.25)
_SURPRISES = (1.0, 3.0, 8.0)
EXPECTED = Scales(0.08, 0.04, 1.0)
_PRIOR_WIDTH = 1.0  # standard deviation of the logarithm of each scale

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
        self._expected = expected
        self._observed = {s: self._covariance(self._rows, self._rows, s) for s in _SURPRISES}
        self._weights = self._weigh_scales()

    @property
    def residual(self) -> float:
        """Standard deviation of residuals: the root mean square over the probable scales."""
        return math.sqrt(sum(weight * scales.residual**2 for scales, weight in self._weights.items()))

    @property
    def noise(self) -> float:
        """Standard deviation of the noise, in the same way."""
        return math.sqrt(sum(weight * scales.noise**2 for scales, weight in self._weights.items()))

    def predict(self, features: Sequence[Features]) -> tuple[Matrix, Matrix]:
        """Return for each configuration the expected value and its standard deviation, without noise."""
        return self._mixed(features, None)

    def differences(self, features: Sequence[Features], reference: Features) -> tuple[Matrix, Matrix]:
        """Return by how much each value exceeds that of `reference`, and the standard deviation of the difference."""
        mean, deviation = self._mixed([*features, reference], reference)
        return mean[:-1], deviation[:-1]

    def _mixed(self, features: Sequence[Features], reference: Features | None) -> tuple[Matrix, Matrix]:
        """Return means and deviations over all probable scales, of values or of differences to the last of them."""
        names = list(dict.fromkeys(itertools.chain(*features)))
        matrix = np.array([[f.get(name, 0.0) for name in names] for f in features]).reshape(len(features), len(names))
        found = []
        for surprise in dict.fromkeys(scales.surprise for scales in self._weights):
            with_observed = self._covariance(self._rows, features, surprise)
            with_last = None if reference is None else self._covariance(features, [reference], surprise)
            variances = np.sum((matrix * [self._prior(name, surprise) for name in names]) ** 2, axis=1)
            for scales, weight in self._weights.items():
                if scales.surprise == surprise:
                    found.append((weight, *self._posterior(scales, with_observed, variances, with_last)))
        weights, means, spreads = (np.array(column) for column in zip(*found, strict=True))
        mean: Matrix = weights @ means
        deviation: Matrix = np.sqrt(np.maximum(weights @ (spreads + (means - mean) ** 2), 1e-12))
        return mean, deviation

    def _posterior(
        self,
        scales: Scales,
        with_observed: tuple[Matrix, Matrix],
        variances: Matrix,
        with_last: tuple[Matrix, Matrix] | None,
    ) -> tuple[Matrix, Matrix]:
        """Return the means and variances of queried configurations under one choice of scales.

        Args:
            scales: The choice.
            with_observed: Cross-covariance of what was observed with what is queried, as `_covariance` returns it.
            variances: Prior variance that its features give to each query.
            with_last: Cross-covariance of what is queried with the last query, where the difference to that is wanted.
        """
        mean, solved = np.zeros(len(variances)), np.zeros((1, len(variances)))
        if self._rows:
            linear, correlation = self._observed[scales.surprise]
            lower = _lower(linear, correlation, scales)
            weights = np.linalg.solve(lower.T, np.linalg.solve(lower, self._values))
            cross = with_observed[0] + scales.residual**2 * with_observed[1]
            mean, solved = np.asarray(cross.T @ weights, dtype=float), np.asarray(np.linalg.solve(lower, cross))
        variance = variances + scales.residual**2 - np.sum(solved**2, axis=0)
        if with_last is None:
            return mean, variance
        shared = (with_last[0] + scales.residual**2 * with_last[1])[:, 0] - solved.T @ solved[:, -1]
        return mean - mean[-1], variance + variance[-1] - 2 * shared

    def _covariance(
        self, left: Sequence[Features], right: Sequence[Features], surprise: float
    ) -> tuple[Matrix, Matrix]:
        """Return the cross-covariance that features give, and the correlation of the residuals: (left, right) each."""
        names = list(dict.fromkeys(itertools.chain(*left, *right)))
        a, b = (
            np.array([[f.get(name, 0.0) for name in names] for f in rows]).reshape(len(rows), len(names))
            for rows in (left, right)
        )
        deviations = np.array([self._prior(name, surprise) for name in names])
        knobs = [number for number, name in enumerate(names) if name != SIZE]
        sizes = [np.array([f.get(SIZE, 0.0) for f in rows]) for rows in (left, right)]
        known, other = a[:, knobs], b[:, knobs]
        different = np.maximum(known.sum(axis=1)[:, None], other.sum(axis=1)[None, :]) - known @ other.T
        doublings = _DOUBLINGS * np.abs(sizes[0][:, None] - sizes[1][None, :])
        return (a * deviations**2) @ b.T, np.exp(-_PER_KNOB * different - _PER_DOUBLING * doublings)

    def _prior(self, name: str, surprise: float) -> float:
        """Return the standard deviation of a feature's weight."""
        kind = name.partition("=")[0]
        return self._priors.get(kind, self._other) * (surprise if kind in self._surprising else 1.0)

    def _weigh_scales(self) -> dict[Scales, float]:
        """Return how probable each choice of scales is after what was observed, without the improbable ones."""
        if len(self._rows) < 2:
            return {self._expected: 1.0}
        values = self._values[-_MOST_JUDGED:]

        def log_likelihood(scales: Scales) -> float:
            linear, correlation = (part[-_MOST_JUDGED:, -_MOST_JUDGED:] for part in self._observed[scales.surprise])
            lower = _lower(linear, correlation, scales)
            white = np.linalg.solve(lower, values)
            prior = sum((math.log(x / e) / _PRIOR_WIDTH) ** 2 for x, e in zip(scales, self._expected, strict=True))
            return float(-0.5 * white @ white - np.log(np.diag(lower)).sum() - 0.5 * prior)

        choices = itertools.starmap(Scales, itertools.product(_RESIDUALS, _NOISES, _SURPRISES))
        found = {scales: log_likelihood(scales) for scales in choices}
        if len(self._rows) > _MOST_JUDGED:
            return {max(found, key=found.__getitem__): 1.0}
        highest = max(found.values())
        weights = {scales: math.exp(value - highest) for scales, value in found.items()}
        total = sum(weight for weight in weights.values() if weight > _IMPROBABLE)
        return {scales: weight / total for scales, weight in weights.items() if weight > _IMPROBABLE}


def _lower(linear: Matrix, correlation: Matrix, scales: Scales) -> Matrix:
    """Return the Cholesky factor of the covariance of what was observed, noise included."""
    noise = scales.noise**2 * np.eye(len(linear))
    return np.asarray(np.linalg.cholesky(linear + scales.residual**2 * correlation + noise), dtype=float)
