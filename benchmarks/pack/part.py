"""A part of a pack as a value, what it may need of the machine, and an alarm that ends it, whatever it waits for."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable, Iterator
from types import FrameType
from typing import NamedTuple

from autotune.values.catalogue import gpu_of
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


class OutOfTime(KeyboardInterrupt):
    """The alarm; a search takes it for a Ctrl-C and hands back the best so far."""


@contextlib.contextmanager
def alarm(seconds: float) -> Iterator[None]:
    """Raise OutOfTime after `seconds`; alarms are not nested."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise OutOfTime

    previous = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, max(seconds, 0.001))
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, previous)
