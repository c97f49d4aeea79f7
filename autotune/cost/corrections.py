"""Measurements correct predictions: regressions of measured over predicted, per device and model type.

Memory: how much more or less than counted each component really takes, and what is taken in addition to all of them.
Time: by which factors the roofline is off, for all configurations, for those that share a knob, and for similar ones.
Both start from a prior, so the first measurement moves all predictions and later ones separate the effects of knobs.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Mapping, Sequence
from operator import attrgetter
from typing import Literal, NamedTuple

import numpy as np
from pydantic import Field

from autotune.cost.gaussian_process import EXPECTED, SIZE, Process
from autotune.cost.memory import Components
from autotune.cost.profile import Vector
from autotune.value import Value
from autotune.values.catalogue import gpu_of
from autotune.values.config import KNOBS, TrainConfig
from autotune.values.estimate import Rates
from autotune.values.hardware import Hardware

# Half of a 95 % interval, in standard deviations.
Z = 1.96

# Unit of what is taken in addition to all components.
_CONSTANT_BYTES = float(100 << 20)

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

# Of the logarithm of the factor that a knob's predicted time is off by (SIZE: from a micro-batch of 1 to one of 16).
# Some devices emulate a precision, and a way of running experts or a compiler may be written for another, which is
# surprising; what only changes the order of the same work is off by less.
_TIME_KNOB = 0.15
_SURPRISING = {"precision": 0.25, "experts": 0.3, "compile": 0.3, "quantization": 0.3}
_TIME_PRIORS = {SIZE: 0.25, "attention": 0.2, "sharding": 0.2, **_SURPRISING}


class Observation(Value):
    """One trial: features and, for each quantity that was measured, measured over predicted."""

    key: str = Field(description="of configuration and workload")
    memory_features: dict[str, float]
    memory: dict[str, float] = Field(description="by 'allocated', 'reserved' and 'device'")
    time_features: dict[str, float]
    log_time: float | None = Field(description="logarithm of measured over predicted seconds; None: not measured")


def memory_features(parts: Components, unused: float, *, compiled: bool = False) -> dict[str, float]:
    """Return the share that each component has of the predicted memory; `compiled`: activations count once more.

    A compiler decides by itself what is saved and what is recomputed: so much of them may be missing, or come on top.
    """
    total = parts.allocated + unused
    return {
        "fixed": (parts.weights + parts.gradients + parts.optimizer_state) / total,
        "activations": parts.activations / total,
        "temporaries": parts.temporaries / total,
        "unused": unused / total,
        "constant": _CONSTANT_BYTES / total,
        **({"communication": parts.communication / total} if parts.communication else {}),
        **({"compiled": (parts.activations + parts.temporaries) / total} if compiled else {}),
    }


_FEATURES = {name: knob for name, knob in KNOBS.items() if knob.knob.feature is not None}
_featured = attrgetter(*_FEATURES)


def time_features(config: TrainConfig) -> dict[str, float]:
    """Return the features by which a configuration's predicted time may be wrong; shared, so not to be changed."""
    return _time_features(config.per_device_train_batch_size, _featured(config))


@functools.lru_cache(maxsize=1 << 16)
def _time_features(size: int, values: tuple[object, ...]) -> dict[str, float]:
    features = {"all": 1.0, SIZE: math.log2(size) / 4}
    for known, value in zip(_FEATURES.values(), values, strict=True):
        feature = known.filled(known.knob.feature, value)
        if feature is not None:
            features[feature] = 1.0
    return features


def regression(
    priors: Mapping[str, tuple[float, float]],
    rows: Sequence[Mapping[str, float]],
    values: Sequence[float],
    noises: Sequence[float],
) -> tuple[Vector, Vector]:
    """Return the mean and covariance of coefficients, each with a prior of its own (Bishop, PRML, 3.3).

    Args:
        priors: Mean and standard deviation of each feature's coefficient, which stay as they are where it isn't seen.
        rows: Features of what was observed.
        values: What was observed.
        noises: Standard deviation of each observation.
    """
    means, deviations = np.array(list(priors.values())).T
    weights = 1 / np.array(noises, dtype=float)
    seen = _columns(priors, rows) * weights[:, None]
    precision = np.diag(deviations**-2.0) + seen.T @ seen
    covariance: Vector = np.asarray(np.linalg.inv(precision), dtype=float)
    return covariance @ (means / deviations**2 + seen.T @ (weights * np.array(values, dtype=float))), covariance


def _columns(names: Iterable[str], rows: Sequence[Mapping[str, float]]) -> Vector:
    listed = list(names)
    return np.array([[row.get(name, 0.0) for name in listed] for row in rows]).reshape(len(rows), len(listed))


