"""Trials as values: the request to a child process, and its result.

The tuner writes a :class:`TrialRequest` to `request.json`, each child process its outcome to `rank-N.json`, and the
tuner alone merges them into a :class:`TrialResult` in `result.json`. A failed trial has a :class:`Failure` with a
status and a cause and raises no exception in the tuner.
"""

import math
import statistics
from collections.abc import Sequence
from enum import StrEnum
from typing import Annotated, Any, Literal, Self

from pydantic import ConfigDict, Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from autotune.units import show_rate
from autotune.value import Value
from autotune.values.budget import CheckTask, LossCurve, Soaked
from autotune.values.conditions import QUIET_SHARE, Conditions, highest
from autotune.values.config import TrainConfig
from autotune.values.model import ModelFacts
from autotune.values.workload import LengthProfile, OwnFound, Workload


class TrialStatus(StrEnum):
    """How a trial ended."""

    COMPLETED = "completed"
    OUT_OF_MEMORY = "out of memory"
    TIMED_OUT = "timed out"
    CRASHED = "crashed"
    INVALID = "invalid"  # a setting had no effect, a library refused it, or the loss was not finite
    REJECTED = "rejected"  # refused without a trial, by a rule or by earlier measurements


class Purpose(StrEnum):
    """Why a trial is run."""

    BASELINE = "baseline"
    SEARCH = "search"
    FINAL = "final"
    SOAK = "soak"
    LOSS_CHECK = "loss check"
    PROFILE = "profile"
    EXPLAIN = "explain"  # after the search: the winner, and the winner without one of its knobs, in turn

    @property
    def explores(self) -> bool:
        """Whether the trial explores the space; other trials measure a configuration again, or check the winner."""
        return self in (Purpose.BASELINE, Purpose.SEARCH)

    def label(self, number: int) -> str:
        """Return the name of trial `number`; trials of `autotune explain` are numbered separately."""
        return f"explain {number}" if self is Purpose.EXPLAIN else str(number)

    @property
    def closes(self) -> bool:
        """Whether the trial belongs to the finals and checks, which follow the exploration."""
        return not self.explores and self is not Purpose.EXPLAIN


class Limits(Value):
    """Limits of one trial; `values.budget.Budget` describes those without a description."""

    memory_bytes: PositiveInt  # the device memory the trial may take
    timeout_s: float = Field(gt=0)
    discarded_steps: PositiveInt
    discarded_s: float = Field(default=0.0, ge=0)
    measure_steps: int = Field(ge=2)
    measure_time_s: float = Field(gt=0)
    least_time_s: float = Field(default=0.0, ge=0)  # measuring lasts so long, however many steps that takes
    relative_interval: float = Field(gt=0)
    beaten_step_s: float | None = Field(default=None, gt=0)  # measuring ends early when a step surely takes longer


# What an optimizer step spends its time on. Attention is fused attention and softmax of scores; element-wise is all
# else that reads and writes the device's memory; the host counts while the device waits for it, and so do others.
StepPart = Literal[
    "matrix products", "attention", "element-wise", "optimizer", "other devices", "generating", "host", "data"
]
StepParts = dict[StepPart, float]


class Prediction(Value):
    """The cost model's prediction for a trial, made before it ran."""

    samples_per_second: float
    peak_bytes: int  # peak memory, as compared with the memory budget
    mfu: float | None = Field(default=None, description="model FLOP utilisation; None: the device's peak isn't known")
    parts: StepParts = Field(default={}, description="shares of a step by what it is spent on; they add up to 1")

    def mfu_at(self, samples_per_second: float) -> float | None:
        """Return the model FLOP utilisation at another rate than the predicted one."""
        return None if self.mfu is None else self.mfu * samples_per_second / self.samples_per_second


class Rendezvous(Value):
    """Where the ranks of a trial meet, by the names of torchrun's options."""

    address: str
    port: PositiveInt
    nodes: PositiveInt = 1
    node_rank: NonNegativeInt = 0  # of this machine


class TrialRequest(Value):
    """All that a child process needs to run one trial."""

    number: NonNegativeInt
    purpose: Purpose
    config: TrainConfig
    workload: Workload
    device: str  # torch device: 'cpu' or 'cuda:0'
    accumulation_steps: PositiveInt  # micro-batches of a step to run; the time of the others is extrapolated
    limits: Limits
    prediction: Prediction | None = None  # None: the cost model has none
    task: CheckTask | None = None  # the task, if the trial is a check
    cold_compile: bool = False  # compile with an empty cache
    in_turn_with: tuple[NonNegativeInt, ...] = ()  # trials that are alive at once and compute in turn, this included
    # Given to each of several nodes, which runs its own ranks; None: one machine runs all.
    rendezvous: Rendezvous | None = None

    @property
    def ranks(self) -> range | None:
        """The ranks that torchrun starts on this machine; None: a single process without torchrun."""
        spread, meeting = self.config.parallelism, self.rendezvous
        if meeting is None:
            return spread.ranks
        here = spread.world_size // meeting.nodes
        return range(meeting.node_rank * here, (meeting.node_rank + 1) * here)


