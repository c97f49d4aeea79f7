"""A process on the stand-in for GPUs: its environment variables."""

import ctypes
import os
from pathlib import Path

from autotune.stand_in.build import libraries
from autotune.values.catalogue import Gpu

_VARIABLE = "AUTOTUNE_STAND_IN"

UNKNOWN = "that only a GPU computes, on which the memory may depend:"  # of values; where one is read follows

AMPLE_BYTES = 1 << 40  # the stand-in's memory, so that a peak is seen even where it doesn't fit the GPU
MOST_DEVICES = 64  # sources/state.h: kMaxDevices

# Multiprocessors of the usual device of a compute capability, by which some kernels take their workspace.
_MULTIPROCESSORS = {(7, 5): 40, (8, 0): 108, (8, 6): 84, (8, 9): 128, (9, 0): 132, (10, 0): 148, (12, 0): 170}


def is_rehearsal() -> bool:
    """Return whether this process is on the stand-in by `variables`: small tensors are computed on the host.

    Of several ranks the first runs alone, as the stand-in's NCCL takes all for alike: it has the longest samples, the
    largest shards, and saves.
    """
    return _VARIABLE in os.environ


def bypass() -> str | None:
    """Return why memory of this process isn't seen: a library has called a CUDA runtime of its own; None: none has."""
    if not is_rehearsal():
        return None
    asked = ctypes.CDLL(None).fakecuda_own_runtime
    asked.restype = ctypes.c_char_p
    name = os.fsdecode(asked())
    return f"{name} brings a CUDA runtime of its own, whose memory only a GPU shows" if name else None


def variables(gpu: Gpu, store: Path, state: Path, *, devices: int, context_bytes: float) -> dict[str, str]:
    """Return the variables of a process on the stand-in for so many of `gpu`; errors as of `libraries`.

    The libraries are in `store`; processes with the same file `state` share the devices, of each of which a context
    takes `context_bytes`.
    """
    assert gpu.capability is not None
    built, before = libraries(store), os.environ.get("LD_PRELOAD")
    preloaded = [str(path) for path in sorted(built.glob("lib*.so.*"))]
    return {
        "LD_PRELOAD": ":".join([*preloaded, *([before] if before else [])]),
        "TRITON_LIBCUDA_PATH": str(built),
        "TORCH_CUDNN_SDPA_DEPRIORITIZED": "1",  # of compute capability 9.0: cuDNN's attention isn't there
        "CUDA_VISIBLE_DEVICES": ",".join(map(str, range(devices))),
        "FAKECUDA_DEVICES": str(devices),
        "FAKECUDA_NAME": (*gpu.nvml_names, gpu.name)[0],
        "FAKECUDA_CC": ".".join(map(str, gpu.capability)),
        "FAKECUDA_SMS": str(_MULTIPROCESSORS.get(gpu.capability, 108)),
        "FAKECUDA_CONTEXT": str(round(context_bytes)),
        "FAKECUDA_MEMORY": str(AMPLE_BYTES),
        "FAKECUDA_TOTAL": str(gpu.memory_bytes),
        "FAKECUDA_STATE": str(state),
        _VARIABLE: "1",
    }
