"""Seconds that the devices of a training wait for each other, beyond what their computing hides, and for the host.

What is sent is a table by way of sharding, in bytes that pass through each device's link by the ring algorithms: an
all-gather or a reduce-scatter of S bytes over n ranks (n-1)/n S, an all-reduce twice that (Patarasuk and Yuan,
"Bandwidth optimal all-reduce algorithms for clusters of workstations", 2009; nccl-tests' `doc/PERFORMANCE.md`). DDP
sends 2 Psi a step and ZeRO 3 sends 3 Psi, as in the paper (arXiv:1910.02054, section 7); ZeRO 1 and 2 could do with 2,
but DeepSpeed all-reduces their gradients (`use_multi_rank_bucket_allreduce` in `zero/stage_1_and_2.py`), 3 Psi in all.
Tensor parallelism takes two all-reduces a layer forward and two backward (arXiv:1909.08053, section 3). Pure
arithmetic; a link is taken to be idle otherwise.

With offload a step also waits for the host, where optimizer states or weights lie. Each rank updates its share of the
states with the host's processor and memory: 28 bytes a parameter go over the memory bus with a fused Adam (two states
and the weights read and written, gradients read). ZeRO-Offload (arXiv:2101.06840); FSDP's offload is taken to do the
same, with weights in fp32 that are sent up in each pass. That part of it is hidden behind computing is left out.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np

from autotune.cost.network import Channel, Network
from autotune.cost.predictions import Vector
from autotune.cost.profile import Profile, total_bytes
from autotune.training.parallel_arguments import ZERO_BUCKET_ELEMENTS
from autotune.values.config import Parallelism, Sharding
from autotune.values.estimate import Rates

# DDP's messages hold 25 MiB by default (`bucket_cap_mb`).
_DDP_BUCKET = 25 * (1 << 20)

# Bytes of a parameter that an Adam in fp32 moves.
_ADAM_BYTES = 28.0

# Of a node, bytes/s. Memory: eight channels of DDR4-3200 have 204.8 GB/s, of which STREAM reaches 79 %
# (https://github.com/aigatech/vpbenchmarking).
_HOST_MEMORY = 160e9

# All-reduces of the hidden states in a layer's forward pass under tensor parallelism: after attention and perceptron.
_REDUCTIONS = 2

# Tensors that are exchanged around attention under sequence parallelism: queries, keys, values and outputs.
_EXCHANGED = 4

When = Literal["forward", "backward", "last backward", "step"]
Part = Literal["weights", "gradients"]


@dataclass(frozen=True)
class Exchange:
    """One kind of message of a way of sharding.

    Attributes:
        when: In which pass of each micro-batch, in the backward pass of the last one, or with the optimizer's step.
        part: What is sent.
        factor: How often its bytes pass through a device's link: 1 to gather or to scatter, 2 to reduce for all.
        hidden: Whether it goes on while the device computes.
    """

    when: When
    part: Part
    factor: int
    hidden: bool


_GATHER_AHEAD = Exchange("forward", "weights", 1, hidden=True)
_GATHER_AGAIN = Exchange("backward", "weights", 1, hidden=True)

# FSDP and ZeRO 1 reduce in the last micro-batch of a step only, ZeRO from stage 2 on in each. In stages 1 and 2 the
# weights that each rank has updated are gathered after the step, while nothing is computed.
EXCHANGES: dict[Sharding, tuple[Exchange, ...]] = {
    "none": (Exchange("last backward", "gradients", 2, hidden=True),),
    "zero_1": (
        Exchange("last backward", "gradients", 2, hidden=True),
        Exchange("step", "weights", 1, hidden=False),
    ),
    "zero_2": (Exchange("backward", "gradients", 2, hidden=True), Exchange("step", "weights", 1, hidden=False)),
    "zero_3": (_GATHER_AHEAD, _GATHER_AGAIN, Exchange("backward", "gradients", 1, hidden=True)),
    "fsdp_grad_op": (_GATHER_AHEAD, Exchange("last backward", "gradients", 1, hidden=True)),
    "fsdp_full": (_GATHER_AHEAD, _GATHER_AGAIN, Exchange("last backward", "gradients", 1, hidden=True)),
}


@dataclass(frozen=True)
class Passes:
    """Seconds that a micro-batch's passes compute, for each micro-batch."""

    forward: Vector
    backward: Vector


