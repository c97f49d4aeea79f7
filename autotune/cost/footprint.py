"""The memory of configurations as counted, before anything that was measured corrects it. Pure.

What doesn't depend on the micro-batch, or on what is learned, is remembered, since a search asks again and again: what
one of several devices holds, and what the allocator holds unused.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from autotune.cost.family import Family
from autotune.cost.memory import Components, components
from autotune.cost.profile import Profile
from autotune.cost.reserve import Held, held_bytes
from autotune.cost.sharding import Share, Spread, in_flight, share_of
from autotune.values.config import TrainConfig

Vector = NDArray[np.float64]


class Counted(NamedTuple):
    """Of micro-batches of one kind of configuration, a row for each."""

    seconds: Vector  # of an optimizer step
    allocated: Vector  # bytes at the peak
    features: list[dict[str, float]]  # of the memory, by which it is corrected
    outside: float  # bytes outside of the allocator that are not learned
    unsure: Vector  # bytes: lower bound of the standard deviation of the memory


@dataclass(frozen=True)
class Footprints:
    """Memory of configurations.

    Args:
        shares: Of devices, as far as they were asked for.
        held: What the allocator gives out and holds on one device, as far as it was asked for.
    """

    shares: dict[tuple[object, ...], Share] = field(default_factory=dict, repr=False)
    held: dict[tuple[Family, str, int, bool], Held] = field(default_factory=dict, repr=False)

    def share(self, config: TrainConfig, profile: Profile, accumulation: float) -> Share:
        """Return what one device holds."""
        spread, accumulated = Spread.of(config), accumulation > 1
        key = (profile.family, config.optim, spread, accumulated)
        if key not in self.shares:
            self.shares[key] = share_of(profile, config.optim, spread, accumulated=accumulated)
        return in_flight(self.shares[key], config.parallelism, int(accumulation))

    def components(self, config: TrainConfig, profile: Profile, size: int, accumulation: float) -> Components:
        """Return the memory by component for a micro-batch of `size`."""
        share = self.share(config, profile, accumulation)
        return components(profile, config.optim, size, accumulation, share)

    def parts(self, config: TrainConfig, profile: Profile, accumulation: int) -> tuple[Components, float]:
        """Return the memory by component, and what the allocator reserves beyond it."""
        size = config.per_device_train_batch_size
        parts = self.components(config, profile, size, accumulation)
        if profile.family.device == "cpu":  # its allocator holds nothing
            return parts, 0.0
        key = (profile.family, config.optim, size, accumulation > 1)
        if key not in self.held:
            found = held_bytes(
                profile.excerpt,
                config.optim,
                size,
                accumulated=accumulation > 1,
                generation=profile.family.generation,
            )
            # Buffers are no part of the excerpt: scales of quantized weights, above all.
            self.held[key] = Held(*(peak + profile.buffers_bytes for peak in found))
        held = self.held[key]
        if config.parallelism.is_single:
            parts = replace(parts, temporaries=parts.temporaries + held.allocated - parts.allocated)
        return parts, float(held.reserved - held.allocated)
