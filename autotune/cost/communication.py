"""Seconds that the devices of a training wait for each other, beyond what their computing hides, and for the host.

What is sent is a table by way of sharding, in bytes that pass through each device's link by the ring algorithms: an
all-gather or a reduce-scatter of S bytes over n ranks (n-1)/n S, an all-reduce twice that (Patarasuk and Yuan,
"Bandwidth optimal all-reduce algorithms for clusters of workstations", 2009; nccl-tests' `doc/PERFORMANCE.md`). DDP
sends 2 Psi a step and ZeRO 3 sends 3 Psi, as in the paper (arXiv:1910.02054, section 7); ZeRO 1 and 2 could do with 2,
but DeepSpeed all-reduces their gradients (`use_multi_rank_bucket_allreduce` in `zero/stage_1_and_2.py`), 3 Psi in all.
Tensor parallelism takes two all-reduces a layer forward and two backward (arXiv:1909.08053, section 3). Pure
arithmetic; a link is taken to be idle otherwise. Ranks are dealt out as Megatron-LM does: those of a tensor-parallel
group next to each other, then the data-parallel ones (arXiv:2104.04473, section 3). A group of ranks is as slow as the
slowest link between them; bandwidths are those that collectives attain.

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

from autotune.cost.profile import Profile, Vector, total_bytes
from autotune.training.arguments import ZERO_BUCKET_ELEMENTS
from autotune.values.catalogue import gpu_of
from autotune.values.config import Parallelism, Sharding
from autotune.values.estimate import Rates
from autotune.values.hardware import Hardware

# Share of a link that large collectives attain: 230 to 250 of the 300 GB/s of A100's NVLink 3 in all-reduces over 8
# (https://docs.alayanew.com/en/docs/tech-blog/2026-05-06-nccl-tests), 376 of H100's 450
# (https://github.com/NVIDIA/nccl/issues/1264); of PCIe 35 to 45 of 63 (the first source).
NVLINK_SHARE, PCIE_SHARE, NETWORK_SHARE = 0.8, 0.6, 0.8

# A node's adapters where nothing is said: one of 200 Gb/s for each device, as in NVIDIA's DGX A100 (eight ConnectX-6,
# https://docs.nvidia.com/dgx/dgxa100-user-guide/introduction-to-dgxa100.html). DGX H100 has twice that.
ADAPTER_GB_S = 25.0

# NCCL's buffers of a communicator: device memory fell from 2.00 to 1.28 GiB when it was destroyed (two ranks,
# https://github.com/stas00/ml-engineering, training/performance, torch-dist-mem-usage.py).
NCCL_BYTES = 0.72 * (1 << 30)


@dataclass(frozen=True)
class Channel:
    """The link between the ranks of a group."""

    bandwidth: float  # bytes/s, attained, one way
    latency_s: float
    overlaps: bool = True  # whether a device can go on computing


@dataclass(frozen=True)
class Network:
    """The nodes of a training."""

    devices_per_node: int
    link: float  # bytes/s that a device attains to the others of its node, one way
    node: float  # bytes/s that a node attains to the others, one way
    on_cpu: bool = False  # whether the devices are processes of one CPU

    def channel(self, members: int, *, stride: int) -> Channel:
        """Return the channel of `members` ranks whose numbers are `stride` apart."""
        if self.on_cpu:
            return Channel(self.link, 200e-6, overlaps=False)
        # Seconds that a collective takes at the least: 14 hops of some 3 us over 8 devices of a node, and over 4 nodes
        # 68 us (32 KiB at 0.48 GB/s, https://github.com/stas00/ml-engineering/tree/master/network/benchmarks).
        if members * stride <= self.devices_per_node:
            return Channel(self.link, 30e-6)
        # A ring over several nodes leaves each of them once, and so do those of the ranks between: a group has the
        # share of the node's adapters that it has of its devices.
        inside = max(1, min(members, self.devices_per_node // stride))
        return Channel(min(self.link, self.node * inside / self.devices_per_node), 70e-6)


# One device, which sends nothing.
ALONE = Network(devices_per_node=1, link=1.0, node=1.0)


def network_of(
    hardware: Hardware, world: int, *, nodes: int = 1, gb_s: float | None = None, host_bandwidth: float
) -> Network:
    """Return the network of `world` devices like `hardware` on `nodes` nodes; the link is that of the GPU table.

    `gb_s`: of a node's adapters together, one way; None: :data:`ADAPTER_GB_S` for each device. `host_bandwidth` in
    bytes/s is for a device whose link isn't known.
    """
    each = max(1, -(-world // nodes))
    if hardware.is_cpu:
        # Processes of one CPU exchange through gloo over the loopback device, with the cores that also compute: bytes/s
        # are taken as a fifth of what copying memory attains.
        return Network(each, host_bandwidth * 0.2, host_bandwidth * 0.2, on_cpu=True)
    gpu = gpu_of(hardware.name)
    if gpu is None:
        link = host_bandwidth * PCIE_SHARE
    else:
        link = gpu.link.gb_s * 1e9 * (PCIE_SHARE if gpu.link.kind.startswith("PCIe") else NVLINK_SHARE)
    adapters = ADAPTER_GB_S * each if gb_s is None else gb_s
    return Network(each, link, adapters * 1e9 * NETWORK_SHARE)


@dataclass(frozen=True)
class Exchange:
    """One kind of message of a way of sharding."""

    when: Literal["forward", "backward", "last backward", "step"]  # of each micro-batch, or of a step once
    part: Literal["weights", "gradients"]
    factor: int  # how often its bytes pass through a device's link: 1 to gather or to scatter, 2 to reduce for all
    hidden: bool  # whether it goes on while the device computes


_GATHER_AHEAD = Exchange("forward", "weights", 1, hidden=True)
_GATHER_AGAIN = Exchange("backward", "weights", 1, hidden=True)

# FSDP and ZeRO 1 reduce in the last micro-batch of a step only, ZeRO from stage 2 on in each. In stages 1 and 2 the
# weights that each rank has updated are gathered after the step, while nothing is computed.
EXCHANGES: dict[Sharding, tuple[Exchange, ...]] = {
    "none": (Exchange("last backward", "gradients", 2, hidden=True),),
    "zero_1": (Exchange("last backward", "gradients", 2, hidden=True), Exchange("step", "weights", 1, hidden=False)),
    "zero_2": (Exchange("backward", "gradients", 2, hidden=True), Exchange("step", "weights", 1, hidden=False)),
    "zero_3": (_GATHER_AHEAD, _GATHER_AGAIN, Exchange("backward", "gradients", 1, hidden=True)),
    "fsdp_grad_op": (_GATHER_AHEAD, Exchange("last backward", "gradients", 1, hidden=True)),
    "fsdp_full": (_GATHER_AHEAD, _GATHER_AGAIN, Exchange("last backward", "gradients", 1, hidden=True)),
}


def exposed_seconds(
    profile: Profile, parallelism: Parallelism, network: Network, micro: Vector, samples: Vector, accumulation: Vector
) -> Vector:
    """Return the seconds of a step that communication adds; `micro`: seconds that each micro-batch computes."""
    backward = 2 + profile.family.recomputed  # twice the forward pass, and what is recomputed
    forward_s = micro / (1 + backward)
    exchanges, ranks = EXCHANGES[parallelism.sharding], parallelism.sharding_ranks
    total = np.zeros_like(samples)
    for exchange in exchanges if ranks > 1 else ():
        channel = network.channel(ranks, stride=parallelism.tensor_parallel)
        size, messages = volume(exchange, profile, ranks), profile.layers + 2  # the embeddings, and norm and head
        if parallelism.sharding == "none":
            cap = parallelism.ddp_bucket_cap_mb or 25  # by default (`bucket_cap_mb`)
            messages = max(1, math.ceil(size / 2 / (cap << 20)))
        elif parallelism.sharding in ("zero_1", "zero_2"):
            messages = max(1, math.ceil(size / (2 * ZERO_BUCKET_ELEMENTS)))
        seconds = size / channel.bandwidth + messages * channel.latency_s
        added = np.full_like(micro, seconds)
        if exchange.hidden and channel.overlaps:
            behind = forward_s if exchange.when == "forward" else forward_s * backward
            if exchange.part == "gradients" and _GATHER_AGAIN in exchanges:
                behind = behind / 2  # the other half has the weights that are gathered again
            added = np.maximum(seconds / messages, seconds - behind)  # all but the first or the last message
        total = total + (accumulation if exchange.when in ("forward", "backward") else 1.0) * added
    return total + accumulation * layer_seconds(profile, parallelism, network, samples)


def volume(exchange: Exchange, profile: Profile, ranks: int) -> float:
    """Return the bytes that pass through each device's link."""
    size = total_bytes(profile.parameters, trained=exchange.part == "gradients" or exchange.when == "step")
    return exchange.factor * size * (ranks - 1) / ranks