class Memory(Value):
    """Peak memory of a trial in bytes. None: not available on the device."""

    allocated_bytes: NonNegativeInt | None = None  # CUDA: torch's max_memory_allocated
    reserved_bytes: NonNegativeInt | None = None  # CUDA: torch's max_memory_reserved
    device_bytes: NonNegativeInt | None = None  # CUDA: peak reserved, and what NVML reports beyond it
    resident_bytes: NonNegativeInt | None = None  # CPU: peak resident set less the libraries' own

    @property
    def is_known(self) -> bool:
        return any(value is not None for value in dict(self).values())

    @property
    def peak_bytes(self) -> int:
        """The peak that is compared with the memory budget; a ValueError without any figure."""
        for value in (self.device_bytes, self.reserved_bytes, self.resident_bytes, self.allocated_bytes):
            if value is not None:
                return value
        raise ValueError("a measurement without any memory figure")

    @classmethod
    def worst_of(cls, seen: Sequence[Self]) -> Self:
        return cls(**{field: highest(seen, field) for field in Memory.model_fields})


class Alive(Value):
    """Tensors of one kind, module and operator that are there at the peak; equal layers together."""

    kind: str  # weights, gradients, optimizer states, activations, temporaries or communication
    module: str  # as model.layers.*.mlp; empty: none, such as the loss
    operator: str  # that made them, or 'parameter'; empty: unknown
    tensors: int  # how many: one for each layer, or more
    allocated_bytes: int
    knob: str | None  # as --fix takes it, that would shrink them; None: nothing but a smaller model


class PeakParts(Value):
    """What a trial's peak on a CUDA device is made of."""

    phases: dict[str, Memory]  # the peak of each phase of a training, in their order
    alive: tuple[Alive, ...]  # what was allocated at the highest, most first


class Phases(Value):
    """Seconds of a trial's process by phase, from its start until it wrote its outcome."""

    prepare_s: float = 0.0  # importing libraries and setting the memory limit
    model_s: float = 0.0  # making the model with random weights on the device
    data_s: float = 0.0  # reading or drawing samples
    trainer_s: float = 0.0  # making the Trainer and its optimizer, up to the first step
    first_step_s: float = 0.0  # the first optimizer step, compilation included
    discarded_s: float = 0.0  # further steps before the measured ones
    measured_s: float = 0.0  # the measured steps
    waited_s: float = 0.0  # waiting while another trial computed, of trials in turn
    check_s: float = 0.0  # work of a check beside training, such as evaluating and saving
    closing_s: float = 0.0  # verifying the settings in effect, until the outcome is written


class Interval(Value):
    """A 95 % confidence interval; its ends are infinite where nothing is known."""

    model_config = ConfigDict(allow_inf_nan=True)

    low: float
    high: float

    @property
    def is_narrow(self) -> bool:
        """Whether its ends are within a factor of two; a wider interval isn't shown as figures."""
        return self.low > 0 and self.high <= 2 * self.low

    def times(self, factor: float) -> "Interval":
        return Interval(low=self.low * factor, high=self.high * factor)


class Measurement(Value):
    """The measurement of a completed trial."""

    kind: Literal["measurement"] = "measurement"
    step_times_s: tuple[PositiveFloat, ...]  # seconds of each optimizer step, at the workload's full accumulation
    accumulation_steps: PositiveInt  # micro-batches per step that ran
    steps_per_turn: PositiveInt | None = None  # steps between those of trials that ran in turn; None: it ran alone
    samples_per_second: PositiveFloat
    # Of the mean, by the spread of steps; in finals of the next run, by the spread of trials.
    samples_per_second_interval: Interval
    memory: Memory
    startup_s: float  # seconds from launch to the first training step
    first_step_s: float  # seconds of the first optimizer step, at the full accumulation, compilation included
    data_wait_share: float | None  # share of a step spent waiting for data; None: unknown
    loss: float | None = Field(allow_inf_nan=True)  # mean over all steps; None: the user's loop returns none
    alloc_retries: int | None = None  # CUDA: num_alloc_retries of torch's allocator during the measured steps
    effects: dict[str, str]  # the setting that was verified to be in effect, by knob
    warnings: tuple[str, ...] = ()
    soaked: Soaked | None = None  # result of a soak
    parts: PeakParts | None = None  # result of a soak that tells them
    curve: LossCurve | None = None  # result of a loss run
    busy_s: StepParts | None = None  # result of a profile: seconds of a step in which the device worked
    phases: Phases | None = None  # None: not timed
    conditions: Conditions | None = None  # disturbances during the measured steps

    @property
    def ran_short(self) -> bool:
        """Whether the allocator had to free its cache during the measured steps: memory was nearly exhausted."""
        return bool(self.alloc_retries)

    @property
    def shown_interval(self) -> Interval:
        """The interval of samples/s, widened to the share of the cores' time that other processes took."""
        taken = self.conditions.taken_share if self.conditions is not None else 0.0
        rate, known = self.samples_per_second, self.samples_per_second_interval
        return Interval(low=min(known.low, rate * (1 - taken)), high=max(known.high, rate * (1 + taken)))

    @property
    def cold_start_s(self) -> float:
        """Seconds by which the first step exceeds the mean measured step: compilation, above all."""
        return max(0.0, self.first_step_s - statistics.fmean(self.step_times_s))

    def break_even_steps(self, reference: Self) -> int | None:
        """Return the number of its steps that make up for a slower start; None: its samples aren't faster."""
        lead = self.samples_per_second / reference.samples_per_second
        won_s = (lead - 1) * statistics.fmean(self.step_times_s)
        cost_s = self.cold_start_s - reference.cold_start_s
        return math.ceil(max(0.0, cost_s) / won_s) if won_s > 0 else None

    def shown_rate(self, correction: float = 1.0, *, tokens: float = 1.0) -> str:
        """Return samples per second, or tokens by those of a sample; 'about' two digits if corrected or too unsure."""
        rate = self.samples_per_second * correction * tokens
        return show_rate(rate, is_sure=correction == 1.0 and self.shown_interval.is_narrow)


