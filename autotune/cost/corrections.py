"""Measurements correct predictions: regressions of measured over predicted, per device and model type.

Memory: how much more or less than counted each component takes, and what is taken in addition to all of them. Time: by
which factors the roofline is off, for all configurations, for those that share a knob, and for similar ones. Both start
from a prior, so the first measurement moves all predictions and later ones separate the effects of knobs.
"""

import functools
import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Literal, NamedTuple

import numpy as np
from pydantic import Field

from autotune.cost.memory import Components
from autotune.cost.profile import Vector
from autotune.value import Value
from autotune.values.catalogue import gpu_of
from autotune.values.config import KNOBS, TrainConfig
from autotune.values.estimate import Rates
from autotune.values.hardware import Hardware
from autotune.values.workload import LengthProfile

Features = Mapping[str, float]

Z = 1.96  # half of a 95 % interval, in standard deviations
_CONSTANT_BYTES = float(100 << 20)  # unit of what is taken in addition to all components

# Means and standard deviations before anything was measured; the known errors are in docs/how-it-works.md.
_MEMORY_PRIORS = {
    "fixed": (1.0, 0.01),
    "activations": (1.0, 0.05),
    "temporaries": (1.0, 0.08),
    "unused": (1.0, 0.5),
    "communication": (1.0, 0.2),
    "compiled": (0.0, 1.2),
}
_MEMORY_NOISE = 0.008
_LEAST_FACTOR = 0.25  # that of a training smaller than the process around it would fall below zero

# The feature of time that is a number: the logarithm to base 16 of the micro-batch.
SIZE = "samples"

# A knob's feature where it can change little: adapters leave little to an optimizer, 16 bits few products to fp32.
_SLIGHT = 0.1

# Of the logarithm of the factor that a knob's predicted time is off by (SIZE: from a micro-batch of 1 to one of 16).
# Surprising knobs: some devices emulate a precision, and a compiler or a way of running experts may be written for
# another device.
_TIME_KNOB = 0.15
_SURPRISING = {"precision": 0.25, "experts": 0.3, "compile": 0.3, "quantization": 0.3}
# A CUDA graph is recorded for each length, which isn't predicted.
_TIME_PRIORS = {SIZE: 0.25, "attention": 0.2, "sharding": 0.2, "recorded lengths": 0.5, **_SURPRISING}


class Observation(Value):
    """One trial: features and, for each quantity that was measured, measured over predicted."""

    key: str = Field(description="of configuration and workload")
    memory_features: dict[str, float]
    memory: dict[str, float] = Field(description="by 'allocated', 'reserved' and 'device'")
    time_features: dict[str, float]
    log_time: float | None = Field(description="logarithm of measured over predicted seconds; None: not measured")


def memory_features(parts: Components, unused: float, *, compiled: float = 0.0) -> dict[str, float]:
    """Return the share that each component has of the predicted memory; `compiled`: so much more activations count."""
    total = parts.allocated + unused
    # A compiler decides by itself which activations it saves: as much of them may be missing, or come on top.
    return {
        "fixed": (parts.weights + parts.gradients + parts.optimizer_state) / total,
        "activations": parts.activations / total,
        "temporaries": parts.temporaries / total,
        "unused": unused / total,
        "constant": _CONSTANT_BYTES / total,
        **({"communication": parts.communication / total} if parts.communication else {}),
        **({"compiled": compiled * (parts.activations + parts.temporaries) / total} if compiled else {}),
    }


_FEATURES = {name: knob for name, knob in KNOBS.items() if knob.feature is not None}
_featured = attrgetter(*_FEATURES)


def time_features(config: TrainConfig, lengths: LengthProfile | None = None) -> dict[str, float]:
    """Return the features by which a configuration's predicted time may be wrong; shared, so not to be changed."""
    varies = lengths is not None and lengths.differ and config.pad_to_multiple_of is None
    return _time_features(config.per_device_train_batch_size, _featured(config), varies and config.records_graphs)


@functools.lru_cache(maxsize=1 << 16)
def _time_features(size: int, values: tuple[object, ...], records_lengths: bool) -> dict[str, float]:
    features, of = {"all": 1.0, SIZE: math.log2(size) / 4}, dict(zip(_FEATURES, values, strict=True))
    if records_lengths:
        features["recorded lengths"] = 1.0
    slight = {"optim": of["adapter"] is not None, "tf32": of["precision"] != "fp32"}
    for name, value in of.items():
        feature = _FEATURES[name].feature_of(value)
        if feature is not None:
            features[feature] = _SLIGHT if slight.get(name) else 1.0
    return features


