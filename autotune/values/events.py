"""Events of a running search, as values: the command line displays them, callers of the API may observe them."""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum

from pydantic import NonNegativeInt, PositiveInt

from autotune.value import Value
from autotune.values.config import TrainConfig
from autotune.values.problem import Change
from autotune.values.trial import Prediction, Purpose, TrialResult


class Note(Value):
    """A line for every user: a default that was chosen, a condition of the machine, a warning."""

    text: str


class Detail(Value):
    """A line for `--verbose`, such as why a configuration was refused."""

    text: str


class Phase(StrEnum):
    """A phase of a search: announced before the first trial, then given by the purposes of the trials."""

    LOOKING = "looking at the machine and the model"
    WAITING = "waiting for a quiet machine"
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
    """The fastest configuration so far."""

    changes: tuple[Change, ...]
    samples_per_second: float
    peak_bytes: int | None
    speedup: float | None  # over the baseline; None: the baseline has no rate


class Standing(Value):
    """Progress of a search: the memory budget, and how many trials ended in which way."""

    memory_bytes: PositiveInt
    completed: NonNegativeInt
    out_of_memory: NonNegativeInt
    failed: NonNegativeInt  # for other reasons than memory
    refused: NonNegativeInt  # configurations that were refused without a trial
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
    standing: Standing | None = None


Event = Note | Detail | PhaseBegan | TrialStarted | TrialEnded
Observer = Callable[[Event], None]


def ignore(event: Event) -> None:
    """Ignore an event."""
