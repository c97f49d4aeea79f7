"""Tells trackers of each trial as it ends, and of the answer: `--report-to`.

It listens like any observer, in the process of the search, and passes everything on. Each call has a time limit, and a
tracker that fails or falls silent is told of no further trial: a note says so, and the search goes on. What a tracker
was told stands in `trackers.json` of the run directory, so that a search that goes on tells it what it missed, and
nothing twice. Called by `autotune.api`.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping
from typing import Self

from pydantic import Field, ValidationError

from autotune.errors import one_line
from autotune.integrations.tracker_entries import about, answer_of, entry_of
from autotune.integrations.trackers import TRACKERS, Search, Tracker
from autotune.planning.plan import SearchPlan
from autotune.storage.run_directory import RunDirectory
from autotune.storage.writer import has_ended, in_thread
from autotune.value import Value, read_value, write_value
from autotune.values.events import Event, Note, Observer, TrialEnded
from autotune.values.result import ResultData
from autotune.values.trial import TrialResult

TOLD_FILE = "trackers.json"

# How long a search waits for a tracker: for its library to be imported and to begin, and for each trial.
OPENING_S = 60.0
TELLING_S = 30.0


class Told(Value):
    """What trackers know of a search."""

    search: str = Field(description="by what they know it, whatever the run directory is called")
    runs: dict[str, str] = Field(default_factory=dict, description="by tracker: how it knows the search")
    trials: dict[str, tuple[int, ...]] = Field(default_factory=dict, description="by tracker: those that it was told")
    answers: dict[str, str] = Field(default_factory=dict, description="by tracker: the latest that it was told")


def trackers_of(plan: SearchPlan, directory: RunDirectory, observer: Observer) -> Tracking:
    """Return what tells the trackers of a search."""
    return Tracking(plan, directory, observer, {name: TRACKERS[name] for name in plan.report_to})


class Tracking:
    """Tells the trackers of one search.

    Args:
        plan: The search.
        directory: Its run directory.
        observer: Hears everything, and what goes wrong here.
        makers: The trackers by name.
        limits_s: How long beginning and telling may take.
    """

    def __init__(
        self,
        plan: SearchPlan,
        directory: RunDirectory,
        observer: Observer,
        makers: Mapping[str, Callable[[], Tracker]],
        *,
        limits_s: tuple[float, float] = (OPENING_S, TELLING_S),
    ) -> None:
        self._plan = plan
        self._directory = directory
        self._observer = observer
        self._makers = makers
        self._opening_s, self._telling_s = limits_s
        self._trackers: dict[str, Tracker] = {}
        self._path = directory.path / TOLD_FILE
        self._told = self._read()

    def __enter__(self) -> Self:
        for name, make in self._makers.items():
            self._open(name, make)
        for result in self._directory.results() if self._trackers else ():
            self._tell(result)
        return self

    def __exit__(self, *_: object) -> None:
        for name in tuple(self._trackers):
            self._attempt(name, lambda tracker: tracker.close(), self._telling_s)

    def __call__(self, event: Event) -> None:
        """Pass an event on; of a trial that has ended the trackers are told."""
        self._observer(event)
        if isinstance(event, TrialEnded):
            self._tell(event.result)

    def end(self, answer: ResultData) -> ResultData:
        """Tell of the answer, and return it."""
        entry = answer_of(answer)
        said = f"{entry.tags['status']}: {entry.tags['config_id']} after {entry.step} trials"
        for name in tuple(self._trackers):
            if self._told.answers.get(name) == said:
                continue
            self._attempt(name, lambda tracker: tracker.answer(entry), self._telling_s)
            if name in self._trackers:
                self._write(self._told.model_copy(update={"answers": {**self._told.answers, name: said}}))
        return answer

    def _open(self, name: str, make: Callable[[], Tracker]) -> None:
        search = Search(
            id=self._told.search,
            name=self._directory.path.absolute().name,
            about=about(self._plan),
            directory=str(self._directory.path.absolute()),
        )
        self._trackers[name] = make()
        known_as = self._told.runs.get(name, "")
        run = self._attempt(name, lambda tracker: tracker.open(search, known_as), self._opening_s)
        if run is not None:
            self._write(self._told.model_copy(update={"runs": {**self._told.runs, name: run}}))

    def _tell(self, result: TrialResult) -> None:
        entry = entry_of(self._plan, result)
        for name in tuple(self._trackers):
            known = self._told.trials.get(name, ())
            if entry.step in known:
                continue
            self._attempt(name, lambda tracker: tracker.trial(entry), self._telling_s)
            if name in self._trackers:
                trials = {**self._told.trials, name: (*known, entry.step)}
                self._write(self._told.model_copy(update={"trials": trials}))

    def _attempt(self, name: str, call: Callable[[Tracker], str | None], limit_s: float) -> str | None:
        """Have a tracker do something; one that can't, or takes too long, is left alone from then on."""
        tracker = self._trackers[name]
        attempt = in_thread(lambda: call(tracker))
        if not has_ended(attempt, limit_s):
            self._give_up(name, f"no answer for {limit_s:.0f} s")
            return None
        try:
            return attempt.result()
        except (Exception, SystemExit) as error:  # whatever its library raises
            self._give_up(name, f"{type(error).__name__}: {one_line(error)}")
            return None

    def _give_up(self, name: str, why: str) -> None:
        del self._trackers[name]
        catch_up = f"`autotune resume {self._directory.path}` tells it what it missed"
        self._observer(Note(text=f"{name}: {why}; the search goes on without it, and {catch_up}"))

    def _read(self) -> Told:
        try:
            return read_value(Told, self._path)
        except (OSError, ValidationError):
            return Told(search=uuid.uuid4().hex[:12])

    def _write(self, told: Told) -> None:
        self._told = told
        try:
            write_value(told, self._path)
        except OSError as error:
            self._observer(Note(text=f"{TOLD_FILE} can't be written: {error.strerror}"))
