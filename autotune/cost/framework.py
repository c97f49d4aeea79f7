"""What a training process takes of a device beside torch's allocator, and how sure the device's rates are."""

from __future__ import annotations

from autotune.cost.network import NCCL_BYTES
from autotune.values.config import Parallelism
from autotune.values.estimate import Rates
from autotune.values.hardware import Hardware

_MIB = float(1 << 20)

# The CUDA context and the kernels: 0.47 GiB when they are loaded as they are used, 0.92 GiB when all are (A100, torch
# 2.1 with CUDA 12.1, https://github.com/stas00/ml-engineering). A training run loads nearly all; of published runs
# nvidia-smi showed 0.2 to 1.9 GiB more beyond the reserved memory.
_CUDA = (0.92 * 1024 * _MIB, 0.4 * 1024 * _MIB)

# Of the process on a CPU: the Trainer, oneDNN's primitives and scratchpads. A Llama of one layer of width 64, whose
# training takes 1 MiB, grew by 7 to 20 MiB.
_CPU = (15 * _MIB, 10 * _MIB)


def framework_bytes(hardware: Hardware) -> tuple[float, float]:
    """Return the bytes that are taken beside the allocator, and their standard deviation."""
    return _CPU if hardware.is_cpu else _CUDA


def communicators_bytes(hardware: Hardware, parallelism: Parallelism) -> float:
    """Return what NCCL takes for the groups that a device is in: one for each direction a training is spread in."""
    if hardware.is_cpu or parallelism.world_size == 1:
        return 0.0
    degrees = (parallelism.data_parallel, parallelism.tensor_parallel, parallelism.pipeline_parallel)
    return NCCL_BYTES * sum(degree > 1 for degree in degrees)


def time_deviation(rates: Rates, hardware: Hardware) -> float:
    """Return the standard deviation of the logarithm of the factor by which predicted seconds are off.

    Rates that were measured on this device; those of a data sheet, whose attainable shares differ by model and shape;
    those of a processor, of which only cores and vector extensions are known, and which others may be using.
    """
    if rates.source == "measured":
        return 0.25
    return 0.7 if hardware.is_cpu else 0.35
