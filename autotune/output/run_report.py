"""All that is known of a search and its answer, to be drawn or written. Values only; `gather` makes them."""

from __future__ import annotations

from pydantic import Field

from autotune.value import Value
from autotune.values.estimate import MemoryBreakdown
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


class RunReport(Problem):
    """A problem with the search for its answer, as it stands."""

    run_directory: str
    written: str = Field(description="when this was gathered, UTC, ISO 8601")
    autotune_version: str
    is_running: bool = Field(description="a search, or an explanation of one, runs in the directory now")
    command: str | None = Field(description="what the search was started with; None: it wasn't recorded")
    result: ResultData | None = Field(description="None: no trial has completed")
    nothing: str | None = Field(default=None, description="why there is no result")
    explanation: Explanation | None = Field(default=None, description="None: no result, or the baseline is the winner")
    trials: tuple[TrialRow, ...]
    unfinished: int = Field(default=0, description="trials that were begun and have no readable result")
    breakdowns: tuple[Breakdown, ...] = ()
    no_breakdown: str | None = Field(default=None, description="why there are none")
    spent: Spent
