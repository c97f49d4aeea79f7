"""All that is known of a search and its answer, for who draws or writes it. Values only: `reporting` gathers them."""

from __future__ import annotations

from pydantic import Field

from autotune.value import Value
from autotune.values.config import TrainConfig
from autotune.values.estimate import MemoryBreakdown
from autotune.values.explanation import Explanation
from autotune.values.problem import Problem
from autotune.values.result import Change, ResultData
from autotune.values.time_spent import Spent
from autotune.values.trial import Interval, Prediction, Purpose, TrialStatus


class ReportedTrial(Value):
    """One trial, or a configuration that was refused without one."""

    label: str = Field(description="its number; 'explain N' of `autotune explain`; empty: refused without a trial")
    purpose: Purpose | None = Field(default=None, description="None: refused without a trial")
    status: TrialStatus
    config: TrainConfig
    changes: tuple[Change, ...] = Field(description="against the baseline")
    samples_per_second: float | None = None
    interval: Interval | None = Field(default=None, description="of the samples per second")
    tokens_per_second: float | None = None
    peak_bytes: int | None = None
    prediction: Prediction | None = None
    duration_s: float | None = None
    ended_s: float | None = Field(default=None, description="seconds from the first trial's start to this one's end")
    cause: str | None = None

    @property
    def is_compared(self) -> bool:
        """Whether its rate belongs beside the others: checks train otherwise; explaining comes later."""
        usual = (Purpose.BASELINE, Purpose.SEARCH, Purpose.FINAL)
        return self.purpose in usual and self.samples_per_second is not None


class Breakdown(Value):
    """Predicted memory of a configuration by component, beside what was measured."""

    name: str
    predicted: MemoryBreakdown
    measured_bytes: int | None


class RunReport(Problem):
    """A problem with the search for its answer, as it stands."""

    run_directory: str
    written: str = Field(description="when this was gathered, UTC, ISO 8601")
    autotune_version: str
    is_running: bool = Field(description="a search, or an explanation of one, runs in the directory now")
    command: str | None = Field(description="what the search was started with; None: it wasn't recorded")
    result: ResultData | None = Field(description="None: no trial has completed")
    nothing: str | None = Field(default=None, description="why there is no result")
    explanation: Explanation | None = Field(default=None, description="None: no result, or the baseline is the best")
    trials: tuple[ReportedTrial, ...]
    unfinished: int = Field(default=0, description="trials that were begun and have no readable result")
    breakdowns: tuple[Breakdown, ...] = ()
    no_breakdown: str | None = Field(default=None, description="why there are none")
    spent: Spent
