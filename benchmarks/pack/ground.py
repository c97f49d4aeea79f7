"""What a pack runs on, and so what its checks can settle. The one place that knows of the stand-in for CUDA."""

from __future__ import annotations

import sys
from enum import StrEnum

from autotune.values.hardware import Hardware

_STAND_IN = "fakecuda_loader"  # every Python of an environment with tests/fakecuda begins with this module


class Ground(StrEnum):
    """Where a pack runs."""

    GPU = "a GPU"
    STAND_IN = "a stand-in for CUDA (tests/fakecuda), no real GPU: values are zero and times mean nothing"
    CPU = "a CPU"


def ground_of(hardware: Hardware) -> Ground:
    """Return what `hardware` is to this process."""
    if hardware.is_cpu:
        return Ground.CPU
    return Ground.STAND_IN if _STAND_IN in sys.modules else Ground.GPU