def layer_seconds(profile: Profile, parallelism: Parallelism, network: Network, samples: Vector) -> Vector:
    """Return the seconds that a micro-batch waits for what its layers exchange, by ring; nothing hides it."""
    total = np.zeros_like(samples)
    passes = 2 + profile.family.recomputed
    # Tensor parallelism reduces hidden states twice in a forward pass, after attention and perceptron. Under sequence
    # parallelism each device sends all but its own part of queries, keys, values and outputs (DeepSpeed-Ulysses,
    # arXiv:2309.14509, section 3.2); keys and values count as wide as queries.
    for degree, count, factor in ((parallelism.tensor_parallel, 2, 2), (parallelism.sequence_parallel, 4, 1)):
        if degree > 1:
            channel = network.channel(degree, stride=1)
            size = factor * (degree - 1) / degree * profile.hidden_bytes * samples
            total = total + count * passes * profile.layers * (size / channel.bandwidth + channel.latency_s)
    return total


def host_seconds(
    profile: Profile, parallelism: Parallelism, rates: Rates, devices_per_node: int
) -> tuple[float, float]:
    """Return the seconds that offload adds to a step, and to each micro-batch; a node's devices share a host."""
    ranks = parallelism.sharding_ranks
    trained = sum(g.count * g.elements for g in profile.parameters if g.trained) / ranks
    # 28 bytes a parameter are moved. A node's memory: eight channels of DDR4-3200 have 204.8 GB/s, of which STREAM
    # reaches 79 % (https://github.com/aigatech/vpbenchmarking).
    per_step = trained * 28.0 * devices_per_node / 160e9
    # Gradients go down and what was updated comes up again, as wide as they are computed with.
    per_step += 2 * total_bytes(profile.parameters, trained=True) / ranks / rates.host_bandwidth
    weights = 2 * total_bytes(profile.parameters) / ranks / rates.host_bandwidth
    return per_step, weights if parallelism.offload == "parameters" else 0.0
