"""CUDA devices by the attention kernels that torch has for them, and their workspaces. Pure, without torch."""

from __future__ import annotations

from typing import Literal

# Compute capability 7.5 and before; 8.0; 8.6, 8.9 and 12.0, whose blocks have less shared memory; 9.0 and 10.0.
Generation = Literal["turing", "ampere", "small_ampere", "hopper"]


def generation_of(capability: tuple[int, int] | None) -> Generation:
    """Return the generation of a compute capability; where there is none, as of AMD's, that of 8.0."""
    if capability is None:
        return "ampere"
    if capability < (8, 0):
        return "turing"
    if capability[0] in (9, 10):
        return "hopper"
    return "small_ampere" if capability in ((8, 6), (8, 9)) or capability[0] == 12 else "ampere"


def workspace_bytes(generation: Generation) -> int:
    """Return what cuBLAS takes of torch's allocator for a thread that uses it.

    `parseChosenWorkspaceSize` in aten/src/ATen/cuda/CublasHandlePool.cpp: 32 MiB from Hopper on.
    """
    return 32 << 20 if generation == "hopper" else 8_519_680
