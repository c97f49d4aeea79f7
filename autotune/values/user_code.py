"""The user's own training code, as values: a loop, a script, or a function that makes a Trainer.

Each trial runs the code. Functions are pickled into the folder `data` of the run directory, from which every trial of
the search and of `autotune explain` loads them. `planning.user_loop` and `planning.user_trainer` plan such searches.
"""

from __future__ import annotations

import shlex
from pathlib import PurePath
from typing import Any, Literal

from pydantic import Field, PositiveInt

from autotune.value import Value
from autotune.values.adapters import OwnAdapter
from autotune.values.config import Quantization
from autotune.values.model import ModelSpec, Task

# Files in the folder `data` of the run directory.
STEP_FILE = "own-step.pkl"
CODE_FILE = "own-code.pkl"
LENGTHS_FILE = "own-lengths.npy"  # lengths of the samples in tokens

# Optional argument of the user's function: the micro-batches of an optimizer step.
ACCUMULATION = "accumulation_steps"

# A value of a knob, and the values to try, as in a search space.
Scalar = bool | int | float | str | None
Choices = tuple[Scalar, ...]


class OwnStep(Value):
    """A function that sets up training for a configuration and returns what runs one optimizer step."""

    name: str = Field(description="name of the function, as shown to people")
    takes_accumulation: bool = Field(description=f"whether the function has an argument {ACCUMULATION}")
    knobs: dict[str, Choices | None] = Field(
        description="fields of TrainConfig that the function honours, with the values to try (None: the usual ones); "
        "empty: those of the search space"
    )
    directory: str = Field(description="working directory that the function expects")
    sha256: str = Field(default="", description=f"digest of {STEP_FILE}; a file with another digest is not loaded")
    search_path: tuple[str, ...] = Field(description="entries of sys.path from which its modules are imported")


class Held(Value):
    """Why a knob stays at the baseline's value."""

    value: Scalar
    reason: str


class Barred(Value):
    """A value that a knob can't have."""

    knob: str
    value: Scalar
    reason: str


class Traits(Value):
    """What running the code up to its first training step says of its training."""

    arguments: dict[str, Any] = Field(
        default_factory=dict, description="the code's own values of the TrainingArguments that a search decides"
    )
    barred: tuple[Barred, ...] = ()
    weights: str = Field(default="float32", description="dtype of most weights that aren't packed or an adapter's")
    adapter: OwnAdapter | None = Field(default=None, exclude_if=lambda adapter: adapter is None)
    quantization: Quantization | None = Field(
        default=None, exclude_if=lambda kind: kind is None, description="format of the packed weights"
    )
    checkpoints: bool = Field(
        default=False, description="whether the model itself has checkpointing on, which the arguments don't ask for"
    )
    reorders: bool = Field(default=False, description="whether trials set the order of the samples")
    pads: bool = Field(default=False, description="whether batches are padded to their longest sample")
    has_rows: bool = Field(default=False, description="whether batches have a row for each sample")
    normalizes: bool = Field(default=False, description="whether the loss is averaged over the global batch")
    not_predicted: str | None = Field(default=None, description="why the cost model makes no predictions")
    generates: bool = Field(default=False, description="whether steps begin with samples that the model generates")
    recipe: Literal["sft", "dpo", "reward", "kto"] | None = Field(
        default=None, exclude_if=lambda name: name is None, description="whose Trainer of TRL's it is"
    )


class OwnCode(Traits):
    """A script or a pickled function that makes a Trainer, and what a search may change of its training."""

    kind: Literal["script", "pickle"]
    shown: str = Field(description="the code as the user named it")
    command: tuple[str, ...] = Field(default=(), description="script: path or module, followed by its arguments")
    is_module: bool = Field(default=False, description="whether the script is a module, as for python -m")
    directory: str = Field(description="working directory of the code")
    sha256: str = Field(
        default="", description=f"pickled code: digest of {CODE_FILE}; a file with another digest is not loaded"
    )
    held: dict[str, Held] = Field(default_factory=dict, description="knobs that can't be changed, by name")

    @property
    def name(self) -> str:
        """The name from which the run directory's name is made."""
        return PurePath(self.command[0]).stem if self.command else self.shown.rpartition(" ")[2]

    @property
    def command_line(self) -> str:
        """The command that runs the code; empty for pickled code."""
        return shlex.join(["python", *(["-m"] if self.is_module else []), *self.command]) if self.command else ""


class OwnFound(Traits):
    """What was found out by running the code up to the first training step."""

    spec: ModelSpec
    task: Task
    sequence_length: PositiveInt
    target_length: PositiveInt | None = None
    fixed: dict[str, Any] = Field(description="its other TrainingArguments, where they differ from the defaults")
    held: dict[str, str] = Field(description="knobs that can't be changed, with the reasons")
