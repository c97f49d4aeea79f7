"""Writes every trial of a search to the lasting record as it ends, and reads what earlier searches wrote there.

The keeper listens like any observer and passes everything on. What can't be read or written costs the search seconds
and one line: its trials are files first. Called by `autotune.api`; exhaustive searches and resumed ones are kept, too.
"""

from __future__ import annotations

import datetime
import uuid
from collections.abc import Iterable
from typing import Self

from pydantic import Field, ValidationError

from autotune.errors import AutotuneError, RecordError
from autotune.events import Event, Note, Observer, TrialEnded
from autotune.files import read_value, write_value
from autotune.kept import KeptSearch, KeptTrial, Key, key_of, versions_of
from autotune.planning import SearchPlan
from autotune.record import Record, record
from autotune.result import TuningResult
from autotune.rundir import RunDirectory
from autotune.trial import Purpose, TrialResult
from autotune.values import Value

# Of the earlier searches with the same key, so many are read: the latest say most about this machine.
_MOST_SEARCHES = 20


class Identity(Value):
    """By what the record knows a run directory, whatever it is called."""

    id: str
    started: str = Field(description="UTC, ISO 8601")


class Keeper:
    """Keeps the trials of one search.

    Args:
        database: Where they are kept; None keeps nothing.
        plan: The search.
        directory: Its run directory.
        observer: Hears everything, and what goes wrong here.
    """

    def __init__(self, database: Record | None, plan: SearchPlan, directory: RunDirectory, observer: Observer) -> None:
        self._record = database
        self._directory = directory
        self._observer = observer
        self._pending: list[KeptTrial] = []
        self._failed = False
        self._is_answered = False
        identity = _identity(directory) if database is not None else Identity(id="", started="")
        self._search = _described(plan, identity, str(directory.path.absolute()))

    @property
    def key(self) -> Key:
        """Under which the search is kept."""
        return self._search.key

    def __call__(self, event: Event) -> None:
        """Pass an event on; a trial that has ended is written first."""
        if isinstance(event, TrialEnded):
            self.keep([event.result])
        self._observer(event)

    def keep(self, results: Iterable[TrialResult]) -> None:
        """Write trials; those that are written already are passed over, checks are not kept."""
        found = [self._kept(r) for r in results if r.request.task is None and r.request.purpose in _KEPT_PURPOSES]
        self._pending += found
        if found and not self._failed:
            self._write()

    def end(self, answer: TuningResult) -> TuningResult:
        """Keep the answer, and return it."""
        speedup = answer.speedup.ratio if answer.speedup else None
        found = {"verdict": answer.verdict, "best_config_id": answer.best.config.config_id, "speedup": speedup}
        self._search = self._search.model_copy(update=found)
        self._is_answered = True
        return answer

    def __enter__(self) -> Self:
        self.keep(self._directory.results())  # of an earlier run of this search
        return self

    def __exit__(self, *_: object) -> None:
        if self._pending or self._is_answered:
            self._write()

    def earlier(self) -> list[KeptSearch]:
        """Return the latest other searches with the same key; none if they can't be read."""
        if self._record is None:
            return []
        try:
            found = self._record.searches(key=self.key, latest=_MOST_SEARCHES)
        except RecordError as error:
            self._give_up(error)
            return []
        return [search for search in found if search.id != self._search.id]

    def _write(self) -> None:
        if self._record is None:
            return
        try:
            self._record.keep(self._search, self._pending)
        except RecordError as error:
            self._give_up(error)
        else:
            self._pending = []

    def _give_up(self, error: RecordError) -> None:
        """Say what is wrong, once; nothing more is written until the search ends, so that it isn't held up again."""
        if not self._failed:
            self._observer(Note(text=f"the lasting record: {error}; the search goes on without it"))
        self._failed = True

    def _kept(self, result: TrialResult) -> KeptTrial:
        path = self._directory.path / "trials" / f"{result.request.number:04d}" / "result.json"
        try:
            ended = datetime.datetime.fromtimestamp(path.stat().st_mtime, datetime.UTC)
        except OSError:
            ended = datetime.datetime.now(datetime.UTC)
        return KeptTrial.of(result, ended.isoformat(timespec="seconds"))


_KEPT_PURPOSES = (Purpose.BASELINE, Purpose.SEARCH, Purpose.FINAL)


def keeper_of(plan: SearchPlan, directory: RunDirectory, observer: Observer) -> Keeper:
    """Return what keeps the trials of a search; where there is no record to be had, one that keeps nothing.

    Args:
        plan: The search; it may ask for no record.
        directory: Its run directory.
        observer: Told why there is none.
    """
    database = None
    if plan.record:
        try:
            database = record()
        except AutotuneError as error:
            observer(Note(text=f"the lasting record: {error}; the search goes on without it"))
    return Keeper(database, plan, directory, observer)


def _identity(directory: RunDirectory) -> Identity:
    """Return the identity of a run directory, made when it is first asked for."""
    path = directory.path / "record.json"
    try:
        return read_value(Identity, path)
    except (OSError, ValidationError):
        now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        made = Identity(id=uuid.uuid4().hex, started=now)
        write_value(made, path)
        return made


def _described(plan: SearchPlan, identity: Identity, run_directory: str) -> KeptSearch:
    workload = plan.workload
    batch = "any batch" if workload.global_batch_size is None else f"batch {workload.global_batch_size}"
    target = f"target {workload.target_length}" if workload.target_length is not None else ""
    data = "real data" if workload.dataset is not None else ""
    words = (str(workload.task), workload.shown_length, target, batch, data)
    return KeptSearch(
        id=identity.id,
        key=key_of(workload, plan.facts, plan.hardware),
        model=workload.model.name,
        shape=", ".join(filter(None, words)),
        device=plan.hardware.name,
        versions=versions_of(plan.hardware),
        memory_bytes=plan.memory_bytes,
        allowance=str(plan.allowance),
        effort=str(plan.budget.effort),
        baseline=plan.baseline.model_dump(mode="json"),
        started=identity.started,
        run_directory=run_directory,
    )
