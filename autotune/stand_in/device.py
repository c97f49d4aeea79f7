"""A process on the stand-in for one GPU: its environment variables."""

from __future__ import annotations

import os
from pathlib import Path

from autotune.stand_in.build import libraries
from autotune.values.catalogue import Gpu

VARIABLE = "AUTOTUNE_STAND_IN"  # set in processes on the stand-in that compute small tensors on the host

AMPLE_BYTES = 1 << 40  # the stand-in's memory, so that a peak is seen even where it doesn't fit the GPU

# Multiprocessors of the usual device of a compute capability, by which some kernels take their workspace.
_MULTIPROCESSORS = {(7, 5): 40, (8, 0): 108, (8, 6): 84, (8, 9): 128, (9, 0): 132, (10, 0): 148, (12, 0): 170}


def variables(gpu: Gpu, store: Path, state: Path, *, context_bytes: float) -> dict[str, str]:
    """Return the variables of a process on the stand-in for `gpu`; errors as of `libraries`.

    The libraries are in `store`; processes with the same file `state` share a device, of which each context takes
    `context_bytes`.
    """
    assert gpu.capability is not None
    built, before = libraries(store), os.environ.get("LD_PRELOAD")
    preloaded = [str(path) for path in sorted(built.glob("lib*.so.*"))]
    major, minor = gpu.capability
    return {
        "LD_PRELOAD": ":".join([*preloaded, *([before] if before else [])]),
        "TRITON_LIBCUDA_PATH": str(built),
        "TORCH_CUDNN_SDPA_DEPRIORITIZED": "1",  # of compute capability 9.0: cuDNN's attention isn't there
        "CUDA_VISIBLE_DEVICES": "0",
        "FAKECUDA_NAME": gpu.nvml_names[0],
        "FAKECUDA_CC": f"{major}.{minor}",
        "FAKECUDA_SMS": str(_MULTIPROCESSORS.get(gpu.capability, 108)),
        "FAKECUDA_CONTEXT": str(round(context_bytes)),
        "FAKECUDA_MEMORY": str(AMPLE_BYTES),
        "FAKECUDA_STATE": str(state),
        VARIABLE: "1",
    }
