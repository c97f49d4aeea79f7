"""Memory of a configuration, by component, from its family's profile. Pure arithmetic.

A step has two kinds of moments that can be its peak: those of a micro-step, with weights and optimizer states beside
what the tape says is alive, and the optimizer's own, with all gradients and its temporaries and no activation. With
accumulation the gradients of the micro-step before are there throughout.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from autotune.cost.optimizers import state_bytes, temporary_bytes
from autotune.cost.profile import MemoryPoint, Profile

# The caching allocator hands out multiples of 512 bytes: kMinBlockSize in c10/cuda/CUDACachingAllocator.cpp.
BLOCK_BYTES = 512

# cuBLAS takes its workspaces from torch's allocator, one for the forward and one for the backward thread: 8,519,680
# bytes each before Hopper (`parseChosenWorkspaceSize` in aten/src/ATen/cuda/CublasHandlePool.cpp).
WORKSPACES_BYTES = 2 * 8_519_680


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

    @property
    def allocated(self) -> float:
        """Return the peak."""
        return self.weights + self.gradients + self.optimizer_state + self.activations + self.temporaries


def components(profile: Profile, optim: str, micro_batch: int, accumulation: int) -> Components:
    """Return the memory of one configuration of the family.

    Args:
        profile: Of the family.
        optim: The optimizer.
        micro_batch: Samples.
        accumulation: Micro-batches of a step.
    """
    on_cpu = profile.family.device == "cpu"
    states, paged = state_bytes(optim, profile.parameters)
    weights = profile.weights_bytes + always_bytes(profile)
    gradients = profile.gradients_bytes
    stepping = Components(
        weights,
        gradients,
        states,
        0.0,
        temporary_bytes(optim, profile.parameters, on_cpu=on_cpu),
        paged,
        "optimizer step",
    )
    found = [stepping]
    found += [_moment(p, weights, states, paged, 0.0, micro_batch) for p in profile.peaks_first]
    if accumulation > 1:
        found += [_moment(p, weights, states, paged, gradients, micro_batch) for p in profile.peaks_later]
    return max(found, key=lambda c: c.allocated)


def _moment(
    point: MemoryPoint, weights: float, states: float, paged: float, accumulated: float, samples: int
) -> Components:
    fresh = point.fresh_gradients.at(samples)
    gradients = accumulated + fresh if accumulated else point.gradients.at(samples)
    return Components(
        weights,
        gradients,
        states,
        point.activations.at(samples),
        point.temporaries.at(samples),
        paged,
        point.operator,
    )


def allocated_peaks(
    profile: Profile, optim: str, micro_batches: NDArray[np.float64], accumulated: bool
) -> NDArray[np.float64]:
    """Return the allocated peak for each micro-batch: `components` for many at once."""
    states, _ = state_bytes(optim, profile.parameters)
    always = profile.weights_bytes + always_bytes(profile) + states
    temporaries = temporary_bytes(optim, profile.parameters, on_cpu=profile.family.device == "cpu")
    peak = np.full(len(micro_batches), profile.gradients_bytes + temporaries, dtype=float)
    peak = np.maximum(peak, _highest(profile.peaks_first, micro_batches, fresh=False))
    if accumulated:
        peak = np.maximum(peak, profile.gradients_bytes + _highest(profile.peaks_later, micro_batches, fresh=True))
    total: NDArray[np.float64] = always + peak
    return total


def _highest(points: Sequence[MemoryPoint], samples: NDArray[np.float64], *, fresh: bool) -> NDArray[np.float64]:
    gradients = [p.fresh_gradients if fresh else p.gradients for p in points]
    constant = np.array(
        [p.activations.constant + p.temporaries.constant + g.constant for p, g in zip(points, gradients, strict=True)]
    )
    slope = np.array(
        [
            p.activations.per_sample + p.temporaries.per_sample + g.per_sample
            for p, g in zip(points, gradients, strict=True)
        ]
    )
    highest: NDArray[np.float64] = (constant[:, None] + slope[:, None] * samples[None, :]).max(axis=0)
    return highest


def always_bytes(profile: Profile) -> float:
    """Return what a GPU's libraries take of torch's allocator: workspaces, and each weight rounded up to a block."""
    if profile.family.device == "cpu":
        return 0.0
    sizes = ((g.count, g.elements * g.element_bytes) for g in profile.parameters)
    return WORKSPACES_BYTES + float(sum(count * (-size % BLOCK_BYTES) for count, size in sizes))
