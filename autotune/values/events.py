"""What a search reports while it runs, as values: the command line draws them, callers of the API may listen."""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum

from pydantic import NonNegativeInt, PositiveInt

from autotune.value import Value
from autotune.values.config import TrainConfig
from autotune.values.problem import Change
from autotune.values.trial import Prediction, Purpose, TrialResult


class Note(Value):
    """A line the user should read: a default that was chosen, a condition of the machine, a warning."""

    text: str


class Detail(Value):
    """A line for who wants to know more: why something was refused."""

    text: str


class Phase(StrEnum):
    """What a search is doing: announced before the first trial, then given by the purposes of the trials."""

    LOOKING = "looking at the machine and the model"
    PREDICTING = "predicting"
    BASELINE = "baseline"
    SEARCHING = "searching"
    CONFIRMING = "confirming"
    CHECKING = "checking"
    EXPLAINING = "explaining"

    @classmethod
    def of(cls, purpose: Purpose) -> Phase:
        """Return the phase that trials of this purpose belong to."""
        return _PHASES.get(purpose, cls.CHECKING)


_PHASES = {
    Purpose.BASELINE: Phase.BASELINE,
    Purpose.SEARCH: Phase.SEARCHING,
    Purpose.FINAL: Phase.CONFIRMING,
    Purpose.EXPLAIN: Phase.EXPLAINING,
}


class PhaseBegan(Value):
    """A phase without trials has begun."""

    phase: Phase


class Leader(Value):
    """The best so far."""

    changes: tuple[Change, ...]
    samples_per_second: float
    peak_bytes: int | None
    speedup: float | None  # over the baseline; None: that has no rate


class Standing(Value):
    """How far a search has come."""

    memory_bytes: PositiveInt  # the budget
    completed: NonNegativeInt  # trials
    out_of_memory: NonNegativeInt
    failed: NonNegativeInt  # for other reasons
    refused: NonNegativeInt  # configurations, without a trial
    leader: Leader | None


class TrialStarted(Value):
    """A trial is about to run."""

    number: int
    purpose: Purpose
    config: TrainConfig
    changes: tuple[Change, ...]
    time_left_s: float
    trials_left: int
    prediction: Prediction | None = None
    standing: Standing | None = None


class TrialEnded(Value):
    """A trial has ended; its result is on disk."""

    result: TrialResult
    changes: tuple[Change, ...]
    best_samples_per_second: float | None
    standing: Standing | None = None


Event = Note | Detail | PhaseBegan | TrialStarted | TrialEnded
Observer = Callable[[Event], None]


def ignore(event: Event) -> None:
    """Listen to nothing."""
