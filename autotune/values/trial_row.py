"""One trial as a flat row for tables, reports and the lasting record."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from pydantic import Field

from autotune.units import show_rate
from autotune.value import Value
from autotune.values.config import TrainConfig
from autotune.values.problem import Change
from autotune.values.time_spent import ends_s
from autotune.values.trial import Interval, Measurement, Prediction, Purpose, TrialResult, TrialStatus


class TrialRow(Value):
    """One trial, or a configuration that was refused without one."""

    retired: ClassVar[frozenset[str]] = frozenset({"depths"})

    number: int | None = Field(description="None: refused without a trial")
    purpose: Purpose | None = Field(default=None, description="None: refused without a trial")
    config: TrainConfig
    changes: tuple[Change, ...] | None = Field(default=None, description="against the baseline; None: not computed")
    status: TrialStatus
    samples_per_second: float | None = None
    interval: Interval | None = Field(default=None, description="of the samples per second")
    config_samples_per_second: float | None = Field(
        default=None, description="of its configuration, by all its trials that count: the finals, if it had any"
    )
    tokens_per_second: float | None = None
    peak_bytes: int | None = Field(default=None, description="peak memory")
    prediction: Prediction | None = Field(default=None, description="made before the trial ran")
    duration_s: float | None = None
    ended_s: float | None = Field(default=None, description="seconds in which trials had run when this one ended")
    cause: str | None = Field(default=None, description="why it has no measurement, or was refused")

    @classmethod
    def of(cls, trial: TrialResult, ended_s: float | None = None) -> TrialRow:
        """Return the row of a trial."""
        measured, memory = trial.measurement, trial.outcome.memory
        return cls(
            number=trial.request.number,
            purpose=trial.request.purpose,
            config=trial.request.config,
            status=trial.status,
            samples_per_second=measured.samples_per_second if measured else None,
            interval=measured.shown_interval if measured else None,
            tokens_per_second=measured.tokens_per_second if measured else None,
            peak_bytes=memory.peak_bytes if memory is not None and memory.is_known else None,
            prediction=trial.request.prediction,
            duration_s=trial.duration_s,
            ended_s=ended_s,
            cause=trial.outcome.cause if trial.outcome.kind == "failure" else None,
        )

    @property
    def label(self) -> str:
        """The trial's number, or 'explain N' for one of `autotune explain`; empty: refused without a trial."""
        return "" if self.number is None or self.purpose is None else self.purpose.label(self.number)

    @property
    def is_compared(self) -> bool:
        """Whether its rate compares with the others': checks train differently, and explaining follows the search."""
        usual = (Purpose.BASELINE, Purpose.SEARCH, Purpose.FINAL)
        return self.purpose in usual and self.samples_per_second is not None


def shown_rate(measured: Measurement) -> str:
    """Return samples per second for people: two digits and 'about' if the interval is too wide to be shown."""
    rate = measured.samples_per_second
    return show_rate(rate) if measured.shown_interval.is_narrow else f"about {show_rate(float(f'{rate:.2g}'))}"


def rows_of(trials: Sequence[TrialResult]) -> list[TrialRow]:
    """Return the rows of the trials of one search, in their order."""
    return [TrialRow.of(trial, ended_s) for trial, ended_s in zip(trials, ends_s(trials), strict=True)]
