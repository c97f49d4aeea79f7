"""Runs several trials at once, each at a place of its own on this machine.

:class:`LocalPool` has a `LocalRunner`, and so a launcher, for each place, and one thread for each that lives as long as
the pool, since a launcher dies with the thread that started it. The search itself stays in one thread, which proposes,
learns and writes.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue
from typing import Self

from autotune.execution.launch import DEFAULT_ENTRY
from autotune.execution.places import Place
from autotune.execution.runner import LocalRunner, Runner
from autotune.values.hardware import Hardware
from autotune.values.trial import TrialRequest, TrialResult


class LocalPool(Runner):
    """The places of this machine.

    Use it as a context manager, like a `LocalRunner`: leaving ends all launchers and whatever runs under them.

    Args:
        run_directory: The search's directory.
        hardware: What a trial has at each place; the places differ in their device alone.
        places: Where trials run.
        entry: ``module:function`` that a trial's process runs; another one than the default is for tests.
    """

    takes_turns = True

    def __init__(
        self, run_directory: Path, hardware: Hardware, places: Sequence[Place], *, entry: str = DEFAULT_ENTRY
    ) -> None:
        self._stop = os.eventfd(0, os.EFD_CLOEXEC)
        self._ended: SimpleQueue[tuple[int, Future[TrialResult]]] = SimpleQueue()
        self._busy: set[int] = set()
        self._runners = [
            LocalRunner(
                run_directory,
                hardware.model_copy(update={"device": place.device}),
                entry=entry,
                place=place,
                stop=self._stop,
            )
            for place in places
        ]
        self._threads = [ThreadPoolExecutor(max_workers=1) for _ in places]

    def __enter__(self) -> Self:
        self.first.__enter__()  # what was left is ended before anything new is started
        return self

    def __exit__(self, *_: object) -> None:
        os.eventfd_write(self._stop, 1)
        for runner, thread in zip(self._runners, self._threads, strict=True):
            thread.shutdown()
            runner.close()
        os.close(self._stop)

    @property
    def first(self) -> LocalRunner:
        """The runner of the first place; only while no trial was begun there."""
        return self._runners[0]

    def free(self) -> int:
        """Return how many places run no trial."""
        return len(self._runners) - len(self._busy)

    def begin(self, request: TrialRequest) -> None:
        """Begin a trial at the first free place."""
        place = next(number for number in range(len(self._runners)) if number not in self._busy)
        self._busy.add(place)
        running = self._threads[place].submit(self._runners[place].run, request)
        running.add_done_callback(lambda ended: self._ended.put((place, ended)))

    def wait(self) -> TrialResult:
        """Return the result of the trial that ends next, or raise what its runner raised."""
        place, ended = self._ended.get()
        self._busy.discard(place)
        return ended.result()

    def run(self, request: TrialRequest) -> TrialResult:
        """Run one trial at the first place, while all others are idle."""
        return self.run_in_turn([request])[0]

    def run_in_turn(self, requests: Sequence[TrialRequest]) -> list[TrialResult]:
        """Run trials in turn at the first place, while all others are idle."""
        assert not self._busy, "trials that are run alone have to be alone"
        return self._threads[0].submit(self._runners[0].run_in_turn, requests).result()
