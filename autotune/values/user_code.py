"""The user's own training code, as values: a loop, a script, or a function that makes a Trainer; and what it is like.

Each trial runs the code. Pickled functions lie in the folder `data` of the search's directory, where every trial of the
search and of `autotune explain` finds them. How they are planned stands in `planning.user_loop` and
`planning.user_trainer`.
"""

from __future__ import annotations

import shlex
from pathlib import PurePath
from typing import Any, Literal

from pydantic import Field, PositiveInt

from autotune.value import Value
from autotune.values.model import ModelSpec, Task

STEP_FILE = "own-step.pkl"

# The argument that tells the function how many micro-batches a step has, if it takes it.
ACCUMULATION = "accumulation_steps"

# What a knob can be set to, as in a search space.
Choices = tuple[bool | int | float | str | None, ...]


class OwnStep(Value):
    """A function that sets up training for a configuration and returns what runs one optimizer step."""

    name: str = Field(description="of the function, for people")
    takes_accumulation: bool = Field(description=f"whether it has an argument {ACCUMULATION}")
    knobs: dict[str, Choices | None] = Field(
        description="fields of TrainConfig that it honours, with their choices (None: the usual); empty: the space's"
    )
    directory: str = Field(description="the working directory that it expects")
    sha256: str = Field(default="", description=f"digest of {STEP_FILE}, in place of which nothing else is loaded")
    search_path: tuple[str, ...] = Field(description="where its modules are imported from")


CODE_FILE = "own-code.pkl"
LENGTHS_FILE = "own-lengths.npy"  # of the samples, beside it

Scalar = bool | int | float | str | None


class Held(Value):
    """A knob that stays at the baseline's value."""

    value: Scalar
    reason: str


class Barred(Value):
    """A value that a knob can't have."""

    knob: str
    value: Scalar
    reason: str


class OwnCode(Value):
    """The code, and what a search may do with it."""

    kind: Literal["script", "pickle"]
    shown: str = Field(description="what the user calls it")
    command: tuple[str, ...] = Field(default=(), description="of a script: its path, or its module, and its arguments")
    is_module: bool = Field(default=False, description="the script was named as python -m does")
    directory: str = Field(description="in which it runs")
    sha256: str = Field(
        default="", description=f"of pickled code: the digest of {CODE_FILE}, which nothing else is for"
    )
    held: dict[str, Held] = Field(default_factory=dict, description="knobs that can't be changed, by name")
    barred: tuple[Barred, ...] = ()
    arguments: dict[str, Any] = Field(default_factory=dict, description="its own, of those that a search decides")
    weights: str = Field(default="float32", description="the dtype of most weights that it makes")
    reorders: bool = Field(default=False, description="trials put its samples into an order of theirs")
    pads: bool = Field(default=False, description="batches are padded to their longest sample")
    normalizes: bool = Field(default=False, description="its model's loss is made that of the global batch")
    not_predicted: str | None = Field(default=None, description="why the cost model knows nothing of it")

    @property
    def name(self) -> str:
        """What a run directory is called by."""
        return PurePath(self.command[0]).stem if self.command else self.shown.rpartition(" ")[2]

    @property
    def command_line(self) -> str:
        """How it is started by hand; empty for pickled code."""
        return shlex.join(["python", *(["-m"] if self.is_module else []), *self.command]) if self.command else ""


class OwnFound(Value):
    """What running the code until it trains has told."""

    spec: ModelSpec
    task: Task
    sequence_length: PositiveInt
    target_length: PositiveInt | None = None
    arguments: dict[str, Any] = Field(description="its TrainingArguments that a search decides, as they stand")
    fixed: dict[str, Any] = Field(description="the others, where they differ from the defaults")
    held: dict[str, str] = Field(description="knobs that can't be changed, with the reasons")
    barred: tuple[Barred, ...] = ()
    weights: str = Field(description="the dtype of most weights")
    reorders: bool
    pads: bool
    normalizes: bool
    not_predicted: str | None = None
