"""What a search tells while it runs; the command line draws it, the API may listen."""

from __future__ import annotations

from collections.abc import Callable

from autotune.config import TrainConfig
from autotune.result import Change
from autotune.trial import Purpose, TrialResult
from autotune.values import Value


class Note(Value):
    """A line the user should read: a default that was chosen, a condition of the machine, a warning."""

    text: str


class TrialStarted(Value):
    """A trial is about to run."""

    number: int
    purpose: Purpose
    config: TrainConfig
    changes: tuple[Change, ...]
    time_left_s: float
    trials_left: int


class TrialEnded(Value):
    """A trial has ended; its result is on disk."""

    result: TrialResult
    changes: tuple[Change, ...]
    best_samples_per_second: float | None


Event = Note | TrialStarted | TrialEnded
Observer = Callable[[Event], None]


def ignore(event: Event) -> None:
    """Listen to nothing."""
