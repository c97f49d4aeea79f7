"""What the parts of a pack share: the device, where results go, who watches its memory, and a runner of trials."""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple, Self

import psutil
from provenance import ROOT

from autotune.execution.runner import LocalRunner
from autotune.values.catalogue import gpu_of
from autotune.values.hardware import Hardware, cuda_used_bytes
from autotune.values.model import ModelFacts
from autotune.values.trial import DescribeRequest, TrialRequest, TrialResult
from autotune.values.workload import Workload
from pack.report import Report, story_of

INTERVAL_S = 0.05  # a reading takes microseconds; the caching allocator keeps its peak for much longer than this


class MemoryWatch:
    """Keeps the highest memory in use since `reset`, as NVML tells; on the CPU that of this process's children."""

    def __init__(self, hardware: Hardware) -> None:
        self._hardware = hardware
        self._idle_bytes = self._peak_bytes = 0
        self._lock = threading.Lock()  # a reading that began before `reset` isn't kept after it
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> Self:
        self.reset()
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._ended.set()
        self._thread.join()

    def reset(self) -> None:
        """Begin anew: what is in use now is the idle level."""
        with self._lock:
            self._idle_bytes = self._peak_bytes = self.used_bytes()

    def risen_bytes(self) -> int:
        """Return how far above the idle level the memory has been."""
        return self._peak_bytes - self._idle_bytes

    def used_bytes(self) -> int:
        if not self._hardware.is_cpu:
            used, host = cuda_used_bytes(self._hardware.device), psutil.virtual_memory()
            return int(host.total - host.available) if used is None else used  # None: the device shares the host's
        used = 0
        for process in psutil.Process().children(recursive=True):
            with contextlib.suppress(psutil.Error):  # it has just ended
                used += process.memory_info().rss
        return used

    def _watch(self) -> None:
        while not self._ended.wait(INTERVAL_S):
            with self._lock:
                self._peak_bytes = max(self._peak_bytes, self.used_bytes())


class Session:
    """A pack on one device.

    Args:
        hardware: The device.
        report: Keeps what is found.
        watch: Sees the device's memory from outside; entered.
        scratch: A folder for what is thrown away.
        searches: Names of the parts that search, of which exports can take the answer.
    """

    def __init__(
        self, hardware: Hardware, report: Report, watch: MemoryWatch, scratch: Path, searches: tuple[str, ...]
    ) -> None:
        self.hardware = hardware
        self.report = report
        self.watch = watch
        self.scratch = scratch
        self.searches = searches
        self.part = ""
        self.seconds = 0.0  # that the part should take
        self._runner: LocalRunner | None = None
        self._numbers = itertools.count()
        self._facts: dict[str, ModelFacts] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.end_runner()

    def begin(self, part: str, seconds: float) -> None:
        self.part, self.seconds = part, seconds
        self.report.begin(part)

    @property
    def runner(self) -> LocalRunner:
        """The runner that parts share, whose launcher starts with the first trial."""
        if self._runner is None:
            self._runner = self.private_runner("trials")
        return self._runner

    def private_runner(self, folder: str, hardware: Hardware | None = None) -> LocalRunner:
        """Return a runner whose launcher starts in the present environment; to be entered."""
        directory = self.scratch / folder
        directory.mkdir(exist_ok=True)
        return LocalRunner(directory, hardware or self.hardware)

    def end_runner(self) -> None:
        if self._runner is not None:
            self._runner.close()
            self._runner = None

    def number(self) -> int:
        return next(self._numbers)

    def facts(self, task: Workload) -> ModelFacts:
        """Return what a model offers; a child of the launcher looks, once."""
        if task.model.reference not in self._facts:
            self._facts[task.model.reference] = self.runner.describe(DescribeRequest(workload=task)).facts
        return self._facts[task.model.reference]

    def run(self, request: TrialRequest, name: str, *, runner: LocalRunner | None = None) -> TrialResult:
        self.watch.reset()
        result = (runner or self.runner).run(request)
        self.report.trial(story_of(self.part, result, observed_bytes=self.observed_bytes(), named=name), result)
        return result

    def observed_bytes(self) -> int | None:
        """Return how far the device's memory has risen; None on the CPU, where libraries would be counted too."""
        return None if self.hardware.is_cpu else self.watch.risen_bytes()

    def autotune(self, *arguments: str, **environment: Any) -> subprocess.CompletedProcess[str]:
        """Run the command line of autotune as a user does."""
        return subprocess.run(
            [sys.executable, "-P", "-m", "autotune", *arguments],
            capture_output=True,
            text=True,
            cwd=self.scratch,
            env={**os.environ, "PYTHONPATH": modules_path(), **{name: str(v) for name, v in environment.items()}},
        )


def modules_path() -> str:
    """Return the PYTHONPATH with which another process imports what this one does."""
    return os.pathsep.join([*(os.path.abspath(p) for p in sys.path if p), str(ROOT)])  # noqa: PTH100


class Need(NamedTuple):
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
    run: Callable[[Session], object]
    needs: tuple[Need, ...] = ()


class OutOfTime(KeyboardInterrupt):
    """The alarm; a search takes it for a Ctrl-C and hands back the best so far."""


@contextlib.contextmanager
def alarm(seconds: float) -> Iterator[None]:
    """Raise OutOfTime after `seconds`, whatever is waited for; alarms are not nested."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise OutOfTime

    previous = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, max(seconds, 0.001))
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, previous)