class Failure(Value):
    """Why a trial has no measurement."""

    kind: Literal["failure"] = "failure"
    status: TrialStatus
    cause: str  # one line
    memory: Memory | None = None  # peak seen before the failure
    crowded_out: bool = False  # whether other processes held memory of the device that the budget had left
    device_failed: bool = False  # whether the device or its driver failed, whatever the configuration
    phases: Phases | None = None  # until it failed; None: the process wrote no outcome


Outcome = Annotated[Measurement | Failure, Field(discriminator="kind")]


class TrialResult(Value):
    """A trial that has ended, as it stands in `result.json`."""

    request: TrialRequest
    outcome: Outcome
    duration_s: NonNegativeFloat  # wall time in seconds from launch until the device was idle again
    warnings: tuple[str, ...] = ()  # warnings of the parent process
    began: float = 0.0  # start, in seconds since 1970
    place: str = ""  # which of several devices or nodes ran it; empty: there was one

    @property
    def is_disturbed(self) -> bool:
        """Whether others took so much of the machine that the rate says nothing to a later search."""
        seen = None if self.measurement is None else self.measurement.conditions
        return seen is not None and seen.taken_share > QUIET_SHARE

    @property
    def status(self) -> TrialStatus:
        return TrialStatus.COMPLETED if isinstance(self.outcome, Measurement) else self.outcome.status

    @property
    def measurement(self) -> Measurement | None:
        return self.outcome if isinstance(self.outcome, Measurement) else None

    @property
    def is_excused(self) -> bool:
        """Whether the failure says nothing of the configuration: others held the memory, or the device failed."""
        return isinstance(self.outcome, Failure) and (self.outcome.crowded_out or self.outcome.device_failed)

    @property
    def has_failed(self) -> bool:
        """Whether the configuration failed; a trial that is excused or reached its time limit proves nothing."""
        return self.status not in (TrialStatus.COMPLETED, TrialStatus.TIMED_OUT) and not self.is_excused

    @property
    def overhead_s(self) -> float | None:
        """Seconds of the trial beside steps and checks: process, model, data, Trainer, closing; None: unknown."""
        phases = self.outcome.phases
        if phases is None:
            return None
        work_s = phases.first_step_s + phases.discarded_s + phases.measured_s + phases.check_s
        return max(0.0, self.active_s - work_s)

    @property
    def active_s(self) -> float:
        """`duration_s` without the time in which another trial computed in its stead."""
        phases = self.outcome.phases
        return self.duration_s if phases is None else max(0.0, self.duration_s - phases.waited_s)


class DescribeRequest(Value):
    """Asks for the facts of a workload; answered before the first trial by a child that uses no device."""

    workload: Workload
    arguments: dict[str, Any] = Field(default_factory=dict)  # the user's TrainingArguments, to be judged
    source: str = "--baseline"  # where they stand, as errors name it


class ExamineRequest(Value):
    """Asks for the facts of a user's training loop; answered before the first trial."""

    workload: Workload
    facts: ModelFacts
    config: TrainConfig  # the baseline
    other: PositiveInt | None  # another micro-batch that the search may try; None: there is none


Inquiry = DescribeRequest | ExamineRequest


class Description(Value):
    """A child's answer: the facts of a workload."""

    facts: ModelFacts
    lengths: LengthProfile | None = None  # of the real data, tokenized
    notes: tuple[str, ...] = ()  # lines for the user
    own: OwnFound | None = None  # facts of the user's own code


class Refusal(Value):
    """A child's answer to an invalid workload: the user's mistake, in one line."""

    error: str  # name of the class in autotune.errors
    message: str
