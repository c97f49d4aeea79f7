"""Writes every trial of a search to its study and to the lasting record as it ends, and reads earlier searches.

A :class:`RecordWriter` is an observer between the search and the user's: it passes every event on. A trial is a file
first. The study of the run directory, `study.journal`, is written before the next trial begins; what is missing there
is added when the search goes on. The lasting record is written in a thread, so that one that is away doesn't hold the
search up: that is said once, and it is tried again with every later trial and at the end. `autotune resume` writes
the trials that are missing even then.
"""

from __future__ import annotations

import copy
import datetime
import errno
import functools
import math
import threading
import time
import uuid
from collections.abc import Callable, Iterable
from concurrent.futures import Future, wait
from pathlib import Path
from typing import Self, TypeVar

from optuna.trial import FrozenTrial
from pydantic import Field, ValidationError

from autotune.errors import AutotuneError, RecordError
from autotune.execution.places import DISK_IS_FULL
from autotune.planning.plan import SearchPlan
from autotune.storage.converter import RESULT, TrialConverter
from autotune.storage.record import PATIENCE_S, RECORDED, Record
from autotune.storage.record import record as usual_record
from autotune.storage.recorded import RecordedSearch, RecordedTrial, key_of
from autotune.storage.run_directory import PLAN_FILE, STUDY_FILE, RunDirectory
from autotune.value import Value, read_value, write_value
from autotune.values.problem import Event, Note, Observer, TrialEnded
from autotune.values.result import ResultData
from autotune.values.trial import Purpose, TrialResult

IDENTITY_FILE = "record.json"

_RECORDED_PURPOSES = (Purpose.BASELINE, Purpose.SEARCH, Purpose.FINAL)

# Earlier searches with the same key that are read at most: the latest say most about this machine.
_MOST_SEARCHES = 20

# How long a search waits for a record that answers: for a trial to be written, and for earlier searches to be read.
_WAIT_S = PATIENCE_S + 1.0
_READING_WAIT_S = 4 * _WAIT_S

_LEAST_WAIT_S = 2.0  # for reading, when the search's time is nearly up

T = TypeVar("T")


class Identity(Value):
    """By what the record knows a run directory, whatever it is called."""

    retired = frozenset({"host"})

    id: str
    started: str = Field(description="UTC, ISO 8601")


def described(plan: SearchPlan, directory: RunDirectory) -> RecordedSearch:
    """Return a search as it is recorded, without trials and answer; its identity is made when it is first asked for."""
    path = directory.path / IDENTITY_FILE
    try:
        identity = read_value(Identity, path)
    except (OSError, ValidationError):
        identity = Identity(id=uuid.uuid4().hex, started=_moment(directory.path / PLAN_FILE))
        write_value(identity, path)
    workload = plan.workload
    batch = "any batch" if workload.global_batch_size is None else f"batch {workload.global_batch_size}"
    target = f"target {workload.target_length}" if workload.target_length is not None else ""
    data = "real data" if workload.dataset is not None else ""
    words = (str(workload.task), workload.shown_length, target, batch, data)
    return RecordedSearch(
        id=identity.id,
        key=key_of(plan),
        model=workload.model.name,
        shape=", ".join(filter(None, words)),
        device=plan.hardware.name,
        started=identity.started,
        run_directory=str(directory.path.absolute()),
    )


def in_thread(call: Callable[[], T]) -> Future[T]:
    """Start a call that may take longer than anybody can wait, as to a server that doesn't answer.

    Its thread is a daemon, which ends with the process, unlike those of an executor: nobody has to wait for it.
    """
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(call())
        except BaseException as error:  # raised again by `future.result`
            future.set_exception(error)

    threading.Thread(target=run, name="autotune call", daemon=True).start()
    return future


