"""Predictions for many configurations at once, and which configurations share one formula. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass
from operator import attrgetter
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from autotune.values.config import KNOBS, TrainConfig

Vector = NDArray[np.float64]

# Half of a 95 % interval, in standard deviations.
Z = 1.96


class Counted(NamedTuple):
    """Time and memory of micro-batches of one kind of configuration, uncorrected, a row for each."""

    seconds: Vector  # of an optimizer step
    allocated: Vector  # bytes at the peak
    features: list[dict[str, float]]  # of the memory, by which it is corrected
    outside: float  # bytes outside of the allocator that are not learned
    unsure: Vector  # bytes: lower bound of the standard deviation of the memory


@dataclass(frozen=True)
class Predictions:
    """Arrays with a row for each configuration; NaN where its family has no profile."""

    samples_per_second: Vector
    log_deviation: Vector  # standard deviation of the rate's logarithm
    needed_bytes: Vector  # what the budget has to hold
    needed_deviation: Vector  # standard deviation of that
    surely_bytes: Vector  # what the budget has to hold however wide the deviation is

    @property
    def least_bytes(self) -> Vector:
        """Lower bound of what the budget has to hold."""
        return np.maximum(self.needed_bytes - Z * self.needed_deviation, self.surely_bytes)

    def chance_to_fit(self, budget_bytes: float) -> Vector:
        """Return how probable it is that each configuration stays within a budget."""
        chances = below((budget_bytes - self.needed_bytes) / self.needed_deviation)
        return np.where(self.surely_bytes > budget_bytes, 0.0, chances)


def is_compiled(config: TrainConfig) -> bool:
    """Tell whether a compiler fuses operators, which decides what is saved and recomputed."""
    return config.torch_compile_backend is not None


def notes_on(config: TrainConfig) -> tuple[str, ...]:
    """Return lines on what a prediction leaves out."""
    compiled = (
        "compiled: memory and time are those of the model as written, fused by a rule of thumb; "
        "activations may take a small part of what is predicted, or three times as much"
    )
    return (compiled,) if is_compiled(config) else ()


_TRACED = attrgetter(
    *(name for name, (knob, _) in KNOBS.items() if knob.is_traced and name != "per_device_train_batch_size")
)


def kind_of(config: TrainConfig) -> tuple[object, ...]:
    """Return all that decides which formula predicts a configuration; the micro-batch is its variable."""
    kind: tuple[object, ...] = _TRACED(config)
    return kind


def below(z: Vector) -> Vector:
    """Return how probable it is that a standard normal variable is below each of `z`."""
    return np.array([0.5 * math.erfc(-value / math.sqrt(2)) for value in z.tolist()])


def density(z: Vector) -> Vector:
    """Return the density of a standard normal variable at each of `z`."""
    found: Vector = np.exp(-0.5 * z**2) / math.sqrt(2 * math.pi)
    return found
