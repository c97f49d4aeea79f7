"""The limits of a search and of its trials, and the tasks and results of trials beside timing steps.

Each task is a trial of its own, run by the same worker through the same Trainer. A winner has to pass two: a *soak*
trains on the longest batch, evaluates and saves a checkpoint under the memory budget; a *loss run* trains a fixed
number of optimizer steps from the same weights on the same samples, so that the losses of two configurations can be
compared (`verification.loss_check`). A *profile* records what the device does in a step.
"""

from enum import StrEnum
from typing import Annotated, Any, Literal

from pydantic import Field, NonNegativeInt, PositiveInt

from autotune.units import show_memory
from autotune.value import Value


class Effort(StrEnum):
    """How long a search may take, and how precisely it measures."""

    QUICK = "quick"
    STANDARD = "standard"
    THOROUGH = "thorough"

    @property
    def loss_steps(self) -> int:
        """Optimizer steps of each of three loss runs: too many for a search of five minutes, few for one of forty."""
        return 0 if self is Effort.QUICK else 20


class Budget(Value):
    """Limits of a search and of each of its trials."""

    effort: Effort
    max_trials: PositiveInt = Field(description="trials of the search, finalists not counted")
    max_time_s: float = Field(gt=0, description="whole search, finalists included")
    trial_timeout_s: float = Field(gt=0, description="one trial from launch to exit")
    discarded_steps: PositiveInt = Field(description="optimizer steps before the clock starts, at the least")
    discarded_s: float = Field(ge=0, description="seconds of training before the clock starts, at the least")
    measure_steps: int = Field(ge=2, description="measured optimizer steps at the most")
    measure_time_s: float = Field(gt=0, description="measuring ends after the step that reaches this")
    relative_interval: float = Field(gt=0, description="measuring ends when the 95 % half-width is below this")
    finalists: PositiveInt = Field(description="configurations measured again beside the baseline")
    final_rounds: PositiveInt = Field(description="times each finalist and the baseline are measured, in turn")

    @property
    def when_measured_again(self) -> dict[str, float]:
        """Limits for measuring a configuration again: four times the steps, half the interval."""
        # `measure_time_s` stays: configurations with short steps, which noise disturbs most, are measured longer.
        return {"measure_steps": 4 * self.measure_steps, "relative_interval": self.relative_interval / 2}

    @property
    def when_in_turn(self) -> dict[str, float]:
        """Limits for measuring in turn with others: four times as long, in as many (short) steps as that takes."""
        return {"measure_steps": 4000, "measure_time_s": 4 * self.measure_time_s}

    def limited(self, *, max_trials: int | None = None, max_time_s: float | None = None) -> "Budget":
        """Return the budget with these limits of the search; a trial may take no longer than the search."""
        given: dict[str, float] = {} if max_trials is None else {"max_trials": max_trials}
        if max_time_s is not None:
            usual_s = Budget.of(self.effort).trial_timeout_s
            given |= {"max_time_s": max_time_s, "trial_timeout_s": min(usual_s, max_time_s)}
        return Budget.model_validate({**self.model_dump(), **given})

    @classmethod
    def of(cls, effort: Effort) -> "Budget":
        return _BUDGETS[effort]


_BUDGETS = {
    budget.effort: budget
    for budget in (
        # an answer within five minutes on two CPU cores
        Budget(
            effort=Effort.QUICK, max_trials=12, max_time_s=285, trial_timeout_s=120, discarded_steps=1, discarded_s=0.5,
            measure_steps=12, measure_time_s=8, relative_interval=0.04, finalists=3, final_rounds=2,
        ),
        Budget(
            effort=Effort.STANDARD, max_trials=40, max_time_s=2400, trial_timeout_s=300, discarded_steps=2,
            discarded_s=2, measure_steps=40, measure_time_s=20, relative_interval=0.02, finalists=3, final_rounds=2,
        ),
        Budget(
            effort=Effort.THOROUGH, max_trials=150, max_time_s=10800, trial_timeout_s=900, discarded_steps=3,
            discarded_s=3, measure_steps=100, measure_time_s=45, relative_interval=0.01, finalists=3, final_rounds=3,
        ),
    )
}  # fmt: skip


