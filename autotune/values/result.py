"""The result of a search and the data of a report on it: trials as flat rows, contributions of the knobs; as JSON.

`autotune.tuning_result` adds the uses of a result; `verification.attribution` finds the contributions,
`output.gather` makes the report of a run.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, PositiveFloat

from autotune.errors import writing
from autotune.value import Value, save_bytes
from autotune.values.budget import LossVerdict, Soaked
from autotune.values.config import Allowance, TrainConfig
from autotune.values.estimate import MemoryBreakdown
from autotune.values.hardware import Hardware
from autotune.values.model import ModelFacts
from autotune.values.problem import Change, Objective, Problem
from autotune.values.statistics import Speedup
from autotune.values.time_spent import Spent, ends_s
from autotune.values.trial import Alive, Interval, Measurement, Prediction, Purpose, StepParts, TrialResult, TrialStatus
from autotune.values.workload import Workload

SCHEMA_VERSION: Literal[1] = 1
ANSWER_FILE = "best-config.json"  # of a run directory


class StepTime(Value):
    """Where the time of a measured optimizer step goes."""

    seconds: float
    shares: StepParts = Field(description="by what it is spent on; they add up to 1")
    is_profiled: bool = Field(description="whether the shares were measured, by a profile; else predicted")

    @property
    def source(self) -> str:
        return "measured by a profile" if self.is_profiled else "predicted"


class Contender(Value):
    """A configuration with its measurement."""

    config: TrainConfig
    changes: tuple[Change, ...]  # against the baseline
    measurement: Measurement | None  # None: no trial of it completed
    trials: tuple[int, ...]  # numbers of the trials it was measured in
    confirmed: bool = False  # whether it was measured again, in turn with the baseline
    speedup: Speedup | None = None  # over the baseline; None: not measured in turn with it
    # Factor on the rate of one that was measured once, to compare it with those measured again: the machine's speed has
    # changed since, and the fastest of many is likely to have been lucky.
    correction: PositiveFloat = 1.0
    tokens_per_second: float | None = Field(default=None, description="None: it isn't measured, or samples have none")
    mfu: float | None = Field(default=None, description="model FLOP utilisation at the measured rate, if known")
    step: StepTime | None = Field(default=None, description="where a step's time goes; None: not predicted either")

    @property
    def allowance(self) -> Allowance:
        return Allowance.deepest(c.allowance for c in self.changes)

    def rate(self, objective: Objective) -> float:
        """Return the samples per second by the objective, corrected; 0 without a measurement."""
        return objective.rate(self.measurement) * self.correction if self.measurement is not None else 0.0


class Arguments(Value):
    """The exact arguments that the winner was measured with."""

    training_arguments: dict[str, Any]
    model: dict[str, Any]
    quantization: dict[str, Any] | None
    adapter: dict[str, Any] | None


Verdict = Literal["faster", "no_clear_winner", "baseline_failed", "unconfirmed", "undecided"]


class Compilation(Value):
    """Cost of compiling the winner, and when it pays off."""

    cold_start_s: float  # extra seconds of the slowest first step; without a run's length, caches may have helped it
    break_even_steps: int | None  # optimizer steps until it overtakes the baseline; None: never


class TrialRow(Value):
    """One trial, or a configuration that was refused without one."""

    number: int | None  # None: refused without a trial
    purpose: Purpose | None = None  # None: refused without a trial
    config: TrainConfig
    changes: tuple[Change, ...] | None = None  # against the baseline; None: not computed
    status: TrialStatus
    samples_per_second: float | None = None
    interval: Interval | None = None  # of the samples per second
    config_samples_per_second: float | None = None  # of its configuration: by the finals, or corrected to compare
    peak_bytes: int | None = None  # peak memory
    prediction: Prediction | None = None  # made before the trial ran
    duration_s: float | None = None
    ended_s: float | None = None  # seconds in which trials had run when this one ended
    cause: str | None = None  # why it has no measurement, or was refused

    @classmethod
    def of(cls, trial: TrialResult, ended_s: float | None = None) -> "TrialRow":
        measured, memory = trial.measurement, trial.outcome.memory
        return cls(
            number=trial.request.number,
            purpose=trial.request.purpose,
            config=trial.request.config,
            status=trial.status,
            samples_per_second=measured.samples_per_second if measured else None,
            interval=measured.shown_interval if measured else None,
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


def rows_of(trials: Sequence[TrialResult]) -> list[TrialRow]:
    return [TrialRow.of(trial, ended_s) for trial, ended_s in zip(trials, ends_s(trials), strict=True)]


class ResultData(Value):
    """The result of a search, as data."""

    schema_version: Literal[1] = SCHEMA_VERSION
    autotune_version: str
    verdict: Verdict
    workload: Workload
    facts: ModelFacts
    hardware: Hardware
    # The memory budget, of each device.
    memory_bytes: int
    allowance: Allowance
    baseline: Contender
    baseline_cause: str | None = Field(default=None, description="why the baseline has no measurement")
    best: Contender
    arguments: Arguments
    objective: Objective = Objective()
    compilation: Compilation | None = Field(default=None, description="None: the winner isn't compiled or confirmed")
    soaked: Soaked | None = Field(default=None, description="result of the winner's soak")
    loss_check: LossVerdict | None = Field(default=None, description="the winner's losses against the baseline's")
    proof_notes: tuple[str, ...] = Field(default=(), description="failed checks, and checks that were left out")
    speedup: Speedup | None = Field(description="None: the baseline did not complete, or nothing was measured again")
    # If the baseline is kept: speedup of the finalist whose interval has the highest upper end.
    challenger: Speedup | None = None
    kept_because: str | None = Field(default=None, description="why the baseline is kept and not an unconfirmed leader")
    others_share: float | None = None  # with the verdict "undecided": share of the machine that other processes took
    best_by_allowance: dict[Allowance, Contender]  # fastest configuration of each class up to the allowed one
    runners_up: tuple[Contender, ...]
    trials: tuple[TrialRow, ...]
    outshone: str | None = Field(default=None, description="why a faster trial isn't the winner; None: there was none")
    untried: str | None = Field(default=None, description="what the search left untried, and why; None: nothing")
    notes: tuple[str, ...] = Field(default=(), description="lines for the user")
    disturbances: tuple[str, ...] = Field(default=(), description="disturbances of the trials, a line each")
    search_time_s: float
    spent: Spent | None = Field(default=None, description="where the time went; None: not recorded")

    @property
    def sides(self) -> dict[str, Contender]:
        """The baseline, and the winner if it is another configuration."""
        others = {} if self.best.config == self.baseline.config else {"winner": self.best}
        return {"baseline": self.baseline, **others}

    @property
    def steps(self) -> dict[str, StepTime]:
        """Where a step's time goes, of the baseline and the winner, as far as it is known."""
        return {side: contender.step for side, contender in self.sides.items() if contender.step is not None}

    def __repr__(self) -> str:
        """Return model, verdict and number of trials; `model_dump_json()` has everything."""
        return f"<{type(self).__name__} {self.workload.model.name}: {self.verdict}, {len(self.trials)} trials>"

    def save(self, path: str | Path) -> None:
        """Write the result as JSON; InputError: `path` can't be written."""
        with writing(str(path)):
            save_bytes((self.model_dump_json(indent=2) + "\n").encode(), Path(path))


