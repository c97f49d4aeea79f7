"""Tables of recorded search spaces: the results of the trials of every point, as a value and as a JSON Lines file.

::

    {"schema_version": 1, "workload": {...}, "hardware": {...}, "space": {...}, ...}       the header
    {"config": {...}, "trials": [{"number": 0, "status": "completed", ...}, {...}]}        a line per point
    {"config": {...}, "trials": [{"number": 7, "status": "out of memory", ...}, {...}]}

`benchmarks/record_table.py` writes a table. It contains no paths of the machine that recorded it, and no logs.
"""

from __future__ import annotations

import datetime
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, NonNegativeInt, PositiveInt, model_validator

from autotune.planning.plan import SearchPlan
from autotune.space.file import SpaceFile
from autotune.units import show_memory
from autotune.value import Value, write_text
from autotune.values.budget import Budget, Effort
from autotune.values.config import TrainConfig
from autotune.values.problem import Problem
from autotune.values.trial import Failure, Measurement, Memory, Outcome, TrialResult, TrialStatus
from autotune.values.workload import Workload
from autotune.version import __version__

TABLE_SCHEMA_VERSION: Literal[1] = 1


class TableHeader(Problem):
    """The first line of a table: what all of its points have in common."""

    schema_version: Literal[1] = TABLE_SCHEMA_VERSION
    autotune_version: str
    date: str = Field(description="time of writing, UTC")
    budget: Budget = Field(description="limits of each trial; its effort decides which parameters were searched")
    space: dict[str, Any] = Field(description="the space file, as `autotune.space.file.SpaceFile` writes it")
    repeats: PositiveInt = Field(description="trials of each point when the table is complete")


class TableTrial(Value):
    """One trial of a point: a `TrialResult` without its request, which header and point determine."""

    number: NonNegativeInt = Field(description="position in the order of running")
    status: TrialStatus
    duration_s: float = Field(ge=0)
    measurement: Measurement | None = Field(default=None, description="if the trial completed")
    cause: str | None = Field(default=None, description="why the trial didn't complete")
    memory: Memory | None = Field(default=None, description="peak seen before a failure")

    @model_validator(mode="after")
    def _check(self) -> TableTrial:
        completed = self.status is TrialStatus.COMPLETED
        if completed != (self.measurement is not None) or completed == (self.cause is not None):
            raise ValueError("a completed trial has a measurement, any other a cause")
        return self

    @classmethod
    def of(cls, result: TrialResult) -> TableTrial:
        number, duration_s, outcome = result.request.number, result.duration_s, result.outcome
        if isinstance(outcome, Measurement):
            return cls(number=number, status=result.status, duration_s=duration_s, measurement=outcome)
        failed = {"cause": outcome.cause, "memory": outcome.memory}
        return cls(number=number, status=outcome.status, duration_s=duration_s, **failed)

    def within(self, memory_bytes: int) -> TableTrial:
        """Return the trial as if there were no more memory than that.

        Where that is too little, it runs out in the first step, the last whose memory isn't known yet.
        """
        found = self.measurement
        if found is None or found.memory.peak_bytes <= memory_bytes:
            return self
        return TableTrial(
            number=self.number,
            status=TrialStatus.OUT_OF_MEMORY,
            duration_s=min(self.duration_s, found.startup_s + found.first_step_s),
            cause=f"needed {show_memory(found.memory.peak_bytes)} when it was recorded",
        )

    @property
    def outcome(self) -> Outcome:
        if self.measurement is not None:
            return self.measurement
        return Failure(status=self.status, cause=self.cause or "", memory=self.memory)


class RecordedPoint(Value):
    """One configuration and its trials, in the order they ran."""

    config: TrainConfig
    trials: tuple[TableTrial, ...] = Field(min_length=1)

    @property
    def rates(self) -> tuple[float, ...]:  # samples/s of each completed trial
        return tuple(t.measurement.samples_per_second for t in self.trials if t.measurement)

    @property
    def samples_per_second(self) -> float | None:
        """Mean over the completed trials, None if there is none."""
        return statistics.fmean(self.rates) if self.rates else None


class Table(Value):
    """A recorded search space, or the part of it that was measured."""

    header: TableHeader
    points: tuple[RecordedPoint, ...]


def write_table(table: Table, path: Path) -> None:
    lines = [table.header.model_dump_json(), *(point.model_dump_json() for point in table.points)]
    write_text("".join(f"{line}\n" for line in lines), path)


def load_table(path: str | Path) -> Table:
    """Return the table in `path`; raises OSError, and ValueError if it is damaged."""
    header, *points = Path(path).read_bytes().splitlines()
    return Table(
        header=TableHeader.model_validate_json(header),
        points=tuple(RecordedPoint.model_validate_json(point) for point in points),
    )


def table_of(plan: SearchPlan, results: Sequence[TrialResult]) -> Table:
    """Return the trials of a search as a table, the points in the order of their first trial.

    Finals and checks are left out: they do more than the trials that a replay asks for.
    """
    trials: dict[TrainConfig, list[TableTrial]] = {}
    for result in sorted(results, key=lambda r: r.request.number):
        if result.request.purpose.explores:
            trials.setdefault(result.request.config, []).append(TableTrial.of(result))
    header = TableHeader(
        autotune_version=__version__,
        date=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        **{**plan.problem_fields(), "workload": _anywhere(plan.workload)},
        budget=plan.budget,
        space=plan.space.model_dump(mode="json"),
        repeats=max((len(found) for found in trials.values()), default=1),
    )
    points = (RecordedPoint(config=config, trials=tuple(found)) for config, found in trials.items())
    return Table(header=header, points=tuple(points))


def plan_of(
    table: Table, *, effort: Effort = Effort.STANDARD, seed: int | None = None, max_trials: int | None = None
) -> SearchPlan:
    """Return the plan of a search of `table`; its space is the recorded one at every effort.

    The seed is by default that of the recorded workload. Time counts in recorded seconds.
    """
    header = table.header
    workload = header.workload.model_copy(update={} if seed is None else {"seed": seed})
    return SearchPlan(
        **{**header.problem_fields(), "workload": workload},
        budget=Budget.of(effort).limited(max_trials=max_trials),
        space=_recorded_space(header),
        notes=(),
    )


def _anywhere(workload: Workload) -> Workload:
    """Return `workload` without paths of this machine."""
    spec = workload.model
    if spec.source == "directory":
        spec = spec.model_copy(update={"reference": spec.name})
    dataset = workload.dataset and workload.dataset.rpartition("/")[2]
    return workload.model_copy(update={"model": spec.model_copy(update={"path": None}), "dataset": dataset})


def _recorded_space(header: TableHeader) -> SpaceFile:
    """Return the space of a table, with just the parameters that the effort of the recording varied."""
    written = SpaceFile.model_validate(header.space)
    efforts = list(Effort)
    varied = efforts[: efforts.index(header.budget.effort) + 1]
    parameters = {
        name: parameter.model_copy(update={"from_effort": Effort.QUICK})
        for name, parameter in written.parameters.items()
        if parameter.from_effort in varied
    }
    return written.model_copy(update={"parameters": parameters})