# Passes of a loss run over its samples: the loss falls on samples that were seen before, even on random ones, and each
# mean of a curve smoothed over one pass contains every sample once.
PASSES = 5
LEAST_LOSS_STEPS = 2 * PASSES

# Random weights route tokens evenly to experts, trained ones do not. With a share of 0.38 for the busiest of 8 experts
# in place of 0.2, Mixtral, OLMoE and Qwen2-MoE took 0 to 2.7 % more memory on a CPU.
UNEVEN_ROUTING = 0.03


class SoakTask(Value):
    """Evaluate with the first of these batch sizes that fits, and save a checkpoint."""

    kind: Literal["soak"] = "soak"
    eval_batch_sizes: tuple[PositiveInt, ...] = Field(min_length=1)  # in the order of trying
    in_parts: bool = False  # whether to tell by phase and module what the peak is made of (CUDA)
    assumed: int | None = None  # what a rehearsal reads unknown whole numbers as; None: they end it
    micro_steps: PositiveInt | None = None  # most that compute in each step, the last among them; None: all


class LossTask(Value):
    """Train a number of optimizer steps with the model's randomness switched off, and record the loss of each."""

    kind: Literal["losses"] = "losses"
    steps: PositiveInt
    pass_steps: PositiveInt  # steps until the samples come again
    seed: NonNegativeInt  # of randomness in training; weights and samples have the workload's seed

    @classmethod
    def of(cls, steps: int, seed: int) -> "LossTask":
        return cls(steps=steps, pass_steps=max(1, steps // PASSES), seed=seed)


class ProfileTask(Value):
    """Record what the device does in two steps."""

    kind: Literal["profile"] = "profile"


CheckTask = Annotated[SoakTask | LossTask | ProfileTask, Field(discriminator="kind")]


class Soaked(Value):
    """The result of a soak: the evaluation batch and checkpoint that fitted the memory budget."""

    eval_batch_size: PositiveInt | None  # None: there was no evaluation
    not_evaluated: str | None = None  # what of the evaluation data, and why; None: all, or there are none
    checkpoint_bytes: int | None  # weights and optimizer states on disk; None: not saved
    not_saved: str | None = None  # why no checkpoint was saved
    eval_accumulation_steps: PositiveInt | None = None  # batches until predictions go to the host; None: at the end
    predicted_samples: PositiveInt | None = None  # whose predictions were kept for compute_metrics; None: none were
    predictions_bytes: int | None = None  # size of those predictions on the host
    peak_bytes: int | None = None  # peak of training, saving and evaluating
    metrics_failed: str | None = None  # why predictions could not be kept, or compute_metrics failed on them

    @property
    def arguments(self) -> dict[str, Any]:
        """The TrainingArguments that a soak adds to the winner's."""
        names = {"eval_batch_size": "per_device_eval_batch_size", "eval_accumulation_steps": "eval_accumulation_steps"}
        return {argument: value for name, argument in names.items() if (value := getattr(self, name)) is not None}

    def __str__(self) -> str:
        batch = self.not_evaluated or "nothing to evaluate on"
        if self.eval_batch_size is not None:
            batch = "; ".join(filter(None, (self.not_evaluated, f"evaluation batch {self.eval_batch_size}")))
        if self.predicted_samples is not None:
            batch += f", predictions of {self.predicted_samples:,} samples kept"
            batch += "" if self.predictions_bytes is None else f" ({show_memory(self.predictions_bytes)})"
        if self.eval_accumulation_steps is not None:
            batch += f", eval_accumulation_steps {self.eval_accumulation_steps}"
        peak = "" if self.peak_bytes is None else f", peak memory {show_memory(self.peak_bytes)}"
        if self.checkpoint_bytes is None:
            return f"{batch}{peak}; {self.not_saved}"
        return f"{batch}, checkpoint saved ({show_memory(self.checkpoint_bytes)}){peak}"


class LossCurve(Value):
    """The losses of a loss run."""

    # Loss of each optimizer step, averaged over its micro-batches.
    losses: tuple[Annotated[float, Field(allow_inf_nan=True)], ...]
    dropout_spread: float | None  # standard deviation of one step's loss under dropout; None: not measured


class LossVerdict(Value):
    """How the losses of a configuration compare with those of the reference."""

    passed: bool
    statement: str  # the comparison and its outcome, one line