class RecordWriter:
    """Writes the trials of one search to its study, and to the lasting record.

    None in place of a record records nothing there. The observer hears every event, and what goes wrong here. The time
    of the search is over at the `time.monotonic()` of `ends_at`.
    """

    def __init__(
        self,
        record: Record | None,
        plan: SearchPlan,
        directory: RunDirectory,
        observer: Observer,
        ends_at: float = math.inf,
    ) -> None:
        self._record = record
        self._study: Record | None = Record(directory.path / STUDY_FILE)
        self._ends_at = ends_at
        self._directory = directory
        self._observer = observer
        self._converter = TrialConverter(plan, plan.search_space)
        self._search = described(plan, directory)
        self._studied: dict[int, FrozenTrial] = {}  # by number, as in the study
        self._recorded: dict[int, FrozenTrial] = {}  # the same as in the lasting record
        self._written: tuple[RecordedSearch, int] | None = None  # with the number of its trials there
        self._attempt: Future[tuple[RecordedSearch, int, int]] | None = None  # and how many of them are new
        self._trouble: RecordError | None = None

    def __call__(self, event: Event) -> None:
        """Pass an event on; a trial that has ended is written first."""
        if isinstance(event, TrialEnded):
            self.write([event.result])
        self._observer(event)

    def write(self, results: Iterable[TrialResult]) -> None:
        """Write trials, except checks and those that are written already."""
        before = len(self._recorded)
        for result in results:
            if result.request.task is None and result.request.purpose in _RECORDED_PURPOSES:
                self._add(result)
        if len(self._recorded) > before:
            self._write_study()
            self._catch_up(0.0 if self._trouble is not None else _WAIT_S)

    def _add(self, result: TrialResult) -> None:
        """Take a trial as the study has it, and as others may read it: without where a user's data and code lie."""
        number, trial = result.request.number, self._converter.frozen(result)
        file = self._directory.path / "trials" / f"{number:04d}" / "result.json"
        recorded = {RECORDED: RecordedTrial.of(result, _moment(file)).model_dump(mode="json")}
        self._studied[number], self._recorded[number] = trial, copy.copy(trial)
        self._recorded[number].user_attrs = {n: v for n, v in trial.user_attrs.items() if n != RESULT} | recorded

    def _write_study(self) -> None:
        if self._study is None:
            return
        try:
            self._study.write(self._search, list(self._studied.values()))
        except RecordError as error:
            if isinstance(cause := error.__context__, OSError) and cause.errno in (*DISK_IS_FULL, errno.EROFS):
                raise cause from None  # no other file of the run directory can be written either
            self._study = None
            self._observer(Note(text=f"the study: {error}; the search goes on without it: its trials are files"))

    def end(self, result: ResultData) -> ResultData:
        """Write the answer down, and return it."""
        speedup = result.speedup.ratio if result.speedup else None
        answer = {"verdict": result.verdict, "best_config_id": result.best.config.config_id, "speedup": speedup}
        self._search = self._search.model_copy(update=answer)
        self._write_study()
        return result

    def __enter__(self) -> Self:
        self.write(self._directory.results())  # of an earlier run of this search
        return self

    def __exit__(self, *_: object) -> None:
        self._catch_up(_WAIT_S)
        if self._is_behind:
            resume = f"`autotune resume {self._directory.path}`"
            count = len(self._recorded) - (self._written[1] if self._written else 0)
            what = "the answer is" if count == 0 else "1 trial is" if count == 1 else f"{count} trials are"
            self._note(f"{what} not written yet ({self._trouble}); nothing is lost: {resume} writes it")

    def earlier(self) -> list[RecordedSearch]:
        """Return the latest other searches with the same key; none if they can't be read."""
        record, key = self._record, self._search.key
        if record is None:
            return []
        reading = in_thread(lambda: record.searches(key=key, latest=_MOST_SEARCHES))
        try:
            wait_s = min(_READING_WAIT_S, max(_LEAST_WAIT_S, (self._ends_at - time.monotonic()) / 4))
            if not wait([reading], wait_s).done:
                raise _no_answer(record, wait_s)
            return [search for search in reading.result() if search.id != self._search.id]
        except RecordError as error:
            self._fails(error)
            return []

    @property
    def _is_behind(self) -> bool:
        """Whether something is to be written; a search without a trial or an answer isn't."""
        if self._record is None or not (self._recorded or self._search.verdict):
            return False
        return self._written != (self._search, len(self._recorded))

    def _catch_up(self, wait_s: float) -> None:
        """Write what is missing, in a thread; wait for it up to `wait_s`, and for an earlier attempt before."""
        record = self._record
        for _ in range(2):
            if record is None or not self._is_behind:
                return
            if self._attempt is None:
                search, trials = self._search, tuple(self._recorded.values())
                self._attempt = in_thread(functools.partial(_written, record, search, trials))
            if not wait([self._attempt], wait_s).done:
                if wait_s:
                    self._fails(_no_answer(record, wait_s))
                return
            attempt, self._attempt = self._attempt, None
            try:
                search, count, new = attempt.result()
            except RecordError as error:
                return self._fails(error)
            self._written = search, count
            if self._trouble is not None:
                self._note(f"it can be written again, and has {new} more of this search's trials")
            self._trouble = None

    def _fails(self, error: RecordError) -> None:
        """Say what is wrong, once until it works again."""
        if self._trouble is None:
            self._note(f"{error}; the search goes on without it, and its trials are kept as files")
        self._trouble = error

    def _note(self, text: str) -> None:
        self._observer(Note(text=f"the lasting record: {text}"))


def _written(
    record: Record, search: RecordedSearch, trials: tuple[FrozenTrial, ...]
) -> tuple[RecordedSearch, int, int]:
    return search, len(trials), record.write(search, trials)


def _no_answer(record: Record, waited_s: float) -> RecordError:
    return RecordError(f"{record.where}: no answer for {waited_s:.0f} s")


def record_writer(
    plan: SearchPlan, directory: RunDirectory, observer: Observer, ends_at: float = math.inf
) -> RecordWriter:
    """Return what writes the trials of a search; the lasting record is left alone if none is asked for or none is."""
    found = None
    if plan.record:
        try:
            found = usual_record()
        except AutotuneError as error:
            observer(Note(text=f"the lasting record: {error}; the search goes on without it"))
    return RecordWriter(found, plan, directory, observer, ends_at)


def _moment(file: Path) -> str:
    """Return when a file was written; now, if it isn't there."""
    try:
        moment = datetime.datetime.fromtimestamp(file.stat().st_mtime, datetime.UTC)
    except OSError:
        moment = datetime.datetime.now(datetime.UTC)
    return moment.isoformat(timespec="seconds")
