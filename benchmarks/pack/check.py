"""One thing that has to hold, and who can tell: what a pack runs on, and so what its checks can settle."""

from __future__ import annotations

import sys
from enum import StrEnum
from typing import NamedTuple

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


class Kind(StrEnum):
    """What has to be real for a check to be judged."""

    ANYWHERE = "anywhere"
    VALUES_OR_TIME = "values/time"  # of a real GPU; elsewhere it is kept and not judged


class Check(NamedTuple):
    """One thing that has to hold."""

    name: str
    passed: bool
    detail: str
    kind: Kind = Kind.ANYWHERE
