"""Writes every trial of a search to its study and to the lasting record as it ends, and reads earlier searches.

A :class:`TrialConverter` makes a study's trial of a result, and a result of a study's trial.

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

import optuna
from optuna.distributions import CategoricalDistribution
from optuna.trial import FrozenTrial, TrialState
from pydantic import Field, ValidationError

from autotune.errors import AutotuneError, RecordError
from autotune.execution.places import DISK_IS_FULL
from autotune.planning.plan import SearchPlan, request_of
from autotune.space.space import Point, SearchSpace
from autotune.storage.record import PATIENCE_S, RECORDED, Record
from autotune.storage.record import record as usual_record
from autotune.storage.recorded import RecordedSearch, RecordedTrial, key_of
from autotune.storage.run_directory import PLAN_FILE, STUDY_FILE, RunDirectory
from autotune.units import GIB
from autotune.value import Value, read_value, write_value
from autotune.values.config import TrainConfig
from autotune.values.problem import Event, Note, Observer, TrialEnded
from autotune.values.result import ResultData, TrialRow
from autotune.values.trial import Failure, Interval, Measurement, Memory, Outcome, Purpose, TrialResult, TrialStatus

IDENTITY_FILE = "record.json"

# The constraint's name: peak memory beyond the budget, as a share of the budget.
MEMORY = "memory"

# The user attribute that holds a whole `TrialResult` as JSON.
RESULT = "result"

# How long a search waits for a record in which a trial is written.
_WAIT_S = PATIENCE_S + 1.0

T = TypeVar("T")


class TrialConverter:
    """Converts parameters, which are those of `space`, to configurations, and results to values and constraints."""

    def __init__(self, plan: SearchPlan, space: SearchSpace) -> None:
        self._plan = plan
        self._space = space
        self.distributions = {d.name: CategoricalDistribution(d.choices) for d in space.dimensions}

    def frozen(self, result: TrialResult) -> FrozenTrial:
        """Return a result as a finished trial of a study.

        Its value is the samples per second by the objective; None if the trial failed. Its constraint is the peak
        divided by the budget, less 1, so that positive means too much; there is none if the peak isn't known.
        """
        params, row, measured = self.params(result.request.config), TrialRow.of(result), result.measurement
        constraints = {}
        if result.status is TrialStatus.OUT_OF_MEMORY:
            constraints[MEMORY] = 0.01  # a measured peak may lie below the budget, and would say that it fits
        elif measured is not None and measured.memory.is_known:
            constraints[MEMORY] = measured.memory.peak_bytes / self._plan.memory_bytes - 1
        trial = optuna.create_trial(
            # TPE ranks pruned trials below completed ones, and ignores failed trials.
            state={TrialStatus.COMPLETED: TrialState.COMPLETE, TrialStatus.OUT_OF_MEMORY: TrialState.PRUNED}.get(
                result.status, TrialState.FAIL
            ),
            value=self._plan.objective.rate(measured) if measured else None,
            params=params,
            distributions={name: self.distributions[name] for name in params},
            constraints=constraints,
            user_attrs={
                "trial": row.number,
                "purpose": str(row.purpose),
                "status": str(row.status),
                **({"peak memory GiB": row.peak_bytes / GIB} if row.peak_bytes is not None else {}),
                **({"cause": row.cause} if row.cause else {}),
                RESULT: result.model_dump_json(),
            },
        )
        if result.began is not None:
            trial.datetime_start = datetime.datetime.fromtimestamp(result.began)
            trial.datetime_complete = datetime.datetime.fromtimestamp(result.began + result.duration_s)
        return trial

    def is_ours(self, trial: FrozenTrial) -> bool:
        """Whether a trial has parameters of the space, with values of the space.

        A trial that ended before any was suggested has none; one of another space may have other values.
        """
        ours = trial.params.keys() & self.distributions.keys()
        return all(trial.params[name] in self.distributions[name].choices for name in ours) and (
            bool(ours) or not self.distributions
        )

    def config(self, params: Point) -> TrainConfig:
        """Return the configuration of a trial's parameters; all others have the values of the baseline.

        Raises:
            ValueError: The parameters contradict each other.
        """
        config = self._space.config(self._space.complete(params))
        return self._plan.baseline if self.params(config) == self.params(self._plan.baseline) else config

    def params(self, config: TrainConfig) -> Point:
        """Return the parameters of a configuration whose values are choices of the study."""
        return self._space.choices_of(config)

    def result(self, trial: FrozenTrial) -> TrialResult:
        """Return a finished trial of a study as a result.

        That is the whole result if the trial has one, else as much as its state, value and constraint "memory" define.
        A pruned trial was ended as too slow, unless the constraint says that it was out of memory.

        Raises:
            ValueError: Its parameters contradict each other.
        """
        if (whole := trial.user_attrs.get(RESULT)) is not None:
            try:
                return TrialResult.model_validate_json(whole)
            except ValueError:  # of another version
                pass
        config, share = self.config(trial.params), trial.constraints.get(MEMORY)
        status = TrialStatus.COMPLETED
        if share is not None and share > 0:
            status = TrialStatus.OUT_OF_MEMORY
        elif trial.state is TrialState.PRUNED:
            status = TrialStatus.TIMED_OUT
        elif trial.state is TrialState.FAIL or trial.value is None or not 0 < trial.value < math.inf:
            status = TrialStatus.CRASHED
        if status is not TrialStatus.COMPLETED or trial.value is None:
            return self._result(config, trial.number, Failure(status=status, cause="as the study says"))
        peak_bytes = None if share is None or share <= -1 else round((1 + share) * self._plan.memory_bytes)
        memory = Memory(**{"resident_bytes" if self._plan.hardware.is_cpu else "device_bytes": peak_bytes})
        return self.assumed(config, trial.value, memory, number=trial.number)

    def assumed(
        self, config: TrainConfig, rate: float, memory: Memory | None = None, *, number: int = 0
    ) -> TrialResult:
        """Return a completed trial with the given samples per second and peak memory, and nothing else known."""
        step_s = self._plan.workload.samples_per_step(config) / rate
        measurement = Measurement(
            step_times_s=(step_s,),
            accumulation_steps=self._plan.workload.accumulation_steps(config),
            samples_per_second=rate,
            samples_per_second_interval=Interval(low=rate, high=rate),
            memory=memory or Memory(),
            startup_s=0.0,
            first_step_s=step_s,
            data_wait_share=None,
            loss=0.0,
            effects={},
        )
        return self._result(config, number, measurement)

    def _result(self, config: TrainConfig, number: int, outcome: Outcome) -> TrialResult:
        purpose = Purpose.BASELINE if config == self._plan.baseline else Purpose.SEARCH
        limit_s = self._plan.budget.trial_timeout_s
        request = request_of(self._plan, config, purpose, number=number, timeout_s=limit_s)
        return TrialResult(request=request, outcome=outcome, duration_s=0.0)


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
            purpose = result.request.purpose
            if result.request.task is None and (purpose.explores or purpose is Purpose.FINAL):
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
        reading = in_thread(lambda: record.searches(key=key, latest=20))  # which say most about this machine
        try:
            wait_s = min(4 * _WAIT_S, max(2.0, (self._ends_at - time.monotonic()) / 4))
            if not wait([reading], wait_s).done:
                raise RecordError(f"{record.where}: no answer for {wait_s:.0f} s")
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
                    self._fails(RecordError(f"{record.where}: no answer for {wait_s:.0f} s"))
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
