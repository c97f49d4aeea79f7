"""What a search found, as data: saved as JSON and loaded again. What can be done with it: `autotune.tuning_result`."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar, Literal

from pydantic import AliasChoices, Field

from autotune.value import Value, save_value
from autotune.values.checks import LossVerdict, SkewedRouting, Soaked
from autotune.values.config import TrainConfig
from autotune.values.hardware import Hardware
from autotune.values.knob import Allowance
from autotune.values.model import ModelFacts
from autotune.values.problem import Change, Objective, Problem
from autotune.values.time_spent import Spent
from autotune.values.trial import Interval, Measurement
from autotune.values.trial_row import TrialRow
from autotune.values.workload import Workload

SCHEMA_VERSION: Literal[1] = 1


class Contender(Value):
    """A configuration with what was measured of it."""

    config: TrainConfig
    changes: tuple[Change, ...] = Field(description="against the baseline")
    measurement: Measurement | None = Field(description="None: it has never completed a trial")
    trials: tuple[int, ...] = Field(description="numbers of the trials it was measured in")
    confirmed: bool = Field(default=False, description="measured again, in turn with the baseline")

    @property
    def allowance(self) -> Allowance:
        """The class of its deepest change."""
        return max((c.allowance for c in self.changes), key=lambda a: a.rank, default=Allowance.EXACT)


class Speedup(Value):
    """Throughput of the winner over that of the reference, both measured again in turn."""

    ratio: float
    interval: Interval
    reference: str = Field(description="what the winner is compared with")


class Arguments(Value):
    """The exact arguments that the winner was measured with."""

    training_arguments: dict[str, Any]
    model: dict[str, Any]
    quantization: dict[str, Any] | None
    adapter: dict[str, Any] | None


Verdict = Literal["faster", "no clear winner", "baseline did not complete", "unconfirmed"]


class Compilation(Value):
    """What the winner's compiler costs and when it is won back."""

    cold_start_s: float = Field(description="of the first step over the others, with nothing compiled before")
    break_even_steps: int | None = Field(description="optimizer steps until the baseline is overtaken; None: never")


class ResultData(Value):
    """The answer of a search, as data."""

    retired: ClassVar[frozenset[str]] = frozenset({"probed"})

    schema_version: Literal[1] = SCHEMA_VERSION
    autotune_version: str
    verdict: Verdict
    workload: Workload
    facts: ModelFacts
    hardware: Hardware
    memory_bytes: int = Field(
        validation_alias=AliasChoices("memory_bytes", "memory_budget_bytes"),
        description="the memory budget, of each device",
    )
    allowance: Allowance
    baseline: Contender
    baseline_cause: str | None = Field(default=None, description="why the baseline has no measurement")
    best: Contender
    arguments: Arguments
    objective: Objective = Objective()
    compilation: Compilation | None = Field(default=None, description="None: the winner isn't compiled or confirmed")
    soaked: Soaked | None = Field(default=None, description="what the winner has memory for beside training")
    skewed_routing: SkewedRouting | None = Field(default=None, description="of a winner that has experts")
    loss_check: LossVerdict | None = Field(default=None, description="the winner's losses against the baseline's")
    proof_notes: tuple[str, ...] = Field(default=(), description="who failed a check, what was not checked")
    speedup: Speedup | None = Field(description="None: the baseline did not complete, or nothing was measured again")
    kept_because: str | None = Field(
        default=None, description="measurements for which an unconfirmed leader isn't best"
    )
    best_by_allowance: dict[Allowance, Contender] = Field(description="of each class up to the allowed one")
    runners_up: tuple[Contender, ...]
    trials: tuple[TrialRow, ...]
    outshone: str | None = Field(default=None, description="why a faster trial isn't the winner; None: none was")
    notes: tuple[str, ...] = Field(default=(), description="what the user should know, a line each")
    disturbances: tuple[str, ...] = Field(default=(), description="what went on beside the trials, a line each")
    search_time_s: float
    spent: Spent | None = Field(default=None, description="where the time went; None: not recorded then")

    @property
    def problem(self) -> Problem:
        """What the answer is an answer to."""
        return Problem(
            workload=self.workload,
            facts=self.facts,
            hardware=self.hardware,
            memory_bytes=self.memory_bytes,
            allowance=self.allowance,
            baseline=self.baseline.config,
        )

    def __repr__(self) -> str:
        """Return the verdict in a line; `model_dump_json()` has everything."""
        return f"<{type(self).__name__} {self.workload.model.name}: {self.verdict}, {len(self.trials)} trials>"

    def save(self, path: str | Path) -> None:
        """Write the result as JSON.

        Raises:
            OSError: The file can't be written.
        """
        save_value(self, Path(path))