def regression(
    priors: Mapping[str, tuple[float, float]],
    rows: Sequence[Features],
    values: Sequence[float],
    noises: Sequence[float],
) -> tuple[Vector, Vector]:
    """Return the mean and covariance of coefficients, each with a prior of its own (Bishop, PRML, 3.3).

    Priors are means and standard deviations, kept where a feature isn't seen; `noises` are the deviations of `values`.
    """
    means, deviations = np.array(list(priors.values())).T
    weights = 1 / np.array(noises, dtype=float)
    seen = _columns(rows, list(priors)) * weights[:, None]
    precision = np.diag(deviations**-2.0) + seen.T @ seen
    covariance: Vector = np.asarray(np.linalg.inv(precision), dtype=float)
    return covariance @ (means / deviations**2 + seen.T @ (weights * np.array(values, dtype=float))), covariance


def _columns(rows: Sequence[Features], names: Sequence[str]) -> Vector:
    return np.array([[row.get(name, 0.0) for name in names] for row in rows]).reshape(len(rows), len(names))


class TimeSpread(NamedTuple):
    """How unsure predicted seconds are before anything is measured: standard deviations of errors of the logarithm."""

    device: float  # of an error that all configurations share, as of the device's rates
    knobs: float = 1.0  # factor on the deviations of knobs, residuals and noise
    several: float = 0.2  # of an error that all trainings on several devices share
    each: float = 0.0  # of an error that each of these has by itself, which no trial of another tells

    @classmethod
    def of(cls, rates: Rates, hardware: Hardware) -> "TimeSpread":
        """Return how unsure predicted seconds are before any trial.

        A GPU by what published trainings say. Of a processor only cores and vector extensions may be known. Where its
        operators were measured, all of 240 trials of six small models lay within, and 95 % after one of the model's
        (results/2026-11-23-amd-epyc-ranking-trials.json of benchmarks, by which it was chosen).
        """
        if hardware.is_cpu:
            return cls(0.7) if rates.timings is None else cls(0.25, 0.75)
        gpu = gpu_of(hardware.name)
        return _GPU_SPREADS["sheet" if gpu is None else known_by(gpu.name, gpu.capability)]

    def process(self, features: Sequence[Features] = (), log_times: Sequence[float] = ()) -> "Process":
        """Return the process of the logarithms of measured over predicted seconds, after some were observed."""
        knobs = {name: self.knobs * prior for name, prior in _TIME_PRIORS.items()}
        expected = EXPECTED._replace(residual=self.knobs * EXPECTED.residual, noise=self.knobs * EXPECTED.noise)
        priors = {**knobs, "all": self.device, "several": self.several}
        return Process(priors, self.knobs * _TIME_KNOB, features, log_times, expected)


class Corrections:
    """The regressions over all observations; without any, `framework_bytes` (mean, deviation) are added."""

    def __init__(
        self, observations: Sequence[Observation], framework_bytes: tuple[float, float], time_spread: TimeSpread
    ) -> None:
        self.observations = tuple(observations)
        self._framework_bytes = framework_bytes
        self._time_spread = time_spread
        mean, deviation = framework_bytes
        self._priors: dict[str, dict[str, tuple[float, float]]] = {
            "allocated": {**_MEMORY_PRIORS, "unused": (0.0, 1e-6), "constant": (0.0, 0.1)},
            "reserved": {**_MEMORY_PRIORS, "constant": (0.0, 0.2)},
            "device": {**_MEMORY_PRIORS, "constant": (mean / _CONSTANT_BYTES, deviation / _CONSTANT_BYTES)},
        }
        self._memory: dict[str, tuple[Vector, Vector]] = {}
        for quantity, priors in self._priors.items():
            seen = [o for o in self.observations if quantity in o.memory]
            rows = [o.memory_features for o in seen]
            noises = [math.hypot(_MEMORY_NOISE, _run_noise(row)) for row in rows]
            self._memory[quantity] = regression(priors, rows, [o.memory[quantity] for o in seen], noises)
        times = [(o.time_features, o.log_time) for o in self.observations if o.log_time is not None]
        self.time = time_spread.process([row for row, _ in times], [value for _, value in times])

    def with_observations(self, *observations: Observation) -> "Corrections":
        latest = {o.key: o for o in observations}
        others = [o for o in self.observations if o.key not in latest]
        return Corrections((*others, *latest.values()), self._framework_bytes, self._time_spread)

    def memory(self, quantity: str, features: Features) -> tuple[float, float]:
        """Return the factor from predicted to measured memory, and its standard deviation, noise included."""
        mean, deviation = self.memories(quantity, [features])
        return float(mean[0]), float(deviation[0])

    def memories(self, quantity: str, features: Sequence[Features]) -> tuple[Vector, Vector]:
        mean, covariance = self._memory[quantity]
        rows = _columns(features, list(self._priors[quantity]))
        variance = np.einsum("ij,jk,ik->i", rows, covariance, rows) + _MEMORY_NOISE**2
        return np.maximum(rows @ mean, _LEAST_FACTOR), np.hypot(np.sqrt(variance), [_run_noise(f) for f in features])

    def log_time(self, features: Sequence[Features]) -> tuple[Vector, Vector]:
        """Return logarithms of the factors from predicted to measured seconds, and standard deviations of a trial's."""
        mean, deviation = self.time.predict(features)
        each = [self._time_spread.each * f.get("several", 0.0) for f in features]
        return mean, np.hypot(np.hypot(deviation, self.time.noise), each)


