"""A Gaussian process over configurations: what knobs do alone, and what near ones have in common beyond that.

Pure. The value of a configuration is the sum of a weight for each of its features and of a misfit of its own, which is
alike for configurations that differ in few knobs (Rasmussen and Williams, Gaussian Processes for Machine Learning, 2.2
and 2.7). How large misfits and noise are is learned, too: by the likelihood of what was observed, over a grid.
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

# The one feature that isn't there or not: the logarithm to base 16 of the micro-batch.
SIZE = "samples"
_DOUBLINGS = 4.0

# By how much the logarithm of the correlation of two misfits falls with each knob and doubling of the micro-batch.
_PER_KNOB, _PER_DOUBLING = 0.5, 0.4


class Sizes(NamedTuple):
    """Standard deviations of misfits and of noise, and by what surprising features' priors are larger."""

    misfit: float
    noise: float
    surprise: float


# Standard deviations that misfits and noise may have, and what is expected of them before anything is observed.
_MISFITS, _NOISES = (0.02, 0.04, 0.08, 0.15, 0.25), (0.02, 0.04, 0.08, 0.15, 0.25)
_SURPRISES = (1.0, 3.0, 8.0)
_EXPECTED = Sizes(0.08, 0.04, 1.0)
_SURENESS = 1.0  # standard deviation of the logarithm of each

# Sizes that are less probable than this share of the most probable are left out.
_IMPROBABLE = 0.02

# Of more observations, the latest say how large misfits and noise are, and the likeliest sizes stand for all: what so
# many leave open hardly matters, while grids and means over hundreds take their time.
_TELLING = 60