def exposed_seconds(
    profile: Profile, parallelism: Parallelism, network: Network, passes: Passes, samples: Vector, accumulation: Vector
) -> Vector:
    """Return the seconds of a step that communication adds, for each micro-batch.

    Args:
        profile: Of one device's part of the model.
        parallelism: How it is spread.
        network: The devices.
        passes: What there is to hide behind.
        samples: Micro-batches.
        accumulation: Micro-batches of a step.
    """
    total = np.zeros_like(samples)
    ranks = parallelism.sharding_ranks
    if ranks > 1:
        channel = network.channel(ranks, stride=parallelism.tensor_parallel)
        for exchange in EXCHANGES[parallelism.sharding]:
            times = accumulation if exchange.when in ("forward", "backward") else np.ones_like(accumulation)
            total = total + times * _added(exchange, profile, parallelism, channel, passes)
    total = total + accumulation * tensor_seconds(profile, parallelism, network, samples)
    total = total + accumulation * sequence_seconds(profile, parallelism, network, samples)
    return total


def _added(exchange: Exchange, profile: Profile, parallelism: Parallelism, channel: Channel, passes: Passes) -> Vector:
    """Return what one exchange adds to its pass.

    What is hidden is so but for its first message, or its last, which has nothing to hide behind.
    """
    size = volume(exchange, profile, parallelism.sharding_ranks)
    messages = _messages(profile, parallelism, size)
    seconds = size / channel.bandwidth + messages * channel.latency_s
    if not exchange.hidden or not channel.overlaps:
        return np.full_like(passes.forward, seconds)
    behind = passes.forward if exchange.when == "forward" else passes.backward
    if exchange.part == "gradients" and _GATHER_AGAIN in EXCHANGES[parallelism.sharding]:
        behind = behind / 2  # the other half has the weights that are gathered again
    return np.maximum(seconds / messages, seconds - behind)


def volume(exchange: Exchange, profile: Profile, ranks: int) -> float:
    """Return the bytes that pass through each device's link."""
    size = total_bytes(profile.parameters, trained=exchange.part == "gradients" or exchange.when == "step")
    return exchange.factor * size * (ranks - 1) / ranks


def _messages(profile: Profile, parallelism: Parallelism, size: float) -> int:
    if parallelism.sharding == "none":
        cap = parallelism.ddp_bucket_cap_mb
        return max(1, math.ceil(size / 2 / (cap * (1 << 20) if cap else _DDP_BUCKET)))
    if parallelism.sharding in ("zero_1", "zero_2"):
        return max(1, math.ceil(size / (2 * ZERO_BUCKET_ELEMENTS)))
    return profile.layers + 2  # the embeddings, and norm and head


def tensor_seconds(profile: Profile, parallelism: Parallelism, network: Network, samples: Vector) -> Vector:
    """Return the seconds that a micro-batch waits for all-reduces of hidden states; nothing hides them."""
    return _in_layers(profile, network, parallelism.tensor_parallel, samples, count=_REDUCTIONS, factor=2)


def sequence_seconds(profile: Profile, parallelism: Parallelism, network: Network, samples: Vector) -> Vector:
    """Return the seconds that a micro-batch waits for the exchange of heads against tokens around attention.

    Each device sends all but its own part of queries, keys, values and outputs (DeepSpeed-Ulysses, arXiv:2309.14509,
    section 3.2); keys and values count as wide as queries. Nothing hides it.
    """
    return _in_layers(profile, network, parallelism.sequence_parallel, samples, count=_EXCHANGED, factor=1)


def _in_layers(profile: Profile, network: Network, degree: int, samples: Vector, *, count: int, factor: int) -> Vector:
    """Return the seconds of so many exchanges of hidden states in each pass of a layer, by ring (see `Exchange`)."""
    if degree == 1:
        return np.zeros_like(samples)
    channel = network.channel(degree, stride=1)
    passes = 2 + profile.family.recomputed
    size = factor * (degree - 1) / degree * profile.hidden_bytes * samples
    exchanged: Vector = count * passes * profile.layers * (size / channel.bandwidth + channel.latency_s)
    return exchanged


def host_seconds(
    profile: Profile, parallelism: Parallelism, rates: Rates, devices_per_node: int
) -> tuple[float, float]:
    """Return the seconds of a step, and those that each micro-batch adds.

    Args:
        profile: Of one device's part of the model.
        parallelism: How it is spread, with offload.
        rates: Of the device.
        devices_per_node: Devices that share a host.
    """
    ranks = parallelism.sharding_ranks
    trained = sum(g.count * g.elements for g in profile.parameters if g.trained) / ranks
    per_step = trained * _ADAM_BYTES * devices_per_node / _HOST_MEMORY
    # Gradients go down and what was updated comes up again, as wide as they are computed with.
    per_step += 2 * total_bytes(profile.parameters, trained=True) / ranks / rates.host_bandwidth
    per_micro = 0.0
    if parallelism.offload == "parameters":
        per_micro = 2 * total_bytes(profile.parameters) / ranks / rates.host_bandwidth
    return per_step, per_micro
