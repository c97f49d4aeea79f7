"""What of a run directory goes to the lasting record: the search, its trials and its answer; all of it at once.

A run directory has an identity of its own, written before the first trial, by which the record knows it: whoever writes
its trials, and however often, writes the same rows.
"""

from __future__ import annotations

import datetime
import platform
import uuid
from collections.abc import Iterable
from pathlib import Path

from pydantic import Field, NonNegativeInt, ValidationError

from autotune.planning.plan import SearchPlan
from autotune.storage.record import Record
from autotune.storage.recorded import RecordedSearch, RecordedTrial, key_of, versions_of
from autotune.storage.run_directory import PLAN_FILE, RunDirectory, read_plan
from autotune.value import Value, read_value, write_value
from autotune.values.result import ResultData
from autotune.values.trial import Purpose, TrialResult

IDENTITY_FILE = "record.json"

_RECORDED = (Purpose.BASELINE, Purpose.SEARCH, Purpose.FINAL)


class Answer(Value):
    """How a search ended."""

    verdict: str
    best_config_id: str
    speedup: float | None

    @classmethod
    def of(cls, result: ResultData) -> Answer:
        """Return what is recorded of an answer."""
        speedup = result.speedup.ratio if result.speedup else None
        return cls(verdict=result.verdict, best_config_id=result.best.config.config_id, speedup=speedup)


class Identity(Value):
    """By what the record knows a run directory, whatever it is called, and the answer that belongs into the record."""

    id: str
    started: str = Field(description="UTC, ISO 8601")
    host: str = Field(default="", description="that made it")
    answer: Answer | None = Field(default=None, description="the latest, None of a search that has not ended yet")


class CaughtUp(Value):
    """What became of the trials of a run directory."""

    run_directory: str
    trials: NonNegativeInt = Field(description="that belong into the record")
    written: NonNegativeInt = Field(description="of these, now; the others were there")
    wanted: bool = Field(default=True, description="whether the search is recorded")
    reason: str = Field(default="", description="why it is not")


def identity_of(directory: RunDirectory) -> Identity:
    """Return the identity of a run directory, made when it is first asked for."""
    path = directory.path / IDENTITY_FILE
    try:
        return read_value(Identity, path)
    except (OSError, ValidationError):
        made = Identity(id=uuid.uuid4().hex, started=_moment(directory.path / PLAN_FILE), host=platform.node())
        write_value(made, path)
        return made


def note_answer(directory: RunDirectory, answer: Answer) -> None:
    """Write the answer down where :func:`catch_up` finds it."""
    identity = identity_of(directory).model_copy(update={"answer": answer})
    write_value(identity, directory.path / IDENTITY_FILE)


def described(plan: SearchPlan, identity: Identity, run_directory: str) -> RecordedSearch:
    """Return a search as it is recorded, without trials."""
    workload = plan.workload
    batch = "any batch" if workload.global_batch_size is None else f"batch {workload.global_batch_size}"
    target = f"target {workload.target_length}" if workload.target_length is not None else ""
    data = "real data" if workload.dataset is not None else ""
    words = (str(workload.task), workload.shown_length, target, batch, data)
    search = RecordedSearch(
        id=identity.id,
        key=key_of(plan),
        model=workload.model.name,
        shape=", ".join(filter(None, words)),
        device=plan.hardware.name,
        versions=versions_of(plan.hardware),
        memory_bytes=plan.memory_bytes,
        allowance=str(plan.allowance),
        effort=str(plan.budget.effort),
        baseline=plan.baseline.model_dump(mode="json"),
        started=identity.started,
        host=identity.host,
        run_directory=run_directory,
    )
    return answered(search, identity.answer) if identity.answer is not None else search


def answered(search: RecordedSearch, answer: Answer) -> RecordedSearch:
    """Return a search with its answer."""
    return search.model_copy(update=answer.model_dump())


def recorded_trials(directory: RunDirectory, results: Iterable[TrialResult]) -> list[RecordedTrial]:
    """Return finished trials as they are recorded; checks are not."""
    trials = directory.path / "trials"
    return [
        RecordedTrial.of(result, _moment(trials / f"{result.request.number:04d}" / "result.json"))
        for result in results
        if result.request.task is None and result.request.purpose in _RECORDED
    ]


def catch_up(database: Record, path: Path) -> CaughtUp:
    """Write to the record what of a run directory isn't there; a search that was not to be recorded is left alone.

    Raises:
        RunDirectoryError: There is no search in `path`, or one is running, which writes by itself.
        RecordError: The record can't be written.
    """
    directory = RunDirectory.existing(path)
    with directory:
        plan = read_plan(path)
        if not plan.record:
            return CaughtUp(run_directory=str(path), trials=0, written=0, wanted=False, reason=_unrecorded(plan))
        search = described(plan, identity_of(directory), str(path.absolute()))
        trials = recorded_trials(directory, directory.results())
        return CaughtUp(run_directory=str(path), trials=len(trials), written=database.write(search, trials))


def _unrecorded(plan: SearchPlan) -> str:
    """Return why a plan is not recorded."""
    if plan.workload.own_step is not None:
        return "trials of a loop of your own are not recorded"
    if plan.options is not None and plan.options.record:
        return "it was resumed with other versions of its packages, and its trials don't all compare"
    return "it was searched with --no-record"


def _moment(file: Path) -> str:
    """Return when a file was written; now, if it isn't there."""
    try:
        moment = datetime.datetime.fromtimestamp(file.stat().st_mtime, datetime.UTC)
    except OSError:
        moment = datetime.datetime.now(datetime.UTC)
    return moment.isoformat(timespec="seconds")