def _run_noise(memory_features: Features) -> float:
    # One compiled configuration says little of the next one, which fuses and recomputes other operators. Beside their
    # training processes take memory that differs by 0.3 MiB (benchmarks/tables), in units of _CONSTANT_BYTES.
    return math.hypot(0.0035 * memory_features["constant"], 0.5 * memory_features.get("compiled", 0.0))


Known = Literal["rows", "generation", "sheet"]

# By the errors on published rows: `python benchmarks/predictor.py`, "deviations" of its last line (2026-12-01, 395 rows
# of six sources; `benchmarks/published/intervals.py` estimates them).
_GPU_SPREADS: dict[Known, TimeSpread] = {
    "rows": TimeSpread(0.03, 0.25, 0.25, 0.39),
    "generation": TimeSpread(0.12, 0.46, 0.25, 0.39),
    "sheet": TimeSpread(0.32, 0.46, 0.25, 0.39),
}


def known_by(gpu: str, capability: tuple[int, int] | None) -> Known:
    """Return how well the time on a GPU is known: by published trainings on it, on its generation, or by neither."""
    if gpu.startswith(("a100", "v100")):
        return "rows"
    return "generation" if capability in ((7, 0), (8, 0), (8, 6)) else "sheet"


class Scales(NamedTuple):
    """Standard deviations of residuals and of noise, and the factor on the priors of surprising features."""

    residual: float
    noise: float
    surprise: float


# The grid of scales, and those expected before anything is observed: log-normal, with a standard deviation of 1.
# Equal trials of small models differ by 2 to 6 % on an H200 and by 10 % on a processor.
_SIZES = (0.005, 0.015, 0.04, 0.1, 0.25)
_GRID = (_SIZES, _SIZES, (1.0, 3.0, 8.0))
EXPECTED = Scales(0.08, 0.04, 1.0)

# The scales are judged by so many of the latest observations. Where there are more, the most probable scales stand for
# all: they leave little open, while grids and means over hundreds of observations take their time.
_MOST_JUDGED = 60


