"""What the parts of a pack share: the device, where results go, who watches its memory, and a runner of trials."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from pathlib import Path
from types import TracebackType
from typing import Self

from provenance import ROOT

from autotune.execution.runner import LocalRunner
from autotune.values.hardware import Hardware
from autotune.values.model import ModelFacts
from autotune.values.trial import DescribeRequest, TrialRequest, TrialResult
from autotune.values.workload import Workload
from pack.check import Ground
from pack.memory_watch import MemoryWatch
from pack.report import Report
from pack.stories import story_of


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
        self, hardware: Hardware, report: Report, watch: MemoryWatch, scratch: Path, searches: tuple[str, ...] = ()
    ) -> None:
        self.hardware = hardware
        self.report = report
        self.watch = watch
        self.scratch = scratch
        self.searches = searches
        self.part = ""
        self.seconds = 0.0
        self._runner: LocalRunner | None = None
        self._numbers = itertools.count()
        self._facts: dict[str, ModelFacts] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end_runner()

    @property
    def ground(self) -> Ground:
        """What the device is."""
        return self.report.ground

    def begin(self, part: str, seconds: float) -> None:
        """Begin a part that should take so many seconds."""
        self.part, self.seconds = part, seconds
        self.report.begin(part)

    @property
    def runner(self) -> LocalRunner:
        """The runner that parts share, whose launcher starts with the first trial."""
        if self._runner is None:
            directory = self.scratch / "trials"
            directory.mkdir(exist_ok=True)
            self._runner = LocalRunner(directory, self.hardware)
        return self._runner

    def end_runner(self) -> None:
        """End the shared launcher."""
        if self._runner is not None:
            self._runner.close()
            self._runner = None

    def number(self) -> int:
        """Return the number of the next trial."""
        return next(self._numbers)

    def facts(self, task: Workload) -> ModelFacts:
        """Return what a model offers; a child of the launcher looks, once."""
        if task.model.reference not in self._facts:
            self._facts[task.model.reference] = self.runner.describe(DescribeRequest(workload=task)).facts
        return self._facts[task.model.reference]

    def run(self, request: TrialRequest, name: str, *, runner: LocalRunner | None = None) -> TrialResult:
        """Run a trial and keep it."""
        self.watch.reset()
        result = (runner or self.runner).run(request)
        story = story_of(self.part, result, observed_bytes=self.observed_bytes(), named=name)
        self.report.trial(story, result)
        return result

    def observed_bytes(self) -> int | None:
        """Return how far the device's memory has risen; None on the CPU, where libraries would be counted too."""
        return None if self.hardware.is_cpu else self.watch.risen_bytes()

    def autotune(self, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        """Run the command line of autotune as a user does."""
        return subprocess.run(
            [sys.executable, "-P", "-m", "autotune", *arguments],
            capture_output=True,
            text=True,
            cwd=self.scratch,
            env={**os.environ, "PYTHONPATH": modules_path(), **environment},
        )


def modules_path() -> str:
    """Return the PYTHONPATH with which another process imports what this one does."""
    return os.pathsep.join([*(os.path.abspath(p) for p in sys.path if p), str(ROOT)])  # noqa: PTH100
