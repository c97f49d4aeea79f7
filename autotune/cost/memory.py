"""Memory of a configuration, by component, from its family's profile. Pure arithmetic.

A step has two kinds of moments that can be its peak: those of a micro-step, with weights, optimizer states and what the
tape says is alive, and the optimizer's own, with all gradients and its temporaries and no activation. With accumulation
the gradients of the micro-step before are there throughout. `sharding` knows what one of several devices has of all
this. Outside of the allocator come the CUDA context, or on a CPU the process itself, and NCCL's buffers.

:class:`Footprints` remembers what doesn't depend on the micro-batch, or on what is learned, since a search asks again
and again: what one of several devices holds, and what the allocator holds unused.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from autotune.cost.family import Family, workspace_bytes
from autotune.cost.network import NCCL_BYTES
from autotune.cost.optimizers import OPTIMIZERS
from autotune.cost.profile import MemoryPoint, Profile
from autotune.cost.reserve import Held, held_bytes
from autotune.cost.sharding import ONE_DEVICE, Share, Spread, in_flight, share_of
from autotune.values.config import Parallelism, Precision, TrainConfig
from autotune.values.hardware import Hardware

# The caching allocator hands out multiples of 512 bytes: kMinBlockSize in c10/cuda/CUDACachingAllocator.cpp.
BLOCK_BYTES = 512

# An element of a quantized weight in 4 bits, the fewest.
_PACKED_BYTES = 0.5

_MIB = float(1 << 20)

# The CUDA context and the kernels: 0.47 GiB when they are loaded as they are used, 0.92 GiB when all are (A100, torch
# 2.1 with CUDA 12.1, https://github.com/stas00/ml-engineering). A training run loads nearly all; of published runs
# nvidia-smi showed 0.2 to 1.9 GiB more beyond the reserved memory.
_CUDA = (0.92 * 1024 * _MIB, 0.4 * 1024 * _MIB)

# Of the process on a CPU: the Trainer, oneDNN's primitives and scratchpads. A Llama of one layer of width 64, whose
# training takes 1 MiB, grew by 7 to 20 MiB.
_CPU = (15 * _MIB, 10 * _MIB)


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
    profile: Profile, optim: str, micro_batch: int, accumulation: float, share: Share | None = None
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
    optimizer_step = (0.0, share.stepping, share.paged, "optimizer step", share.step_buffers)
    found = [Components(weights, share.gradients, share.states, *optimizer_step)]
    found += [_moment(p, weights, share, micro_batch, later=False) for p in profile.peaks_first]
    if accumulation > 1:
        found += [_moment(p, weights, share, micro_batch, later=True) for p in profile.peaks_later]
    return max(found, key=lambda c: c.allocated)


def _moment(point: MemoryPoint, weights: float, share: Share, samples: int, *, later: bool) -> Components:
    gradients = point.gradients.at(samples)
    if later:
        gradients_bytes = share.accumulated + share.gradient_share * point.fresh_gradients.at(samples)
    else:
        gradients_bytes = share.gradient_share * gradients
    return Components(
        weights,
        gradients_bytes,
        share.states,
        share.in_flight * point.activations.at(samples),
        point.temporaries.at(samples),
        share.paged,
        point.operator,
        share.backward_buffers if gradients > 0 else share.forward_buffers,
    )


def always_bytes(profile: Profile) -> float:
    """Return what a GPU's libraries take of torch's allocator: workspaces, and each weight rounded up to a block."""
    if profile.family.device == "cpu":
        return 0.0
    sizes = ((g.count, g.elements * g.element_bytes) for g in profile.parameters)
    workspaces = 2 * workspace_bytes(profile.family.generation)  # of the forward and of the backward thread
    return workspaces + float(sum(count * (-size % BLOCK_BYTES) for count, size in sizes))


def framework_bytes(hardware: Hardware) -> tuple[float, float]:
    """Return the bytes that are taken outside of the allocator, and their standard deviation."""
    return _CPU if hardware.is_cpu else _CUDA


def communicators_bytes(hardware: Hardware, parallelism: Parallelism) -> float:
    """Return what NCCL takes for the groups that a device is in: one for each direction a training is spread in."""
    if hardware.is_cpu or parallelism.world_size == 1:
        return 0.0
    degrees = (parallelism.data_parallel, parallelism.tensor_parallel, parallelism.pipeline_parallel)
    return NCCL_BYTES * sum(degree > 1 for degree in degrees)


def states_bytes(parameters: int, config: TrainConfig) -> float:
    """Return what weights, gradients and optimizer states take on one device at least, whatever the operators are.

    Nothing is traced for it: it is the number of parameters, all of them trained unless there is an adapter, times the
    bytes of each. Adapters, what is paged or offloaded and the states of optimizers that aren't known count nothing.
    """
    spread, row = config.parallelism, OPTIMIZERS.get(config.optim)
    if spread.offload != "none":
        return 0.0
    width = 2.0 if config.precision is Precision.PURE_BF16 else 4.0
    each = width if config.quantization is None else _PACKED_BYTES
    if config.adapter is None and config.quantization is None:
        each += 0.0 if config.optim == "lomo" else width  # which steps a weight as soon as it has its gradient
        if row is not None and not row.paged and row.temporaries != "adafactor":
            each += row.states * (row.width or width)
    model_parts = spread.tensor_parallel * spread.pipeline_parallel
    return parameters * each / (model_parts if spread.sharding == "none" else spread.world_size)


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
            generation = profile.family.generation
            found = held_bytes(profile.excerpt, config.optim, size, accumulated=accumulation > 1, generation=generation)
            # Buffers are no part of the excerpt: scales of quantized weights, above all.
            self.held[key] = Held(*(peak + profile.buffers_bytes for peak in found))
        held = self.held[key]
        if config.parallelism.is_single:
            parts = replace(parts, temporaries=parts.temporaries + held.allocated - parts.allocated)
        return parts, float(held.unused)
