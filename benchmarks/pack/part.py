"""A part of a pack as a value, and what it may need of the machine."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from autotune.values.catalogue.gpus import gpu_of
from autotune.values.hardware import Hardware
from pack.session import Session


class Need(NamedTuple):
    """Something that not every machine has."""

    name: str
    is_there: Callable[[Hardware], bool]


CUDA = Need("a CUDA device", lambda hardware: not hardware.is_cpu)
TF32 = Need("TF32 (compute capability 8.0)", lambda hardware: hardware.has_tf32)
DATA_SHEET = Need("a device whose data sheet is known", lambda hardware: hardware.is_cpu or bool(gpu_of(hardware.name)))


class Part(NamedTuple):
    """A part of a pack: it stands alone, and leaves what it finds in the session's report."""

    name: str
    shows: str
    seconds: float  # that it needs on a GPU
    run: Callable[[Session], None]
    needs: tuple[Need, ...] = ()

    def missing(self, hardware: Hardware) -> str | None:
        """Return what a machine lacks for it."""
        return next((need.name for need in self.needs if not need.is_there(hardware)), None)
