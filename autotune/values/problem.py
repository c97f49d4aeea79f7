"""The problem of a search (training, device, budget, allowed changes, objective, places) and the events while it runs.

The command line displays the events, callers of the API may observe them.
"""

from collections.abc import Callable
from enum import StrEnum
from typing import Any, Literal

from pydantic import Field, PositiveInt

from autotune.value import Value
from autotune.values.config import Allowance, TrainConfig
from autotune.values.hardware import Hardware
from autotune.values.model import ModelFacts
from autotune.values.trial import Measurement, Purpose, TrialRequest, TrialResult
from autotune.values.workload import Workload


class Problem(Value):
    """A training with its device, memory budget and allowed changes; the JSON of plans and reports begins with it."""

    workload: Workload
    facts: ModelFacts
    hardware: Hardware
    memory_bytes: PositiveInt  # the memory budget, of each device
    allowance: Allowance
    baseline: TrainConfig  # the user's own configuration, or the Trainer's defaults

    def problem_fields(self) -> dict[str, Any]:
        """Return the fields of the problem, without those of a subclass, to build another value from."""
        return {name: getattr(self, name) for name in Problem.model_fields}


class Change(Value):
    """A knob whose value differs from the baseline's, and the class of the change."""

    knob: str
    before: str
    after: str
    allowance: Allowance


class Objective(Value):
    """The throughput to maximise: samples per second, in the steady state or over a run, where compiling takes time."""

    run_samples: float | None = Field(default=None, gt=0)  # number of samples of the run; None: steady state

    def start_s_per_sample(self, measurement: Measurement) -> float:
        """Return the extra seconds of the first step per sample of the run; 0 in the steady state."""
        return 0.0 if self.run_samples is None else measurement.cold_start_s / self.run_samples

    def rate(self, measurement: Measurement) -> float:
        return 1.0 / (1.0 / measurement.samples_per_second + self.start_s_per_sample(measurement))


Engine = Literal["local", "ray"]


class Fleet(Value):
    """The machines that run the trials: this one, or the nodes of a Ray cluster."""

    engine: Engine = "local"
    workers: PositiveInt | None = None  # trials at once; None: one on this machine, one per device or node of a cluster
    devices: PositiveInt = 1  # GPUs of each trial
    nodes: PositiveInt = 1  # nodes that these are on, equally many on each
    address: str | None = None  # address of the cluster; None: RAY_ADDRESS, or a new local one
    kind: str | None = None  # part of the device's name; None: the device that most nodes have

    @property
    def is_single(self) -> bool:
        """Whether trials run on this machine, one at a time."""
        return self.engine == "local" and (self.workers or 1) == 1


class Allotment(Value):
    """The resources of each trial of a fleet."""

    hardware: Hardware
    notes: tuple[str, ...] = ()  # lines for the user


class Note(Value):
    """A line for every user: a default that was chosen, a condition of the machine, a warning."""

    text: str


class Phase(StrEnum):
    """A phase of a search: announced before the first trial, then given by the purposes of the trials."""

    LOOKING = "looking at the machine and the model"
    PREDICTING = "predicting"
    BASELINE = "baseline"
    SEARCHING = "searching"
    CONFIRMING = "confirming"
    CHECKING = "checking"
    EXPLAINING = "explaining"

    @classmethod
    def of(cls, purpose: Purpose) -> "Phase":
        phases = {Purpose.BASELINE: cls.BASELINE, Purpose.SEARCH: cls.SEARCHING, Purpose.FINAL: cls.CONFIRMING}
        return {**phases, Purpose.EXPLAIN: cls.EXPLAINING}.get(purpose, cls.CHECKING)


class PhaseBegan(Value):
    """A phase without trials has begun."""

    phase: Phase


class Leader(Value):
    """The fastest configuration so far."""

    changes: tuple[Change, ...]
    samples_per_second: float
    speedup: float | None  # over the baseline; None: the baseline has no rate


class TrialStarted(Value):
    """A trial is about to run."""

    request: TrialRequest
    changes: tuple[Change, ...]
    time_left_s: float
    trials_left: int
    leader: Leader | None = None


class TrialEnded(Value):
    """A trial has ended; its result is on disk."""

    result: TrialResult
    changes: tuple[Change, ...]
    leader: Leader | None = None


Event = Note | PhaseBegan | TrialStarted | TrialEnded
Observer = Callable[[Event], None]


def ignore(event: Event) -> None:
    pass
