"""Writes every trial of a search to its study and to the lasting record as it ends, and reads earlier searches.

A :class:`RecordWriter` is an observer between the search and the user's: it passes every event on. A trial is a file
first. The study of the run directory, `study.journal`, is written before the next trial begins; what is missing there
is added when the search goes on. The lasting record is written in a thread, so that one that is away doesn't hold the
search up: that is said once, and it is tried again with every later trial and at the end, for up to a minute. What is
missing even then is written by `autotune resume`.
"""

from __future__ import annotations

import contextlib
import copy
import datetime
import errno
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

from autotune.errors import AutotuneError, NothingFitsError, RecordError
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

# How long the end of a search waits for a record that is away; pauses between attempts double from the first.
LAST_WAIT_S = 60.0
_LEAST_WAIT_S = 2.0  # for reading and for the last write, when the search's time is up
_PAUSES_S = (0.25, 4.0)

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

    None in place of a record records nothing there. The observer hears every event, and what goes wrong here. A record
    that is away is waited for no longer than to the `time.monotonic()` of `ends_at`.
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
        self._attempt: tuple[RecordedSearch, int, Future[int]] | None = None  # to write so many
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
            self._write(0.0 if self._trouble is not None else _WAIT_S)

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

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Write what is left; a user who has interrupted the search isn't made to wait for a record that is away."""
        if not self._is_behind:
            return
        left_s = max(_LEAST_WAIT_S, self._ends_at - time.monotonic())
        self._write_all(min(_WAIT_S, left_s))
        last_s = min(LAST_WAIT_S, left_s - _WAIT_S)
        if last_s > 0 and self._is_behind and self._may_pass and (kind is None or issubclass(kind, NothingFitsError)):
            self._note(f"{self._missing}; it is waited for up to {last_s:.0f} s (Ctrl-C goes on without)")
            with contextlib.suppress(KeyboardInterrupt):
                self._write_all(last_s)
        if self._is_behind:
            resume = f"`autotune resume {self._directory.path}`"
            self._note(f"{self._missing} ({self._trouble}); nothing is lost: {resume} writes it")

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

    @property
    def _missing(self) -> str:
        count = len(self._recorded) - (self._written[1] if self._written else 0)
        if count == 0:
            return "the answer is not written yet"
        return "1 trial is not written yet" if count == 1 else f"{count} trials are not written yet"

    @property
    def _may_pass(self) -> bool:
        return self._trouble is None or self._trouble.is_temporary

    def _write(self, wait_s: float) -> None:
        """Try to write all in a thread, unless an earlier attempt still runs; wait for it up to `wait_s`."""
        record = self._record
        if record is None:
            return
        self._settle(0.0)
        if self._attempt is None:
            search, trials = self._search, tuple(self._recorded.values())
            self._attempt = (search, len(trials), in_thread(lambda: record.write(search, trials)))
        if not self._settle(wait_s) and wait_s:
            self._fails(_no_answer(record, wait_s))

    def _write_all(self, limit_s: float) -> None:
        """Try until all is written, for up to `limit_s`; not against an error that waiting doesn't help."""
        ends = time.monotonic() + limit_s
        pause_s, longest_s = _PAUSES_S
        while self._is_behind and (left_s := ends - time.monotonic()) > 0:
            self._write(min(left_s, _WAIT_S))
            if not self._may_pass:
                return
            if self._trouble is not None and self._attempt is None:
                time.sleep(max(0.0, min(pause_s, ends - time.monotonic())))
                pause_s = min(2 * pause_s, longest_s)

    def _settle(self, wait_s: float) -> bool:
        """Take note of how the attempt under way went; False if it hasn't ended within `wait_s`."""
        if self._attempt is None:
            return True
        search, count, attempt = self._attempt
        if not wait([attempt], wait_s).done:
            return False
        self._attempt = None
        try:
            written = attempt.result()
        except RecordError as error:
            self._fails(error)
            return True
        self._written = search, count
        if self._trouble is not None:
            self._note(f"it can be written again, and has {written} more of this search's trials")
        self._trouble = None
        return True

    def _fails(self, error: RecordError) -> None:
        """Say what is wrong, once until it works again."""
        if self._trouble is None:
            self._note(f"{error}; the search goes on without it, and its trials are kept as files")
        self._trouble = error

    def _note(self, text: str) -> None:
        self._observer(Note(text=f"the lasting record: {text}"))


def _no_answer(record: Record, waited_s: float) -> RecordError:
    return RecordError(f"{record.where}: no answer for {waited_s:.0f} s", is_temporary=True)


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
