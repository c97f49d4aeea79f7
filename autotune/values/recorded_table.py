"""Tables of recorded search spaces: the results of the trials of every point, as a value and as a JSON Lines file.

::

    {"schema_version": 1, "workload": {...}, "hardware": {...}, "space": {...}, ...}       the header
    {"config": {...}, "trials": [{"number": 0, "status": "completed", ...}, {...}]}        a line per point
    {"config": {...}, "trials": [{"number": 7, "status": "out of memory", ...}, {...}]}

`autotune.search.exhaustive` writes a table from the trials of a search. It contains no paths of the machine that
recorded it, and no logs.
"""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any, Literal, TypeVar

from pydantic import Field, NonNegativeInt, PositiveInt, ValidationError, model_validator

from autotune.errors import InputError, located
from autotune.value import Value, write_text
from autotune.values.budget import Budget
from autotune.values.config import TrainConfig
from autotune.values.problem import Problem
from autotune.values.trial import Failure, Measurement, Memory, Outcome, TrialResult, TrialStatus

TABLE_SCHEMA_VERSION: Literal[1] = 1

V = TypeVar("V", bound=Value)


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
        """Return the recorded form of `result`."""
        number, duration_s, outcome = result.request.number, result.duration_s, result.outcome
        if isinstance(outcome, Measurement):
            return cls(number=number, status=result.status, duration_s=duration_s, measurement=outcome)
        return cls(
            number=number, status=outcome.status, duration_s=duration_s, cause=outcome.cause, memory=outcome.memory
        )

    @property
    def outcome(self) -> Outcome:
        """The outcome that was recorded, without its log."""
        if self.measurement is not None:
            return self.measurement
        return Failure(status=self.status, cause=self.cause or "", memory=self.memory)


class RecordedPoint(Value):
    """One configuration and its trials, in the order they ran."""

    config: TrainConfig
    trials: tuple[TableTrial, ...] = Field(min_length=1)

    @property
    def rates(self) -> tuple[float, ...]:
        """Samples per second of each completed trial."""
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
    """Write `table` to `path` atomically.

    Raises:
        OSError: The directory can't be written.
    """
    lines = [table.header.model_dump_json(), *(point.model_dump_json() for point in table.points)]
    write_text("".join(f"{line}\n" for line in lines), path)


def load_table(path: str | Path) -> Table:
    """Return the table in `path`.

    Raises:
        InputError: The file is missing or malformed; the message names the line.
    """
    try:
        lines = Path(path).read_bytes().splitlines()
    except OSError as error:
        raise InputError(f"{path}: {error.strerror}") from None
    if not lines:
        raise InputError(f"{path}: empty; `autotune find --exhaustive` writes a table")
    header = _parsed(TableHeader, lines[0], f"{path}: line 1: no header of a table (schema {TABLE_SCHEMA_VERSION})")
    first_line: dict[TrainConfig, int] = {}
    points = []
    for number, line in enumerate(lines[1:], start=2):
        point = _parsed(RecordedPoint, line, f"{path}: line {number}: no point of a table")
        if point.config in first_line:
            raise InputError(f"{path}: line {number}: the configuration of line {first_line[point.config]} again")
        first_line[point.config] = number
        points.append(point)
    if not points:
        raise InputError(f"{path}: a header without any point")
    return Table(header=header, points=tuple(points))


def _parsed(kind: type[V], line: bytes, problem: str) -> V:
    try:
        return kind.model_validate_json(line)
    except ValidationError as error:
        raise InputError(f"{problem}: {located(error)}") from None
