"""The devices of a training and what joins them: which link a group of ranks is as slow as.

Ranks are dealt out as Megatron-LM does: those of a tensor-parallel group next to each other, then the data-parallel
ones (arXiv:2104.04473, section 3). Bandwidths are those that collectives attain. Pure, but for `network_of`, which
looks the link up in the GPU table.
"""

from __future__ import annotations

from dataclasses import dataclass

from autotune.values.catalogue.gpus import gpu_of
from autotune.values.hardware import Hardware

# Share of a link that large collectives attain: 230 to 250 of the 300 GB/s of A100's NVLink 3 in all-reduces over 8
# (https://docs.alayanew.com/en/docs/tech-blog/2026-05-06-nccl-tests), 376 of H100's 450
# (https://github.com/NVIDIA/nccl/issues/1264); of PCIe 35 to 45 of 63 (the first source).
NVLINK_SHARE, PCIE_SHARE, NETWORK_SHARE = 0.8, 0.6, 0.8

# A node's adapters where nothing is said: one of 200 Gb/s for each device, as in NVIDIA's DGX A100 (eight ConnectX-6,
# https://docs.nvidia.com/dgx/dgxa100-user-guide/introduction-to-dgxa100.html). DGX H100 has twice that.
ADAPTER_GB_S = 25.0

# Seconds that a collective takes at the least: 14 hops of some 3 us over 8 devices of a node, and over 4 nodes 68 us
# (32 KiB at 0.48 GB/s, https://github.com/stas00/ml-engineering/tree/master/network/benchmarks).
_NODE_LATENCY_S, _NETWORK_LATENCY_S = 30e-6, 70e-6

# Processes of one CPU exchange through gloo over the loopback device, with the cores that also compute: bytes/s, taken
# as a fifth of what copying memory attains.
_LOOPBACK_SHARE, _LOOPBACK_LATENCY_S = 0.2, 200e-6

# NCCL's buffers of a communicator: device memory fell from 2.00 to 1.28 GiB when it was destroyed (two ranks,
# https://github.com/stas00/ml-engineering, training/performance, torch-dist-mem-usage.py).
NCCL_BYTES = 0.72 * (1 << 30)


@dataclass(frozen=True)
class Channel:
    """What a group of ranks communicates through."""

    bandwidth: float  # bytes/s, attained, one way
    latency_s: float
    overlaps: bool = True  # whether a device can go on computing


@dataclass(frozen=True)
class Network:
    """The nodes of a training.

    Attributes:
        devices_per_node: How many devices each has.
        link: Bytes/s that a device attains to the others of its node, one way.
        node: Bytes/s that a node attains to the others, one way.
        on_cpu: Whether the devices are processes of one CPU.
    """

    devices_per_node: int
    link: float
    node: float
    on_cpu: bool = False

    def channel(self, members: int, *, stride: int) -> Channel:
        """Return what `members` ranks communicate through whose numbers are `stride` apart.

        A ring over several nodes leaves each of them once, and so do those of the ranks between: a group has the share
        of the node's adapters that it has of its devices.
        """
        if self.on_cpu:
            return Channel(self.link, _LOOPBACK_LATENCY_S, overlaps=False)
        if members * stride <= self.devices_per_node:
            return Channel(self.link, _NODE_LATENCY_S)
        inside = max(1, min(members, self.devices_per_node // stride))
        return Channel(min(self.link, self.node * inside / self.devices_per_node), _NETWORK_LATENCY_S)


# One device, which sends nothing.
ALONE = Network(devices_per_node=1, link=1.0, node=1.0)


def network_of(
    hardware: Hardware, world: int, *, nodes: int = 1, gb_s: float | None = None, host_bandwidth: float
) -> Network:
    """Return the network of `world` devices like `hardware` on `nodes` nodes.

    Args:
        hardware: One of the devices.
        world: How many there are.
        nodes: On how many machines.
        gb_s: Of a node's adapters together, one way; None: :data:`ADAPTER_GB_S` for each device.
        host_bandwidth: Bytes/s between device and host, for a device whose link isn't known.
    """
    each = max(1, -(-world // nodes))
    if hardware.is_cpu:
        return Network(each, host_bandwidth * _LOOPBACK_SHARE, host_bandwidth * _LOOPBACK_SHARE, on_cpu=True)
    gpu = gpu_of(hardware.name)
    if gpu is None:
        link = host_bandwidth * PCIE_SHARE
    else:
        link = gpu.link.gb_s * 1e9 * (PCIE_SHARE if gpu.link.kind.startswith("PCIe") else NVLINK_SHARE)
    adapters = ADAPTER_GB_S * each if gb_s is None else gb_s
    return Network(each, link, adapters * 1e9 * NETWORK_SHARE)
