"""What a winner has to pass before it is called one, as values: what a trial is asked to do, and what it found.

Three checks are trials of their own, run by the same worker through the same Trainer: a *soak* trains on the longest
batch, evaluates and saves a checkpoint under the memory budget; a *routing run* measures a mixture of experts whose
tokens are shared out unevenly; a *loss run* trains a fixed number of optimizer steps on the same samples from the same
weights, so that two configurations' losses can be compared (`verification.loss_check`).
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, NonNegativeInt, PositiveInt

from autotune.errors import InputError
from autotune.units import show_memory, show_rate
from autotune.value import Value
from autotune.values.budget import Effort

# Passes of a loss run over its samples: what is learnt shows on samples that have been seen before, even random ones,
# and a curve smoothed over one pass holds every sample once.
PASSES = 5
LEAST_LOSS_STEPS = 2 * PASSES

# Steps of each of the three loss runs: too long for an answer within five minutes, little in a search of forty.
DEFAULT_LOSS_STEPS = {Effort.QUICK: 0, Effort.STANDARD: 20, Effort.THOROUGH: 20}


class SoakTask(Value):
    """Evaluate with the first of these batch sizes that fits, and save a checkpoint."""

    kind: Literal["soak"] = "soak"
    eval_batch_sizes: tuple[PositiveInt, ...] = Field(min_length=1, description="in the order of trying")


class LossTask(Value):
    """Train a number of optimizer steps, all randomness of the model switched off, and keep the loss of each."""

    kind: Literal["losses"] = "losses"
    steps: PositiveInt
    pass_steps: PositiveInt = Field(description="steps until the samples come again")
    seed: NonNegativeInt = Field(description="of what is random in training; weights and samples are the workload's")


class RoutingTask(Value):
    """Train and measure as in the search, the tokens shared out unevenly among the experts."""

    kind: Literal["routing"] = "routing"


CheckTask = Annotated[SoakTask | LossTask | RoutingTask, Field(discriminator="kind")]


class Soaked(Value):
    """What a soak found to fit."""

    eval_batch_size: PositiveInt | None = Field(description="None: a Trainer of the user's has nothing to evaluate on")
    checkpoint_bytes: int | None = Field(description="weights and optimizer states on disk; None: not saved")
    not_saved: str | None = Field(default=None, description="why no checkpoint was saved")

    @property
    def arguments(self) -> dict[str, Any]:
        """What it adds to the arguments of TrainingArguments."""
        return {} if self.eval_batch_size is None else {"per_device_eval_batch_size": self.eval_batch_size}

    def __str__(self) -> str:
        batch = "nothing to evaluate on" if self.eval_batch_size is None else f"evaluation batch {self.eval_batch_size}"
        if self.checkpoint_bytes is None:
            return f"{batch}; {self.not_saved}"
        return f"{batch}, checkpoint saved ({show_memory(self.checkpoint_bytes)})"


class Routed(Value):
    """How unevenly a trial's tokens went to the experts of a layer, as a mean over the layers."""

    busiest_share: float = Field(description="of the tokens, what the busiest expert got")
    even_busiest_share: float = Field(description="the same as random weights route them, as in the search")


class SkewedRouting(Value):
    """What a routing run of a configuration measured, beside what the search did with even routing."""

    routed: Routed
    samples_per_second: float
    even_samples_per_second: float
    peak_bytes: int

    def __str__(self) -> str:
        change = self.samples_per_second / self.even_samples_per_second - 1
        shares = self.routed
        return (
            f"{show_rate(self.samples_per_second)} samples/s ({change:+.0%}), peak {show_memory(self.peak_bytes)}; the "
            f"busiest expert gets {shares.busiest_share:.0%} of the tokens, not {shares.even_busiest_share:.0%}"
        )


class LossCurve(Value):
    """The losses of a loss run."""

    losses: tuple[float, ...] = Field(description="of each optimizer step, averaged over its accumulation")
    dropout_spread: float | None = Field(
        description="standard deviation of the loss of one step's samples with dropout at work; None: not looked at"
    )


class LossVerdict(Value):
    """How the losses of a configuration compare with those of the reference."""

    passed: bool
    statement: str = Field(description="what was compared and how it came out, one line")
    difference: float = Field(description="mean distance of the smoothed curves")
    spread: float = Field(description="the same between two runs of the reference")
    progress: float = Field(description="by how much the reference's smoothed loss fell")


def planned_loss_steps(asked: int | None, effort: Effort, *, free_batch: bool, exhaustive: bool) -> int:
    """Return the optimizer steps over which the winner's losses are compared with the baseline's; 0: they aren't.

    Args:
        asked: By the user; None for what the effort stands for.
        effort: Of the search.
        free_batch: Whether the global batch is free.
        exhaustive: Whether all points are measured and none is crowned.

    Raises:
        InputError: They were asked for and can't be compared.
    """
    hindrance = None
    if free_batch:
        hindrance = "with --global-batch any no two configurations take the same steps; name a global batch"
    elif exhaustive:
        hindrance = "--exhaustive crowns no winner; leave one of the two out"
    elif asked and asked < LEAST_LOSS_STEPS:
        hindrance = f"fewer than {LEAST_LOSS_STEPS} steps tell nothing"
    if asked and hindrance:
        raise InputError(f"--check-loss {asked}: {hindrance}")
    if hindrance:
        return 0
    return DEFAULT_LOSS_STEPS[effort] if asked is None else asked
