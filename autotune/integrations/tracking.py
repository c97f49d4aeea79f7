"""Writes each trial as it ends, and the answer, to trackers: `--report-to`.

:class:`Tracking` is an observer in the process of the search that passes every event on. Each call of a tracker has a
time limit, and a tracker that fails or exceeds it gets no further trials: a note says so, and the search goes on. What
was written to a tracker stands in `trackers.json` of the run directory, so that a resumed search writes what it missed,
and nothing twice.
"""

from __future__ import annotations

import statistics
import uuid
from collections.abc import Callable, Mapping
from typing import Self

from pydantic import Field, ValidationError

from autotune.errors import one_line
from autotune.integrations.trackers import TRACKERS, Entry, Search, Tracker
from autotune.planning.plan import SearchPlan
from autotune.space.knobs import changes, shown_changes
from autotune.space.points import make_point
from autotune.storage.run_directory import RunDirectory
from autotune.storage.writer import has_ended, in_thread
from autotune.units import GIB
from autotune.value import Value, read_value, write_value
from autotune.values.config import TrainConfig
from autotune.values.events import Event, Note, Observer, TrialEnded
from autotune.values.result import ResultData
from autotune.values.trial import Failure, Measurement, TrialResult

REPORTED_FILE = "trackers.json"

# Time limits of a tracker: to import its library and begin, and to write a trial.
OPENING_S = 60.0
REPORTING_S = 30.0

# The longest tag that is written. MLflow refuses 8,000 characters (MAX_TAG_VAL_LENGTH), older servers 5,000.
_LONGEST_TAG = 1000


class Reported(Value):
    """What trackers were given of a search."""

    search: str = Field(description="id of the search for trackers, whatever the run directory is called")
    runs: dict[str, str] = Field(default_factory=dict, description="by tracker: how it knows the search")
    trials: dict[str, tuple[int, ...]] = Field(default_factory=dict, description="by tracker: numbers of its trials")
    answers: dict[str, str] = Field(default_factory=dict, description="by tracker: its latest answer")


class Tracking:
    """Writes one search to the trackers that its plan names; the observer hears of what fails here.

    `makers` are other trackers in their place, by name; `limits_s` the time limits of beginning and of writing a trial.
    """

    def __init__(
        self,
        plan: SearchPlan,
        directory: RunDirectory,
        observer: Observer,
        makers: Mapping[str, Callable[[], Tracker]] | None = None,
        *,
        limits_s: tuple[float, float] = (OPENING_S, REPORTING_S),
    ) -> None:
        self._plan = plan
        self._directory = directory
        self._observer = observer
        self._makers = {name: TRACKERS[name] for name in plan.report_to} if makers is None else makers
        self._opening_s, self._reporting_s = limits_s
        self._trackers: dict[str, Tracker] = {}
        self._path = directory.path / REPORTED_FILE
        self._reported = self._read()

    def __enter__(self) -> Self:
        for name, make in self._makers.items():
            self._open(name, make)
        for result in self._directory.results() if self._trackers else ():
            self._report(result)
        return self

    def __exit__(self, *_: object) -> None:
        for name in tuple(self._trackers):
            self._attempt(name, lambda tracker: tracker.close(), self._reporting_s)

    def __call__(self, event: Event) -> None:
        """Pass an event on, and write a trial that has ended."""
        self._observer(event)
        if isinstance(event, TrialEnded):
            self._report(event.result)

    def end(self, answer: ResultData) -> ResultData:
        """Write the answer, and return it."""
        entry = answer_of(answer)
        said = f"{entry.tags['status']}: {entry.tags['config_id']} after {entry.step} trials"
        for name in tuple(self._trackers):
            if self._reported.answers.get(name) == said:
                continue
            self._attempt(name, lambda tracker: tracker.answer(entry), self._reporting_s)
            if name in self._trackers:
                self._remember("answers", name, said)
        return answer

    def _open(self, name: str, make: Callable[[], Tracker]) -> None:
        search = Search(
            id=self._reported.search,
            name=self._directory.path.absolute().name,
            about=about(self._plan),
            directory=str(self._directory.path.absolute()),
        )
        self._trackers[name] = make()
        known_as = self._reported.runs.get(name, "")
        run = self._attempt(name, lambda tracker: tracker.open(search, known_as), self._opening_s)
        if run is not None:
            self._remember("runs", name, run)

    def _report(self, result: TrialResult) -> None:
        entry = entry_of(self._plan, result)
        for name in tuple(self._trackers):
            known = self._reported.trials.get(name, ())
            if entry.step in known:
                continue
            self._attempt(name, lambda tracker: tracker.trial(entry), self._reporting_s)
            if name in self._trackers:
                self._remember("trials", name, (*known, entry.step))

    def _attempt(self, name: str, call: Callable[[Tracker], str | None], limit_s: float) -> str | None:
        """Call a tracker; if it fails or takes too long, it isn't called any more."""
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

    def _read(self) -> Reported:
        try:
            return read_value(Reported, self._path)
        except (OSError, ValidationError):
            return Reported(search=uuid.uuid4().hex[:12])

    def _remember(self, field: str, name: str, value: object) -> None:
        """Set what is known of a tracker in a field of `Reported`, and write it."""
        known = {**getattr(self._reported, field), name: value}
        self._reported = self._reported.model_copy(update={field: known})
        try:
            write_value(self._reported, self._path)
        except OSError as error:
            self._observer(Note(text=f"{REPORTED_FILE} can't be written: {error.strerror}"))


