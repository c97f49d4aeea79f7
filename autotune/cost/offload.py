"""Activations that are held in memory of the host between the forward and the backward pass, as a tape has them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from autotune.cost.kinds import TRANSFER
from autotune.cost.layers import total_bytes
from autotune.cost.profile import Profile
from autotune.cost.tape import Recorder
from autotune.values.config import Parallelism
from autotune.values.estimate import Rates

# Seconds that a step waits for the host where optimizer states or weights are kept there, or on NVMe. Of the states
# each rank updates its share with the host's processor and memory: 28 bytes a parameter go over the memory bus with a
# fused Adam (two states and the weights read and written, gradients read). What lies on NVMe is read and written once
# more. ZeRO-Offload (arXiv:2101.06840) and ZeRO-Infinity (arXiv:2104.07857); FSDP's offload alike, with weights in
# fp32 that are sent up in each pass. That some of it is done while the device computes is left out. Pure.

# Bytes of a parameter that an Adam in fp32 moves, and of these those that NVMe holds: states and weights.
_ADAM_BYTES, _STORED_BYTES = 28.0, 12.0

# Of a node, bytes/s. Memory: eight channels of DDR4-3200 have 204.8 GB/s, of which STREAM reaches 79 %
# (https://github.com/aigatech/vpbenchmarking). NVMe: what one PCIe 4.0 drive of a data centre writes, 4 GB/s, and reads
# faster; most nodes have several.
_HOST_MEMORY, _NVME = 160e9, 4e9


def host_seconds(
    profile: Profile, parallelism: Parallelism, rates: Rates, devices_per_node: int
) -> tuple[float, float]:
    """Return the seconds of a step, and those of each micro-batch beside it.

    Args:
        profile: Of one device's part of the model.
        parallelism: How it is spread, with offload.
        rates: Of the device.
        devices_per_node: Devices that share a host.
    """
    ranks = parallelism.data_parallel
    trained = sum(g.count * g.elements for g in profile.parameters if g.trained) / ranks
    per_step = trained * _ADAM_BYTES * devices_per_node / _HOST_MEMORY
    # Gradients go down and what was updated comes up again, as wide as they are computed with.
    per_step += 2 * total_bytes(profile.parameters, trained=True) / ranks / rates.host_bandwidth
    per_micro = 0.0
    if parallelism.offload == "parameters":
        per_micro = 2 * total_bytes(profile.parameters) / ranks / rates.host_bandwidth
    if parallelism.offload_to == "nvme":
        per_step += 2 * trained * _STORED_BYTES * devices_per_node / _NVME
        if parallelism.offload == "parameters":
            per_micro += 2 * total_bytes(profile.parameters) / ranks * devices_per_node / _NVME
    return per_step, per_micro


def offloaded(run: Callable[..., Any], recorder: Recorder) -> Callable[..., Any]:
    """Return a checkpointing function that keeps nothing on the device of what `run` saves.

    As `torch.autograd.graph.save_on_cpu`: a copy out in the forward pass, and one back into new memory.
    """

    def pack(tensor: torch.Tensor) -> tuple[torch.Size, torch.dtype, torch.device, bool]:
        _note(recorder, "to_host", tensor)
        return tensor.shape, tensor.dtype, tensor.device, tensor.requires_grad

    def unpack(packed: tuple[torch.Size, torch.dtype, torch.device, bool]) -> torch.Tensor:
        shape, dtype, device, requires_grad = packed
        tensor = torch.empty(shape, dtype=dtype, device=device)
        _note(recorder, "from_host", tensor)
        return tensor.requires_grad_(requires_grad)

    def keep_on_host(function: Any, *args: Any, **kwargs: Any) -> Any:
        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            return run(function, *args, **kwargs)

    return keep_on_host


def _note(recorder: Recorder, name: str, tensor: torch.Tensor) -> None:
    nbytes = float(tensor.numel() * tensor.element_size())
    recorder.note(name, TRANSFER, 0.0, nbytes, half=tensor.element_size() == 2)