class Corrections:
    """The regressions over a set of observations.

    Args:
        observations: What was measured so far.
        framework_bytes: What is taken on the device in addition to all components, before anything was measured:
            mean and standard deviation.
        time_spread: How unsure the predicted time is before anything was measured.
    """

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
        self._time = time_process(time_spread, [row for row, _ in times], [value for _, value in times])

    def with_observations(self, *observations: Observation) -> Corrections:
        """Return corrections that know more observations, each in place of an earlier one of the same kind."""
        latest = {o.key: o for o in observations}
        others = [o for o in self.observations if o.key not in latest]
        return Corrections((*others, *latest.values()), self._framework_bytes, self._time_spread)

    def memory(self, quantity: str, features: Mapping[str, float]) -> tuple[float, float]:
        """Return the factor from predicted to measured memory, and its standard deviation, noise included."""
        mean, deviation = self.memories(quantity, [features])
        return float(mean[0]), float(deviation[0])

    def memories(self, quantity: str, features: Sequence[Mapping[str, float]]) -> tuple[Vector, Vector]:
        """Return `memory` for many: factors and standard deviations."""
        mean, covariance = self._memory[quantity]
        rows = _columns(self._priors[quantity], features)
        variance = np.einsum("ij,jk,ik->i", rows, covariance, rows) + _MEMORY_NOISE**2
        return rows @ mean, np.hypot(np.sqrt(variance), [_run_noise(f) for f in features])

    def log_time(self, features: Sequence[Mapping[str, float]]) -> tuple[Vector, Vector]:
        """Return logarithms of the factors from predicted to measured seconds, and standard deviations of a trial's."""
        mean, deviation = self._time.predict(features)
        each = [self._time_spread.each * f.get("several", 0.0) for f in features]
        return mean, np.hypot(np.hypot(deviation, self._time.noise), each)

    def gain_deviations(self, features: Sequence[Mapping[str, float]], reference: Mapping[str, float]) -> Vector:
        """Return standard deviations of the logarithms of the factors over that of `reference`, without noise."""
        return self._time.predict(features, reference)[1]


def _run_noise(memory_features: Mapping[str, float]) -> float:
    # One compiled configuration says little of the next one: fusion and what is recomputed differ. What a process takes
    # in addition to its training differs by 0.3 MiB (benchmarks/tables), in units of _CONSTANT_BYTES.
    return math.hypot(0.0035 * memory_features["constant"], 0.5 * memory_features.get("compiled", 0.0))


class TimeSpread(NamedTuple):
    """How unsure predicted seconds are before anything is measured, as standard deviations of their logarithm."""

    device: float  # of what is off for all configurations alike, as the device's rates are
    knobs: float = 1.0  # factor on the deviations of knobs, residuals and noise
    several: float = 0.2  # of what is off for all trainings on several devices
    each: float = 0.0  # of what is off for each of them by itself, which no trial of another tells


def time_process(
    spread: TimeSpread, features: Sequence[Mapping[str, float]] = (), log_times: Sequence[float] = ()
) -> Process:
    """Return the process of the logarithms of measured over predicted seconds, after some were observed."""
    knobs = {name: spread.knobs * prior for name, prior in _TIME_PRIORS.items()}
    expected = EXPECTED._replace(residual=spread.knobs * EXPECTED.residual, noise=spread.knobs * EXPECTED.noise)
    priors = {**knobs, "all": spread.device, "several": spread.several}
    return Process(priors, spread.knobs * _TIME_KNOB, frozenset(_SURPRISING), features, log_times, expected)


Known = Literal["rows", "generation", "sheet"]

# By the errors on published rows: `python benchmarks/predictor.py`, "deviations" of its last line (2026-11-23, 395 rows
# of six sources; how they are estimated is in `benchmarks/published/intervals.py`).
_GPU_SPREADS: dict[Known, TimeSpread] = {
    "rows": TimeSpread(0.03, 0.25, 0.26, 0.39),
    "generation": TimeSpread(0.12, 0.46, 0.26, 0.39),
    "sheet": TimeSpread(0.32, 0.46, 0.26, 0.39),
}


def known_by(gpu: str, capability: tuple[int, int] | None) -> Known:
    """Return how well the time on a GPU is known: by published trainings on it, on its generation, or by neither."""
    if gpu.startswith(("a100", "v100")):
        return "rows"
    return "generation" if capability in ((7, 0), (8, 0), (8, 6)) else "sheet"


def time_spread(rates: Rates, hardware: Hardware) -> TimeSpread:
    """Return how unsure predicted seconds are before any trial.

    A GPU by what published trainings say; with rates that were measured on it, it is taken to be known as one of which
    there are rows. A processor with rates that were measured on it, or of which only cores and vector extensions are
    known, and which others may be using. Where operators were measured, all of 240 trials of six small models lay
    within, and 95 % after one of the model's (results/2026-11-23-amd-epyc-ranking-trials.json of benchmarks, twice, by
    which it was chosen).
    """
    if hardware.is_cpu:
        if rates.timings is not None:
            return TimeSpread(0.25, 0.75)
        return TimeSpread(0.25 if rates.source == "measured" else 0.7)
    if rates.source == "measured":
        return _GPU_SPREADS["rows"]
    gpu = gpu_of(hardware.name)
    return _GPU_SPREADS["sheet" if gpu is None else known_by(gpu.name, gpu.capability)]
