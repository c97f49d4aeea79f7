"""Writes every trial of a search to its study and to the lasting record as it ends, and reads earlier searches.

A trial is a file first. The study of the run directory, `study.journal`, and the lasting record are written before the
next trial begins. If one of the two can't be written, or doesn't answer in time, a note says so, and the rest of the
search does without it; `autotune resume` writes what is missing.
"""

import contextlib
import datetime
import math
from collections.abc import Iterable

import optuna
from optuna.distributions import CategoricalDistribution
from optuna.trial import FrozenTrial, TrialState

from autotune.errors import AutotuneError, RecordError, resuming
from autotune.planning.plan import SearchPlan
from autotune.space.space import Point
from autotune.storage.record import NUMBER, RESULT, Record
from autotune.storage.record import record as usual_record
from autotune.storage.recorded import RecordedSearch, key_of, without_places
from autotune.storage.run_directory import STUDY_FILE, RunDirectory
from autotune.units import GIB
from autotune.values.config import TrainConfig
from autotune.values.problem import Event, Note, Observer, TrialEnded
from autotune.values.result import ResultData, TrialRow
from autotune.values.trial import Failure, Interval, Measurement, Memory, Outcome, Purpose, TrialResult, TrialStatus

MEMORY = "memory"  # the constraint: peak memory beyond the budget, as a share of the budget
_STATES = {TrialStatus.COMPLETED: TrialState.COMPLETE, TrialStatus.OUT_OF_MEMORY: TrialState.PRUNED}


class TrialConverter:
    """Makes a study's trial of a result, and a result of a study's trial; parameters are the space's."""

    def __init__(self, plan: SearchPlan) -> None:
        self._plan, self._space = plan, plan.search_space
        self.distributions = {d.name: CategoricalDistribution(d.choices) for d in self._space.dimensions}

    def frozen(self, result: TrialResult) -> FrozenTrial:
        """Return a result as a finished trial of a study.

        Its value is the samples per second by the objective; None if the trial failed. Its constraint is the peak
        divided by the budget, less 1, so that positive means too much; there is none if the peak isn't known.
        """
        params, row, measured = self._space.choices_of(result.request.config), TrialRow.of(result), result.measurement
        constraints = {}
        if result.status is TrialStatus.OUT_OF_MEMORY:
            constraints[MEMORY] = 0.01  # a measured peak may lie below the budget, and would say that it fits
        elif measured is not None and measured.memory.is_known:
            constraints[MEMORY] = measured.memory.peak_bytes / self._plan.memory_bytes - 1
        peak = {} if row.peak_bytes is None else {"peak memory GiB": row.peak_bytes / GIB}
        why = {"cause": row.cause} if row.cause else {}
        about = {NUMBER: row.number, "purpose": str(row.purpose), "status": str(row.status), **peak, **why}
        trial = optuna.create_trial(
            state=_STATES.get(result.status, TrialState.FAIL),  # TPE ranks pruned trials last, and ignores failed ones
            value=self._plan.objective.rate(measured) if measured else None,
            params=params,
            distributions={name: self.distributions[name] for name in params},
            constraints=constraints,
            user_attrs={**about, RESULT: result.model_dump_json()},
        )
        trial.datetime_start = datetime.datetime.fromtimestamp(result.began)
        trial.datetime_complete = datetime.datetime.fromtimestamp(result.began + result.duration_s)
        return trial

    def is_ours(self, trial: FrozenTrial) -> bool:
        """Whether a trial has parameters of the space; one that ended early may have none."""
        return bool(trial.params.keys() & self.distributions.keys()) or not self.distributions

    def config(self, params: Point) -> TrainConfig:
        """Return the configuration of parameters, others as the baseline's; ValueError: they contradict each other."""
        config, baseline = self._space.config(self._space.complete(params)), self._plan.baseline
        return baseline if self._space.choices_of(config) == self._space.choices_of(baseline) else config

    def result(self, trial: FrozenTrial) -> TrialResult:
        """Return a finished trial of a study as a result; ValueError: its parameters contradict each other.

        If the trial holds no whole result, its state, value and constraint "memory" define one: a pruned trial was too
        slow, unless the constraint says that it ran out of memory.
        """
        with contextlib.suppress(ValueError, KeyError):  # of another version, or of another program
            return TrialResult.model_validate_json(trial.user_attrs[RESULT])
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
        """Return a completed trial of which samples per second and peak memory alone are known."""
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
        request = self._plan.request_of(config, purpose, number=number, timeout_s=self._plan.budget.trial_timeout_s)
        return TrialResult(request=request, outcome=outcome, duration_s=0.0)


class RecordWriter:
    """Observes a search: writes its trials, an earlier run's first, to study and record, and passes events on."""

    def __init__(self, record: Record | None, plan: SearchPlan, directory: RunDirectory, observer: Observer) -> None:
        self._directory, self._observer, self._converter = directory, observer, TrialConverter(plan)
        workload = plan.workload
        target = f"target {workload.target_length}" if workload.target_length is not None else ""
        batch = "any batch" if workload.global_batch_size is None else f"batch {workload.global_batch_size}"
        data = "real data" if workload.dataset is not None else ""
        self._search = RecordedSearch(  # trials and answer come later
            id=plan.search_id,
            key=key_of(plan),
            model=workload.model.name,
            shape=", ".join(filter(None, (str(workload.task), workload.shown_length, target, batch, data))),
            device=plan.hardware.name,
            started=plan.started,
            run_directory=str(directory.path.absolute()),
        )
        stores = {"the study": Record(directory.path / STUDY_FILE), "the lasting record": record}
        self._stores = {name: store for name, store in stores.items() if store is not None}
        self._trials: dict[str, list[FrozenTrial]] = {name: [] for name in self._stores}
        self.write(directory.results())

    def __call__(self, event: Event) -> None:
        if isinstance(event, TrialEnded):
            self.write([event.result])
        self._observer(event)

    def write(self, results: Iterable[TrialResult]) -> None:
        for result in results:  # without checks
            purpose = result.request.purpose
            if result.request.task is None and (purpose.explores or purpose is Purpose.FINAL):
                for name in self._stores:
                    kept = result if name == "the study" else without_places(result)
                    self._trials[name].append(self._converter.frozen(kept))
        for name, store in list(self._stores.items()):
            try:
                if self._trials[name]:
                    store.write(self._search, self._trials[name])
            except RecordError as error:
                self._give_up(name, error)

    def end(self, result: ResultData) -> None:
        answer = {"verdict": result.verdict, "best_config_id": result.best.config.config_id}
        self._search = self._search.model_copy(update=answer)
        self.write([])

    def earlier(self) -> list[RecordedSearch]:
        """Return the latest other searches with the same key; none if they can't be read."""
        try:
            record = self._stores.get("the lasting record")
            found = record.searches(key=self._search.key, latest=20) if record is not None else []
        except RecordError as error:
            self._give_up("the lasting record", error)
            return []
        return [search for search in found if search.id != self._search.id]

    def _give_up(self, name: str, error: RecordError) -> None:
        del self._stores[name]
        later = f"once that is mended, {resuming(self._directory.path)} writes what is missing"
        self._observer(Note(text=f"{name}: {error}; the search goes on without it; {later}"))


def record_writer(plan: SearchPlan, directory: RunDirectory, observer: Observer) -> RecordWriter:
    """Return the writer of a search, without the lasting record if the plan has none or it can't be used."""
    found = None
    try:
        found = usual_record() if plan.record else None
    except AutotuneError as error:
        observer(Note(text=f"the lasting record: {error}; the search goes on without it"))
    return RecordWriter(found, plan, directory, observer)