def entry_of(plan: SearchPlan, result: TrialResult) -> Entry:
    """Return the entry of a trial that has ended."""
    request, outcome = result.request, result.outcome
    metrics = {"duration_s": result.duration_s}
    if isinstance(outcome, Measurement):
        metrics |= _measured(outcome)
    elif outcome.memory is not None and outcome.memory.is_known:
        metrics["peak_memory_gib"] = outcome.memory.peak_bytes / GIB
    if request.prediction is not None:
        metrics["predicted_samples_per_second"] = request.prediction.samples_per_second
        metrics["predicted_peak_memory_gib"] = request.prediction.peak_bytes / GIB
    tags = {
        "purpose": str(request.purpose),
        "status": str(result.status),
        "changes": shown_changes(changes(request.config, plan))[:_LONGEST_TAG],
        "config_id": request.config.config_id,
    }
    if isinstance(outcome, Failure):
        tags["cause"] = outcome.cause[:_LONGEST_TAG]
    return Entry(
        name=f"trial-{request.number:04d}",
        step=request.number,
        completed=result.measurement is not None,
        params=params_of(request.config),
        metrics=metrics,
        tags=tags,
    )


def answer_of(result: ResultData) -> Entry:
    """Return the entry of the answer."""
    metrics = {"search_time_s": result.search_time_s}
    if result.best.measurement is not None:
        metrics |= _measured(result.best.measurement)
    if result.baseline.measurement is not None:
        metrics["baseline_samples_per_second"] = result.baseline.measurement.samples_per_second
    if result.speedup is not None:
        metrics["speedup"] = result.speedup.ratio
    return Entry(
        name="answer",
        step=sum(t.number is not None for t in result.trials),
        completed=True,
        params=params_of(result.best.config),
        metrics=metrics,
        tags={
            "purpose": "answer",
            "status": result.verdict,
            "changes": shown_changes(result.best.changes)[:_LONGEST_TAG],
            "config_id": result.best.config.config_id,
        },
    )


def about(plan: SearchPlan) -> dict[str, str]:
    """Return the facts that all runs of a search have in common."""
    workload = plan.workload
    return {
        "model": workload.model.name,
        "task": str(workload.task),
        "global_batch_size": str(workload.global_batch_size or "any"),
        "device": plan.hardware.name,
        "memory_budget_gib": f"{plan.memory_bytes / GIB:.2f}",
        "allow": str(plan.allowance),
        "effort": str(plan.budget.effort),
    }


def params_of(config: TrainConfig) -> dict[str, bool | int | float | str]:
    """Return a configuration as parameters, nested ones as `name.field`; parallelism only for several devices."""
    point = make_point(config)
    shown = {n: v for n, v in point.items() if not (config.parallelism.is_single and n.startswith("parallelism."))}
    return {name: "none" if value is None else value for name, value in shown.items()}


def _measured(measured: Measurement) -> dict[str, float]:
    figures: dict[str, float | None] = {
        "samples_per_second": measured.samples_per_second,
        "tokens_per_second": measured.tokens_per_second,
        "step_time_s": statistics.fmean(measured.step_times_s),
        "first_step_s": measured.first_step_s,
        "startup_s": measured.startup_s,
        "peak_memory_gib": measured.memory.peak_bytes / GIB if measured.memory.is_known else None,
        "data_wait_share": measured.data_wait_share,
        "loss": measured.loss,
    }
    return {name: value for name, value in figures.items() if value is not None}
