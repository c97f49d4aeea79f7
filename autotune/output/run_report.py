"""The data of a report on a search; `gather` collects them from a run directory."""

from __future__ import annotations

from pydantic import Field

from autotune.value import Value
from autotune.values.estimate import Alive, MemoryBreakdown
from autotune.values.explanation import Explanation
from autotune.values.problem import Problem
from autotune.values.result import ResultData
from autotune.values.time_spent import Spent
from autotune.values.trial_row import TrialRow


class Breakdown(Value):
    """Predicted memory of a configuration by component, beside what was measured."""

    name: str
    predicted: MemoryBreakdown
    measured_bytes: int | None
    alive: tuple[Alive, ...] = Field(default=(), description="at the predicted peak, most first")


class RunReport(Problem):
    """A problem, and the state and result of its search."""

    run_directory: str
    written: str = Field(description="time of the report, UTC, ISO 8601")
    autotune_version: str
    is_running: bool = Field(description="whether `find` or `explain` is running in the directory")
    command: str | None = Field(description="command line of the search; None: not recorded")
    result: ResultData | None = Field(description="None: no trial has completed")
    nothing: str | None = Field(default=None, description="why there is no result")
    explanation: Explanation | None = Field(default=None, description="None: no result, or the baseline is the winner")
    trials: tuple[TrialRow, ...]
    unfinished: int = Field(default=0, description="number of trials that began and have no result")
    breakdowns: tuple[Breakdown, ...] = ()
    no_breakdown: str | None = Field(default=None, description="why there are no breakdowns")
    spent: Spent
