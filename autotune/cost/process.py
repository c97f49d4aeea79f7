"""A Gaussian process over configurations: what knobs do alone, and what near ones have in common beyond that.

Pure. The value of a configuration is the sum of a weight for each of its features and of a misfit of its own, which is
alike for configurations that differ in few knobs (Rasmussen and Williams, Gaussian Processes for Machine Learning, 2.2
and 2.7). How large misfits and noise are is learned, too: by the likelihood of what was observed, from a grid.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

Matrix = NDArray[np.float64]
Features = Mapping[str, float]

# The one feature that isn't there or not: the logarithm to base 16 of the micro-batch.
SIZE = "samples"
_DOUBLINGS = 4.0

# By how much the logarithm of the correlation of two misfits falls with each knob and doubling of the micro-batch.
_PER_KNOB, _PER_DOUBLING = 0.5, 0.4

# Standard deviations that misfits and noise may have, and what is expected of them before anything is observed.
_MISFITS, _NOISES = (0.02, 0.04, 0.08, 0.15, 0.25), (0.02, 0.04, 0.08, 0.15, 0.25)
_SURPRISES = (1.0, 3.0, 8.0)
_EXPECTED = (0.08, 0.04, 1.0)
_SURENESS = 1.0  # standard deviation of the logarithm of each

# Of more observations, the latest say how large misfits and noise are: a grid over hundreds takes its time.
_TELLING = 60


class Process:
    """What was observed, and what follows for other configurations.

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
        self.misfit, self.noise, self._surprise = self._likeliest()

    def predict(self, features: Sequence[Features]) -> tuple[Matrix, Matrix]:
        """Return for each configuration the expected value and its standard deviation, without noise."""
        mean, solved, variance = self._posterior(features)
        deviation: Matrix = np.sqrt(np.maximum(variance - np.sum(solved**2, axis=0), 1e-12))
        return mean, deviation

    def differences(self, features: Sequence[Features], reference: Features) -> tuple[Matrix, Matrix]:
        """Return by how much each value exceeds that of `reference`, and the standard deviation of the difference."""
        mean, solved, variance = self._posterior([*features, reference])
        shared = self._kernel(features, [reference])[:, 0] - solved[:, :-1].T @ solved[:, -1]
        own = variance - np.sum(solved**2, axis=0)
        deviation: Matrix = np.sqrt(np.maximum(own[:-1] + own[-1] - 2 * shared, 1e-12))
        return mean[:-1] - mean[-1], deviation

    def _posterior(self, features: Sequence[Features]) -> tuple[Matrix, Matrix, Matrix]:
        """Return the means, what observing takes off the variances as a factor, and the variances before it."""
        own = [sum((self._prior(name, self._surprise) * value) ** 2 for name, value in f.items()) for f in features]
        variance = np.array(own) + self.misfit**2
        if not self._rows:
            return np.zeros(len(features)), np.zeros((1, len(features))), variance
        lower, weights = self._solved
        near = self._kernel(self._rows, features)
        return near.T @ weights, np.asarray(np.linalg.solve(lower, near), dtype=float), variance

    @cached_property
    def _solved(self) -> tuple[Matrix, Matrix]:
        seen = self._kernel(self._rows, self._rows) + self.noise**2 * np.eye(len(self._rows))
        lower: Matrix = np.asarray(np.linalg.cholesky(seen), dtype=float)
        return lower, np.asarray(np.linalg.solve(lower.T, np.linalg.solve(lower, self._values)), dtype=float)

    def _kernel(self, left: Sequence[Features], right: Sequence[Features]) -> Matrix:
        linear, alike = self._parts(left, right, self._surprise)
        return linear + self.misfit**2 * alike

    def _parts(self, left: Sequence[Features], right: Sequence[Features], surprise: float) -> tuple[Matrix, Matrix]:
        """Return the covariance that features give, and the correlation of the misfits."""
        names = list(dict.fromkeys(itertools.chain(*left, *right)))
        a, b = (np.array([[f.get(name, 0.0) for name in names] for f in rows]) for rows in (left, right))
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

    def _likeliest(self) -> tuple[float, float, float]:
        """Return the deviations of misfits and noise, and the surprise, under which what was observed is likeliest."""
        if len(self._rows) < 2:
            return _EXPECTED
        values = self._values[-_TELLING:]
        parts = {s: self._parts(self._rows[-_TELLING:], self._rows[-_TELLING:], s) for s in _SURPRISES}

        def log_likelihood(sizes: tuple[float, float, float]) -> float:
            misfit, noise, surprise = sizes
            linear, alike = parts[surprise]
            lower = np.linalg.cholesky(linear + misfit**2 * alike + noise**2 * np.eye(len(values)))
            white = np.linalg.solve(lower, values)
            unlikely = sum((math.log(x / e) / _SURENESS) ** 2 for x, e in zip(sizes, _EXPECTED, strict=True))
            return float(-0.5 * white @ white - np.log(np.diag(lower)).sum() - 0.5 * unlikely)

        return max(itertools.product(_MISFITS, _NOISES, _SURPRISES), key=log_likelihood)
