"""Checks that a winner has to pass: their tasks for a trial, and their results.

Each check is a trial of its own, run by the same worker through the same Trainer. A *soak* trains on the longest batch,
evaluates and saves a checkpoint under the memory budget. A *loss run* trains a fixed number of optimizer steps from the
same weights on the same samples, so that the losses of two configurations can be compared (`verification.loss_check`).
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, NonNegativeInt, PositiveInt

from autotune.units import show_memory
from autotune.value import Value
from autotune.values.budget import Effort

# Passes of a loss run over its samples: the loss falls on samples that were seen before, even on random ones, and each
# mean of a curve smoothed over one pass contains every sample once.
PASSES = 5
LEAST_LOSS_STEPS = 2 * PASSES

# Random weights route tokens evenly to experts, trained ones do not. With a share of 0.38 for the busiest of 8 experts
# in place of 0.2, Mixtral, OLMoE and Qwen2-MoE took 0 to 2.7 % more memory on a CPU.
UNEVEN_ROUTING = 0.03

# Optimizer steps of each of the three loss runs: too many for a search of five minutes, few for one of forty.
DEFAULT_LOSS_STEPS = {Effort.QUICK: 0, Effort.STANDARD: 20, Effort.THOROUGH: 20}


class SoakTask(Value):
    """Evaluate with the first of these batch sizes that fits, and save a checkpoint."""

    kind: Literal["soak"] = "soak"
    eval_batch_sizes: tuple[PositiveInt, ...] = Field(min_length=1, description="in the order of trying")


class LossTask(Value):
    """Train a number of optimizer steps with the model's randomness switched off, and record the loss of each."""

    kind: Literal["losses"] = "losses"
    steps: PositiveInt
    pass_steps: PositiveInt = Field(description="steps until the samples come again")
    seed: NonNegativeInt = Field(description="of randomness in training; weights and samples have the workload's seed")


CheckTask = Annotated[SoakTask | LossTask, Field(discriminator="kind")]


class Soaked(Value):
    """What fitted the memory budget in a soak."""

    eval_batch_size: PositiveInt | None = Field(description="None: there was no evaluation")
    not_evaluated: str | None = Field(default=None, description="why; None: the user's Trainer has no evaluation data")
    checkpoint_bytes: int | None = Field(description="weights and optimizer states on disk; None: not saved")
    not_saved: str | None = Field(default=None, description="why no checkpoint was saved")
    eval_accumulation_steps: PositiveInt | None = Field(
        default=None, description="batches after which predictions are moved to the host; None: at the end"
    )
    predicted_samples: PositiveInt | None = Field(
        default=None, description="samples whose predictions were kept for compute_metrics; None: none were"
    )
    predictions_bytes: int | None = Field(default=None, description="size of those predictions on the host")
    peak_bytes: int | None = Field(default=None, description="peak of training, saving and evaluating")
    metrics_failed: str | None = Field(
        default=None, description="why predictions could not be kept, or compute_metrics failed on them"
    )

    @property
    def arguments(self) -> dict[str, Any]:
        """The TrainingArguments that a soak adds to the winner's."""
        own = {
            "per_device_eval_batch_size": self.eval_batch_size,
            "eval_accumulation_steps": self.eval_accumulation_steps,
        }
        return {name: value for name, value in own.items() if value is not None}

    def __str__(self) -> str:
        batch = self.not_evaluated or "nothing to evaluate on"
        if self.eval_batch_size is not None:
            batch = f"evaluation batch {self.eval_batch_size}"
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

    losses: tuple[float, ...] = Field(description="loss of each optimizer step, averaged over its micro-batches")
    dropout_spread: float | None = Field(
        description="standard deviation of the loss of one step's samples under dropout; None: not measured"
    )


class LossVerdict(Value):
    """How the losses of a configuration compare with those of the reference."""

    passed: bool
    statement: str = Field(description="what was compared and the outcome, one line")
    difference: float = Field(description="mean absolute difference of the smoothed curves")
    spread: float = Field(description="mean absolute difference between two runs of the reference")
    progress: float = Field(description="decrease of the reference's smoothed loss")