# in turn: measured in the same rounds as the winner; once: by one trial of the search; fails: without the knob the
# winner doesn't run; slow: without it a trial exceeds its time limit.
Basis = Literal["in turn", "once", "fails", "slow", "unknown"]


class Contribution(Value):
    """Effect of putting a knob of the winner, with the knobs that depend on it, back to the baseline's value."""

    changes: tuple[Change, ...] = Field(min_length=1)  # the knob, then those that depend on it
    config: TrainConfig | None  # the winner without the knob; None: no such configuration exists
    basis: Basis
    ratio: float | None = None  # throughput with it over throughput without it
    interval: Interval | None = None  # of the ratio
    samples_per_second: float | None = None  # without the knob; None: unknown
    trials: tuple[str, ...] = ()  # trials that the ratio was computed from
    cause: str | None = None  # why there is no ratio

    @property
    def is_settled(self) -> bool:
        """Whether further measurements would change nothing."""
        return self.basis in ("in turn", "fails", "slow")


class Explanation(Value):
    """The contribution of each knob of a winner."""

    winner: TrainConfig
    winner_samples_per_second: float | None
    baseline_samples_per_second: float | None  # None: the baseline did not complete
    total: float | None  # the winner's throughput over the baseline's
    total_interval: Interval | None = None  # interval of the total, if both were measured again
    contributions: tuple[Contribution, ...]  # in descending order of the ratio, those without one last
    steps: dict[str, StepTime] = Field(default={}, description="of the baseline and the winner, as far as known")

    @property
    def is_settled(self) -> bool:
        return all(c.is_settled for c in self.contributions)


class Breakdown(Value):
    """Predicted memory of a configuration by component, beside what was measured."""

    name: str
    predicted: MemoryBreakdown
    measured_bytes: int | None
    alive: tuple[Alive, ...] = ()  # at the predicted peak, most first


class Compared(Value):
    """One configuration that was measured twice: for two answers, or in two environments."""

    config: TrainConfig
    samples_per_second: tuple[float, float]
    peak_bytes: tuple[int, int]  # of memory; 0: unknown
    ratio: float  # of throughput, the second over the first
    interval: Interval
    more_s: StepParts  # seconds of a step by which each part takes longer in the second; empty: unknown


class Comparison(Value):
    """Two answers or environments, by the same configuration and by what differs between them."""

    names: tuple[str, str] = ("the first", "the second")
    compared: tuple[Compared, ...]  # the first answer's winner and the baseline, as far as both have them
    changed: dict[str, tuple[str, str]]  # what differs between device, driver and versions


def differing_versions(one: Mapping[str, str], other: Mapping[str, str]) -> dict[str, tuple[str, str]]:
    sides = {name: (one.get(name, "none"), other.get(name, "none")) for name in sorted(one.keys() | other.keys())}
    return {name: versions for name, versions in sides.items() if versions[0] != versions[1]}


class RunReport(Problem):
    """A problem, and the state and result of its search."""

    run_directory: str
    written: str  # time of the report, UTC, ISO 8601
    autotune_version: str
    is_running: bool  # whether `find` or `explain` is running in the directory
    command: str | None  # command line of the search; None: not recorded
    result: ResultData | None  # None: no trial has completed
    nothing: str | None = None  # why there is no result
    explanation: Explanation | None = None  # None: no result, or the baseline is the winner
    trials: tuple[TrialRow, ...]
    unfinished: int = 0  # number of trials that began and have no result
    breakdowns: tuple[Breakdown, ...] = ()
    no_breakdown: str | None = None  # why there are no breakdowns
    spent: Spent
