"""Linear regression that starts from a prior: exact after a few observations, never far from it after none. Pure.

And the standard normal distribution, for many values at once.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray


def below(z: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return how probable it is that a standard normal variable is below each of `z`."""
    return np.array([0.5 * math.erfc(-value / math.sqrt(2)) for value in z.tolist()])


def density(z: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the density of a standard normal variable at each of `z`."""
    found: NDArray[np.float64] = np.exp(-0.5 * z**2) / math.sqrt(2 * math.pi)
    return found


@dataclass
class Regression:
    """Bayesian linear regression over named features, each coefficient with a prior of its own (Bishop, PRML, 3.3).

    A feature that was never observed keeps its prior.

    Args:
        priors: Mean and standard deviation of each feature's coefficient.
        noise: Standard deviation of an observation.
    """

    priors: Mapping[str, tuple[float, float]]
    noise: float
    _rows: list[NDArray[np.float64]] = field(default_factory=list)
    _values: list[float] = field(default_factory=list)
    _mean: NDArray[np.float64] = field(init=False)
    _covariance: NDArray[np.float64] = field(init=False)

    def __post_init__(self) -> None:
        self._solve()

    def observe(self, features: Mapping[str, float], value: float, *, noise: float | None = None) -> None:
        """Take in one observation; `noise` if it is less sure than others."""
        weight = 1.0 if noise is None else self.noise / noise
        self._rows.append(weight * self._row(features))
        self._values.append(weight * value)
        self._solve()

    def predict(self, features: Mapping[str, float]) -> tuple[float, float]:
        """Return the expected value and its standard deviation, noise included."""
        mean, deviation = self.predict_many([features])
        return float(mean[0]), float(deviation[0])

    def predict_many(self, features: Sequence[Mapping[str, float]]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Return `predict` for each row of features."""
        rows = np.stack([self._row(f) for f in features])
        variance = np.einsum("ij,jk,ik->i", rows, self._covariance, rows) + self.noise**2
        return rows @ self._mean, np.sqrt(variance)

    def __len__(self) -> int:
        return len(self._values)

    def _row(self, features: Mapping[str, float]) -> NDArray[np.float64]:
        unknown = features.keys() - self.priors.keys()
        if unknown:
            raise KeyError(f"no prior for {sorted(unknown)}")
        return np.array([features.get(name, 0.0) for name in self.priors])

    def _solve(self) -> None:
        means, deviations = np.array(list(self.priors.values())).T
        precision = np.diag(deviations**-2.0)
        weighted = precision @ means
        if self._rows:
            rows, values = np.stack(self._rows), np.array(self._values)
            precision = precision + rows.T @ rows / self.noise**2
            weighted = weighted + rows.T @ values / self.noise**2
        self._covariance = np.linalg.inv(precision)
        self._mean = self._covariance @ weighted
