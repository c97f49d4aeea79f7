"""A trial is a value in and a value out, across a process boundary.

The tuner writes a :class:`TrialRequest` to `request.json`, each child its outcome to `rank-N.json`, and the tuner
alone merges them into a :class:`TrialResult` in `result.json`. What can go wrong is a :class:`Failure` with a
status and a cause, never an exception in the tuner.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from typing import Annotated, Literal

from pydantic import Field, NonNegativeInt, PositiveInt

from autotune.value import Value
from autotune.values.checks import CheckTask, LossCurve, Routed, Soaked
from autotune.values.conditions import Conditions
from autotune.values.config import TrainConfig
from autotune.values.model import ModelFacts
from autotune.values.user_code import OwnFound
from autotune.values.workload import LengthProfile, Workload


class TrialStatus(StrEnum):
    """How a trial ended."""

    COMPLETED = "completed"
    OUT_OF_MEMORY = "out of memory"
    TIMED_OUT = "timed out"
    CRASHED = "crashed"
    INVALID = "invalid"  # ran, but not what was asked for; or refused by a library; or a non-finite loss
    REJECTED = "rejected"  # refused by a rule or by what was measured before; never launched


class Purpose(StrEnum):
    """Why a trial is run."""

    BASELINE = "baseline"
    SEARCH = "search"
    FINAL = "final"
    SOAK = "soak"
    ROUTING = "skewed routing"
    LOSS_CHECK = "loss check"
    EXPLAIN = "explain"  # the winner, or the winner without one of its knobs, in turn; the search has ended

    @property
    def explores(self) -> bool:
        """Whether the search learns from it; the others measure again or check what was found."""
        return self in (Purpose.BASELINE, Purpose.SEARCH)

    def label(self, number: int) -> str:
        """Return what a trial is called: those of `autotune explain` have numbers of their own."""
        return f"explain {number}" if self is Purpose.EXPLAIN else str(number)

    @property
    def closes(self) -> bool:
        """Whether it is of the finals and checks, before which the search has ended."""
        return not self.explores and self is not Purpose.EXPLAIN


class Limits(Value):
    """What bounds one trial."""

    memory_bytes: PositiveInt = Field(description="the device memory the trial may take")
    timeout_s: float = Field(gt=0)
    discarded_steps: PositiveInt
    discarded_s: float = Field(default=0.0, ge=0)
    measure_steps: int = Field(ge=2)
    measure_time_s: float = Field(gt=0)
    relative_interval: float = Field(gt=0)
    beaten_step_s: float | None = Field(
        default=None, gt=0, description="a trial whose steps surely take longer has lost, and isn't measured any finer"
    )


class Prediction(Value):
    """What the cost model expected of a trial before it ran, earlier measurements taken into account."""

    samples_per_second: float
    peak_bytes: int = Field(description="the figure that is held against the memory budget")


class TrialRequest(Value):
    """All that a child process needs to run one trial."""

    number: NonNegativeInt
    purpose: Purpose
    config: TrainConfig
    workload: Workload
    device: str = Field(description="torch device: 'cpu' or 'cuda:0'")
    accumulation_steps: PositiveInt = Field(
        description="micro-batches per step to run; fewer than the workload's when the rest is inferred"
    )
    limits: Limits
    prediction: Prediction | None = Field(default=None, description="of the cost model, None if it knows nothing")
    task: CheckTask | None = Field(default=None, description="of a check")
    cold_compile: bool = Field(default=False, description="compile without what earlier trials left in the cache")

    @property
    def ranks(self) -> int | None:
        """Processes that know of each other, as torchrun starts them; None: a plain process."""
        spread = self.config.parallelism
        return None if spread.is_single else spread.world_size


class Memory(Value):
    """Peak memory of a trial. Fields that the device can't tell are None."""

    allocated_bytes: int | None = Field(default=None, description="CUDA: torch's max_memory_allocated")
    reserved_bytes: int | None = Field(default=None, description="CUDA: torch's max_memory_reserved")
    device_bytes: int | None = Field(default=None, description="CUDA: peak reserved + what NVML sees beyond it")
    resident_bytes: int | None = Field(
        default=None, description="CPU: peak resident set less that of the imported libraries"
    )

    @property
    def is_known(self) -> bool:
        """Whether there is any figure."""
        return any(value is not None for value in dict(self).values())

    @property
    def peak_bytes(self) -> int:
        """The figure that is held against the memory budget.

        Raises:
            ValueError: No figure is known.
        """
        for value in (self.device_bytes, self.reserved_bytes, self.resident_bytes, self.allocated_bytes):
            if value is not None:
                return value
        raise ValueError("a measurement without any memory figure")


def worst_memory(seen: Sequence[Memory]) -> Memory:
    """Return the highest figure of each kind."""

    def highest(field: str) -> int | None:
        return max((value for memory in seen if (value := getattr(memory, field)) is not None), default=None)

    return Memory(**{field: highest(field) for field in Memory.model_fields})


class Phases(Value):
    """Where the seconds of a trial's process went, from its start until it wrote its outcome."""

    prepare_s: float = Field(default=0.0, description="libraries, and the memory budget put in force")
    model_s: float = Field(default=0.0, description="the model made, with random weights, on the device")
    data_s: float = Field(default=0.0, description="samples read or drawn")
    trainer_s: float = Field(default=0.0, description="the Trainer and its optimizer made, up to the first step")
    first_step_s: float = Field(default=0.0, description="the first optimizer step, compilation included")
    discarded_s: float = Field(default=0.0, description="further steps, until they are measured")
    measured_s: float = Field(default=0.0, description="the measured steps, and no others")
    check_s: float = Field(default=0.0, description="what a check does beside training, as evaluation and saving")
    closing_s: float = Field(default=0.0, description="looking at what took effect, until the outcome is written")

    @property
    def work_s(self) -> float:
        """Training and checking: what a trial is for."""
        return self.first_step_s + self.discarded_s + self.measured_s + self.check_s


