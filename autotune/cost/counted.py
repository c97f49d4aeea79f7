"""What configurations take before anything that was measured corrects it, kept, since a search asks again and again."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from autotune.config import TrainConfig
from autotune.cost.predictions import kind_of

Vector = NDArray[np.float64]


class Counted(NamedTuple):
    """Of micro-batches of one kind of configuration, a row for each."""

    seconds: Vector  # of an optimizer step
    allocated: Vector  # bytes at the peak
    features: list[dict[str, float]]  # of the memory, by which it is corrected
    outside: float  # bytes beside the allocator that are not learned
    unsure: Vector  # bytes: the least standard deviation of the memory


@dataclass(frozen=True)
class Counts:
    """What was counted so far, by kind and micro-batches."""

    found: dict[tuple[object, ...], Counted] = field(default_factory=dict, repr=False)

    def of(self, kind: TrainConfig, sizes: Vector, count: Callable[[], Counted]) -> Counted:
        """Return what was counted, or `count` it."""
        key = (kind_of(kind), sizes.tobytes())
        if key not in self.found:
            self.found[key] = count()
        return self.found[key]