class Process:
    """What was observed, and what follows for other configurations.

    Few observations hardly say how large misfits and noise are, so what is predicted is the mean over all sizes that
    are likely enough, and as unsure as they together are.

    Args:
        priors: Standard deviation of each feature's weight, whose mean is 0, by the feature's name up to an "="; those
            without one take `other`.
        other: See there.
        surprising: Features that now and then have a far larger weight: all of them by a factor that is learned.
        rows: Features of what was observed.
        values: What was observed, in the same order.
    """

    def __init__(
        self,
        priors: Features,
        other: float,
        surprising: frozenset[str],
        rows: Sequence[Features],
        values: Sequence[float],
    ) -> None:
        self._priors = priors
        self._other = other
        self._surprising = surprising
        self._rows = list(rows)
        self._values = np.array(values, dtype=float)
        self._seen = {s: self._parts(self._rows, self._rows, s) for s in _SURPRISES}
        self._likely = self._likely_sizes()

    @property
    def misfit(self) -> float:
        """Standard deviation of misfits, all that is likely taken together."""
        return math.sqrt(sum(weight * sizes.misfit**2 for sizes, weight in self._likely.items()))

    @property
    def noise(self) -> float:
        """Standard deviation of the noise, in the same way."""
        return math.sqrt(sum(weight * sizes.noise**2 for sizes, weight in self._likely.items()))

    def predict(self, features: Sequence[Features]) -> tuple[Matrix, Matrix]:
        """Return for each configuration the expected value and its standard deviation, without noise."""
        return self._mixed(features, None)

    def differences(self, features: Sequence[Features], reference: Features) -> tuple[Matrix, Matrix]:
        """Return by how much each value exceeds that of `reference`, and the standard deviation of the difference."""
        mean, deviation = self._mixed([*features, reference], reference)
        return mean[:-1], deviation[:-1]

    def _mixed(self, features: Sequence[Features], reference: Features | None) -> tuple[Matrix, Matrix]:
        """Return means and deviations over all likely sizes, of values or of differences to the last of them."""
        found = []
        for surprise in dict.fromkeys(sizes.surprise for sizes in self._likely):
            near = self._parts(self._rows, features, surprise)
            beside = None if reference is None else self._parts(features, [reference], surprise)
            own = [sum((self._prior(name, surprise) * value) ** 2 for name, value in f.items()) for f in features]
            for sizes, weight in self._likely.items():
                if sizes.surprise == surprise:
                    found.append((weight, *self._posterior(sizes, near, np.array(own), beside)))
        weights, means, variances = (np.array(column) for column in zip(*found, strict=True))
        mean: Matrix = weights @ means
        deviation: Matrix = np.sqrt(np.maximum(weights @ (variances + (means - mean) ** 2), 1e-12))
        return mean, deviation

    def _posterior(
        self, sizes: Sizes, near: tuple[Matrix, Matrix], own: Matrix, beside: tuple[Matrix, Matrix] | None
    ) -> tuple[Matrix, Matrix]:
        """Return means and variances under one choice of sizes.

        Args:
            sizes: The choice.
            near: Covariance by features and correlation of misfits of what was observed with what is asked for.
            own: Variance that features give to what is asked for.
            beside: The same as `near` of what is asked for with the last of it, whose difference is wanted.
        """
        mean, solved = np.zeros(len(own)), np.zeros((1, len(own)))
        if self._rows:
            lower, weights = self._solved(sizes)
            covariance = near[0] + sizes.misfit**2 * near[1]
            mean, solved = covariance.T @ weights, np.asarray(np.linalg.solve(lower, covariance), dtype=float)
        variance = own + sizes.misfit**2 - np.sum(solved**2, axis=0)
        if beside is None:
            return mean, variance
        shared = (beside[0] + sizes.misfit**2 * beside[1])[:, 0] - solved.T @ solved[:, -1]
        return mean - mean[-1], variance + variance[-1] - 2 * shared

    def _solved(self, sizes: Sizes) -> tuple[Matrix, Matrix]:
        linear, alike = self._seen[sizes.surprise]
        seen = linear + sizes.misfit**2 * alike + sizes.noise**2 * np.eye(len(self._rows))
        lower: Matrix = np.asarray(np.linalg.cholesky(seen), dtype=float)
        return lower, np.asarray(np.linalg.solve(lower.T, np.linalg.solve(lower, self._values)), dtype=float)

    def _parts(self, left: Sequence[Features], right: Sequence[Features], surprise: float) -> tuple[Matrix, Matrix]:
        """Return the covariance that features give, and the correlation of the misfits."""
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
        kind = name.partition("=")[0]
        return self._priors.get(kind, self._other) * (surprise if kind in self._surprising else 1.0)

    def _likely_sizes(self) -> dict[Sizes, float]:
        """Return how probable each choice of sizes is after what was observed, without the improbable ones."""
        if len(self._rows) < 2:
            return {_EXPECTED: 1.0}
        values = self._values[-_TELLING:]

        def log_likelihood(sizes: Sizes) -> float:
            linear, alike = (part[-_TELLING:, -_TELLING:] for part in self._seen[sizes.surprise])
            lower = np.linalg.cholesky(linear + sizes.misfit**2 * alike + sizes.noise**2 * np.eye(len(values)))
            white = np.linalg.solve(lower, values)
            unlikely = sum((math.log(x / e) / _SURENESS) ** 2 for x, e in zip(sizes, _EXPECTED, strict=True))
            return float(-0.5 * white @ white - np.log(np.diag(lower)).sum() - 0.5 * unlikely)

        choices = itertools.starmap(Sizes, itertools.product(_MISFITS, _NOISES, _SURPRISES))
        found = {sizes: log_likelihood(sizes) for sizes in choices}
        if len(self._rows) > _TELLING:
            return {max(found, key=found.__getitem__): 1.0}
        highest = max(found.values())
        weights = {sizes: math.exp(value - highest) for sizes, value in found.items()}
        total = sum(weight for weight in weights.values() if weight > _IMPROBABLE)
        return {sizes: weight / total for sizes, weight in weights.items() if weight > _IMPROBABLE}
