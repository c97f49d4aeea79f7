"""CUDA devices by the attention kernels that torch has for them. Pure, without torch."""

from __future__ import annotations

from typing import Literal

# Compute capability 7.5 and before; 8.0, 9.0 and 10.0; and 8.6, 8.9 and 12.0, whose blocks have less shared memory.
Generation = Literal["turing", "ampere", "small_ampere"]


def generation_of(capability: tuple[int, int] | None) -> Generation:
    """Return the generation of a compute capability; where there is none, as of AMD's, that of 8.0."""
    if capability is None:
        return "ampere"
    if capability < (8, 0):
        return "turing"
    return "small_ampere" if capability in ((8, 6), (8, 9)) or capability[0] == 12 else "ampere"