class Interval(Value):
    """A 95 % confidence interval."""

    low: float
    high: float


class Measurement(Value):
    """What a completed trial measured."""

    kind: Literal["measurement"] = "measurement"
    step_times_s: tuple[float, ...] = Field(description="optimizer steps at the workload's full accumulation")
    accumulation_steps: PositiveInt = Field(description="micro-batches per step that were really run")
    samples_per_second: float
    samples_per_second_interval: Interval = Field(
        description="of the mean, by the spread of the steps; of finals that of the next run, by the spread of trials"
    )
    tokens_per_second: float | None = None
    memory: Memory
    startup_s: float = Field(description="from launch to the first training step: model, data, optimizer")
    first_step_s: float = Field(description="the first optimizer step, compilation included")
    data_wait_share: float | None = Field(description="share of a step spent waiting for data; None: it can't be told")
    padding_share: float | None = Field(
        default=None, description="of the positions that were run, those that hold padding; None: no tokens"
    )
    loss: float | None = Field(description="mean training loss over all steps run; None: an own loop tells none")
    alloc_retries: int | None = Field(
        default=None,
        description="CUDA: how often the allocator gave its cache back and asked again during the measured steps",
    )
    effects: dict[str, str] = Field(description="what was seen to be in effect, by knob")
    warnings: tuple[str, ...] = ()
    soaked: Soaked | None = Field(default=None, description="of a soak")
    routed: Routed | None = Field(default=None, description="of a run with skewed routing")
    curve: LossCurve | None = Field(default=None, description="of a loss check")
    phases: Phases | None = Field(default=None, description="None: measured before they were recorded")
    conditions: Conditions | None = Field(default=None, description="what else went on meanwhile, where it can be seen")

    @property
    def ran_short(self) -> bool:
        """Whether the allocator had to give its cache back amid the measured steps: a little more, and it fails."""
        return bool(self.alloc_retries)

    @property
    def shown_interval(self) -> Interval:
        """The interval of samples/s as it is told: no narrower than what others took of the cores meanwhile."""
        taken = self.conditions.taken_share if self.conditions is not None else 0.0
        rate, known = self.samples_per_second, self.samples_per_second_interval
        return Interval(low=min(known.low, rate * (1 - taken)), high=max(known.high, rate * (1 + taken)))


class Failure(Value):
    """Why a trial has no measurement."""

    kind: Literal["failure"] = "failure"
    status: TrialStatus
    cause: str = Field(description="one line")
    log_tail: str = ""
    memory: Memory | None = Field(default=None, description="peak seen before the failure")
    phases: Phases | None = Field(default=None, description="until it failed; None: it died without a word")


Outcome = Annotated[Measurement | Failure, Field(discriminator="kind")]


class TrialResult(Value):
    """A trial that has ended, as it stands in `result.json`."""

    request: TrialRequest
    outcome: Outcome
    duration_s: float = Field(description="wall time from launch until the device was idle again")
    warnings: tuple[str, ...] = Field(default=(), description="what was seen around the trial, not in it")
    began: float | None = Field(default=None, description="seconds since 1970; None: not told")
    place: str = Field(default="", description="which of several places ran it; empty: there was no other")

    @property
    def status(self) -> TrialStatus:
        """How the trial ended."""
        return TrialStatus.COMPLETED if isinstance(self.outcome, Measurement) else self.outcome.status

    @property
    def measurement(self) -> Measurement | None:
        """The measurement of a completed trial, otherwise None."""
        return self.outcome if isinstance(self.outcome, Measurement) else None

    @property
    def has_failed(self) -> bool:
        """Whether it speaks against its configuration; one that was cut short by a time limit tells nothing."""
        return self.status not in (TrialStatus.COMPLETED, TrialStatus.TIMED_OUT)

    @property
    def overhead_s(self) -> float | None:
        """What the trial took beside its steps and checks: process, model, data, Trainer, end; None if unknown."""
        phases = self.outcome.phases
        return None if phases is None else max(0.0, self.duration_s - phases.work_s)


class DescribeRequest(Value):
    """What has to be known of a workload before the first trial; answered by a child that touches no device."""

    workload: Workload


class ExamineRequest(Value):
    """A loop of the user's own that has to be looked at before the first trial; answered like a DescribeRequest."""

    workload: Workload
    facts: ModelFacts
    config: TrainConfig = Field(description="the baseline")
    other: PositiveInt | None = Field(description="another micro-batch that is to be tried; None: none will be")


class Description(Value):
    """What a child found out about a workload."""

    kind: Literal["description"] = "description"
    facts: ModelFacts
    lengths: LengthProfile | None = Field(default=None, description="of the real data, tokenized")
    notes: tuple[str, ...] = Field(default=(), description="what the user should know, a line each")
    own: OwnFound | None = Field(default=None, description="of a training of the user's own")


class Refusal(Value):
    """Why a workload can't be described: the user's mistake, in one line."""

    kind: Literal["refusal"] = "refusal"
    error: str = Field(description="name of the class in autotune.errors")
    message: str


DescribeAnswer = Annotated[Description | Refusal, Field(discriminator="kind")]