@dataclass(frozen=True)
class Process:
    """A Gaussian process over configurations, after a set of observations.

    A value is the sum of a weight for each feature, with a mean of 0, and of a residual that is correlated between
    configurations that differ in few knobs (Rasmussen and Williams, Gaussian Processes for Machine Learning, 2.2 and
    2.7). Over a grid of scales, of the priors of surprising features and of the deviations of residuals and noise,
    predictions are the mean over all that are probable enough, with the variance of that mixture.
    """

    priors: Features  # standard deviations of weights, by the feature's name up to an "="
    other: float  # of the weights of all further features
    rows: Sequence[Features]  # of what was observed
    values: Sequence[float]
    expected: Scales = EXPECTED

    @property
    def noise(self) -> float:
        """Standard deviation of the noise: the root mean square over the probable scales."""
        return math.sqrt(sum(weight * scales.noise**2 for scales, weight in self._scales.items()))

    def predict(
        self, features: Sequence[Features], reference: Features | None = None, *, together: bool = False
    ) -> tuple[Vector, Vector]:
        """Return expected values over those of a `reference`, and deviations or, `together`, covariances of errors."""
        # Configurations share few objects (`time_features`), each of which is looked at once.
        ids = np.fromiter(map(id, features), dtype=np.int64, count=len(features))
        _, firsts, again = np.unique(ids, return_index=True, return_inverse=True)
        order = np.argsort(firsts)  # as they come, wherever they lie in memory
        distinct, again = [features[first] for first in firsts[order]], np.argsort(order)[again]
        names = _names([*self.rows, *distinct, reference or {}])
        known, asked = _columns(self.rows, names), _columns(distinct, names)
        shared = _correlation(asked, asked) if together else np.ones(len(asked))  # by the residuals
        alike, seen = _correlation(known, asked), _correlation(known, known)
        if reference is not None:
            beside = _columns([reference], names)
            own = _correlation(asked, beside)
            shared = 1 + shared - (own + own.T if together else 2 * own[:, 0])
            alike = alike - _correlation(known, beside)
            asked = asked - beside

        def products(parts: Vector) -> Vector:
            return parts @ parts.T if together else np.sum(parts**2, axis=1)

        means, variances = [], []
        for scales in self._scales:
            priors = self._deviations(names, scales.surprise)
            mean, variance = np.zeros(len(asked)), products(asked * priors) + scales.residual**2 * shared
            if self.rows:
                lower = _lower(known * priors, seen, scales)
                cross = (known * priors**2) @ asked.T + scales.residual**2 * alike
                solved = np.linalg.solve(lower, np.column_stack((cross, self.values)))
                mean = solved[:, :-1].T @ solved[:, -1]
                variance -= products(solved[:, :-1].T)
            means.append(mean)
            variances.append(variance)
        weights, all_means = np.array(list(self._scales.values())), np.array(means)
        mixed: Vector = weights @ all_means
        among = [variance + products((mean - mixed)[:, None]) for mean, variance in zip(means, variances, strict=True)]
        spread = np.tensordot(weights, among, axes=1)
        if together:
            return mixed[again], spread[np.ix_(again, again)]
        return mixed[again], np.sqrt(np.maximum(spread, 1e-12))[again]

    def _deviations(self, names: Sequence[str], surprise: float) -> Vector:
        kinds = [name.partition("=")[0] for name in names]
        return np.array([self.priors.get(k, self.other) * (surprise if k in _SURPRISING else 1.0) for k in kinds])

    @functools.cached_property
    def _scales(self) -> dict[Scales, float]:
        """How probable each choice of scales is after what was observed, without the improbable ones."""
        if len(self.rows) < 2:
            return {self.expected: 1.0}
        values, rows = self.values[-_MOST_JUDGED:], self.rows[-_MOST_JUDGED:]
        names = _names(rows)
        known = _columns(rows, names)
        seen = _correlation(known, known)
        found: dict[Scales, float] = {}
        for scales in itertools.starmap(Scales, itertools.product(*_GRID)):
            lower = _lower(known * self._deviations(names, scales.surprise), seen, scales)
            white = np.linalg.solve(lower, values)
            prior = sum((math.log(x / e)) ** 2 for x, e in zip(scales, self.expected, strict=True))
            found[scales] = float(-0.5 * white @ white - np.log(np.diag(lower)).sum() - 0.5 * prior)
        if len(self.rows) > _MOST_JUDGED:
            return {max(found, key=found.__getitem__): 1.0}
        highest = max(found.values())
        weights = {scales: math.exp(value - highest) for scales, value in found.items()}
        probable = {scales: weight for scales, weight in weights.items() if weight > 0.02}  # of the most probable's
        total = sum(probable.values())
        return {scales: weight / total for scales, weight in probable.items()}


def _names(rows: Sequence[Features]) -> list[str]:
    return list(dict.fromkeys([SIZE, *itertools.chain(*rows)]))


def _correlation(left: Vector, right: Vector) -> Vector:
    """Return the correlation of residuals, (left, right), by the micro-batch in the first column and other features."""
    ours, theirs = left[:, 1:], right[:, 1:]
    different = np.maximum((ours**2).sum(axis=1)[:, None], (theirs**2).sum(axis=1)) - ours @ theirs.T
    doublings = 4.0 * np.abs(left[:, :1] - right[:, 0])
    # The logarithm falls by 0.5 with each knob that differs, and by 0.4 with each doubling of the micro-batch.
    correlation: Vector = np.exp(-0.5 * different - 0.4 * doublings)
    return correlation


def _lower(weighted: Vector, correlation: Vector, scales: Scales) -> Vector:
    """Return the Cholesky factor of the covariance of what was observed, noise included."""
    noise = scales.noise**2 * np.eye(len(weighted))
    return np.asarray(np.linalg.cholesky(weighted @ weighted.T + scales.residual**2 * correlation + noise), dtype=float)
