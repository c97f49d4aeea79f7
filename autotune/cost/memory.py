"""Memory of a configuration, by component, from its family's profile. Pure arithmetic.

A step has two kinds of moments that can be its peak: those of a micro-step, with weights and optimizer states beside
what the tape says is alive, and the optimizer's own, with all gradients and its temporaries and no activation. With
accumulation the gradients of the micro-step before are there throughout. What of all this one of several devices has is
the business of `sharding`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from autotune.cost.generation import workspace_bytes
from autotune.cost.profile import MemoryPoint, Profile
from autotune.cost.sharding import ONE_DEVICE, Share, share_of

# The caching allocator hands out multiples of 512 bytes: kMinBlockSize in c10/cuda/CUDACachingAllocator.cpp.
BLOCK_BYTES = 512


@dataclass(frozen=True)
class Components:
    """Bytes at the allocated peak, and where it is."""

    weights: float
    gradients: float
    optimizer_state: float
    activations: float
    temporaries: float
    paged: float  # beyond the allocator
    moment: str
    communication: float = 0.0  # gathered weights and messages

    @property
    def allocated(self) -> float:
        """Return the peak."""
        own = self.weights + self.gradients + self.optimizer_state + self.activations + self.temporaries
        return own + self.communication


def components(
    profile: Profile, optim: str, micro_batch: int, accumulation: int, share: Share | None = None
) -> Components:
    """Return the memory of one configuration of the family.

    Args:
        profile: Of the family.
        optim: The optimizer.
        micro_batch: Samples.
        accumulation: Micro-batches of a step.
        share: What one of several devices holds; None: there is one.
    """
    share = share or share_of(profile, optim, ONE_DEVICE, accumulated=accumulation > 1)
    weights = share.weights + always_bytes(profile)
    stepping = Components(
        weights,
        share.gradients,
        share.states,
        0.0,
        share.stepping,
        share.paged,
        "optimizer step",
        share.step_buffers,
    )
    found = [stepping]
    found += [_moment(p, weights, share, micro_batch, later=False) for p in profile.peaks_first]
    if accumulation > 1:
        found += [_moment(p, weights, share, micro_batch, later=True) for p in profile.peaks_later]
    return max(found, key=lambda c: c.allocated)


def _moment(point: MemoryPoint, weights: float, share: Share, samples: int, *, later: bool) -> Components:
    gradients = point.gradients.at(samples)
    if later:
        kept = share.accumulated + share.gradient_share * point.fresh_gradients.at(samples)
    else:
        kept = share.gradient_share * gradients
    return Components(
        weights,
        kept,
        share.states,
        share.kept * point.activations.at(samples),
        point.temporaries.at(samples),
        share.paged,
        point.operator,
        share.backward_buffers if gradients > 0 else share.forward_buffers,
    )


def allocated_peaks(
    profile: Profile, optim: str, micro_batches: NDArray[np.float64], accumulated: bool, share: Share | None = None
) -> NDArray[np.float64]:
    """Return the allocated peak for each micro-batch: `components` for many at once."""
    share = share or share_of(profile, optim, ONE_DEVICE, accumulated=accumulated)
    always = share.weights + always_bytes(profile) + share.states
    peak = np.full(len(micro_batches), share.gradients + share.stepping + share.step_buffers, dtype=float)
    peak = np.maximum(peak, _highest(profile.peaks_first, micro_batches, share, later=False))
    if accumulated:
        peak = np.maximum(peak, share.accumulated + _highest(profile.peaks_later, micro_batches, share, later=True))
    total: NDArray[np.float64] = always + peak
    return total


def _highest(
    points: Sequence[MemoryPoint], samples: NDArray[np.float64], share: Share, *, later: bool
) -> NDArray[np.float64]:
    gradients = [p.fresh_gradients if later else p.gradients for p in points]

    def lines(part: Literal["constant", "per_sample"]) -> NDArray[np.float64]:
        return np.array(
            [
                share.kept * getattr(p.activations, part)
                + getattr(p.temporaries, part)
                + share.gradient_share * getattr(g, part)
                for p, g in zip(points, gradients, strict=True)
            ]
        )

    constant, slope = lines("constant")[:, None], lines("per_sample")[:, None]
    begun = np.array([[p.gradients.at(float(n)) > 0 for n in samples] for p in points])
    buffers = np.where(begun, share.backward_buffers, share.forward_buffers)
    highest: NDArray[np.float64] = (constant + slope * samples[None, :] + buffers).max(axis=0)
    return highest


def always_bytes(profile: Profile) -> float:
    """Return what a GPU's libraries take of torch's allocator: workspaces, and each weight rounded up to a block."""
    if profile.family.device == "cpu":
        return 0.0
    sizes = ((g.count, g.elements * g.element_bytes) for g in profile.parameters)
    workspaces = 2 * workspace_bytes(profile.family.generation)  # of the forward and of the backward thread
    return workspaces + float(sum(count * (-size % BLOCK_BYTES) for count, size in sizes))
