"""The workload: the training that all trials of a search have in common; and the user's own training code.

Each trial runs the user's code: a loop, a script, or a function that makes a Trainer. Functions are pickled into the
folder `data` of the run directory, from which every trial of the search and of `autotune explain` loads them.
"""

import math
import shlex
from collections.abc import Mapping, Sequence
from pathlib import PurePath
from typing import Any, Literal, NamedTuple, Self

from pydantic import Field, PositiveInt, ValidationError, field_validator

from autotune.errors import InputError, located
from autotune.value import Value
from autotune.values.config import Allowance, Quantization, Scalar, TrainConfig
from autotune.values.model import ModelSpec, Task
from autotune.values.techniques import OwnAdapter

# Files in the folder `data` of the run directory.
STEP_FILE = "own-step.pkl"
CODE_FILE = "own-code.pkl"
LENGTHS_FILE = "own-lengths.npy"  # lengths of the samples in tokens

# Optional argument of the user's function: the micro-batches of an optimizer step.
ACCUMULATION = "accumulation_steps"

# Most micro-batches of a step that isn't run as a whole. Two show the memory of gradients that are held during a
# backward pass, and the time of the second stands for those that a whole step has beyond them. Several devices run a
# third, since they exchange gradients in the last.
FEW_MICRO_STEPS = 2

# The values to try of a knob.
Choices = tuple[Scalar, ...]


class OwnKnob(Value):
    """A knob that autotune doesn't know: an argument of the function that makes a step of one's own."""

    choices: Choices = Field(description="values to try, the baseline's first")
    allowance: Allowance = Field(description="class of a change: how much another value changes of the training")

    def __init__(self, **given: Any) -> None:  # in a user's own program, which is to be told in one line
        try:
            super().__init__(**given)
        except ValidationError as error:
            raise InputError(f"OwnKnob: {located(error)}") from None

    @field_validator("choices", mode="before")
    @classmethod
    def _are_values(cls, choices: Any) -> Any:
        if isinstance(choices, str) or not isinstance(choices, Sequence) or not choices:
            raise ValueError("expected a list of values, the baseline's first")
        for value in choices:
            if not isinstance(value, Scalar) or (isinstance(value, float) and not math.isfinite(value)):
                raise ValueError(f"{value!r}: expected true, false, a finite number, text or None")
        return choices


OwnKnobs = Mapping[str, OwnKnob]  # by the names of the function's arguments


# Arguments that decide on learning alone, not on the time or the memory of a step.
WITHOUT_COST = frozenset(
    {"learning_rate", "weight_decay", "warmup_steps", "warmup_ratio", "lr_scheduler_type", "seed", "data_seed"}
    | {"num_train_epochs", "max_steps", "adam_beta1", "adam_beta2", "adam_epsilon"}
)


class OwnStep(Value):
    """A function that sets up training for a configuration and returns a function of one optimizer step."""

    name: str  # name of the function, as shown to people
    takes_accumulation: bool  # whether the function has an argument `ACCUMULATION`
    # Fields of TrainConfig that the function honours, with values to try (None: the usual); empty: the search space's.
    knobs: dict[str, Choices | None]
    own: dict[str, OwnKnob] = Field(default_factory=dict)  # knobs of its own: further arguments
    directory: str  # working directory that the function expects
    sha256: str = ""  # digest of `STEP_FILE`; a file with another digest is not loaded
    search_path: tuple[str, ...]  # entries of sys.path from which its modules are imported


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
    """Facts of a training, found by running its code up to the first training step."""

    # The code's own values of the TrainingArguments that a search decides.
    arguments: dict[str, Any] = Field(default_factory=dict)
    barred: tuple[Barred, ...] = ()
    weights: str = "float32"  # dtype of most weights that aren't packed or an adapter's
    adapter: OwnAdapter | None = None
    quantization: Quantization | None = None  # of packed weights
    checkpoints: bool = False  # whether the model itself has checkpointing on, which the arguments don't ask for
    reorders: bool = False  # whether trials set the order of the samples
    pads: bool = False  # whether batches are padded to their longest sample
    packs: bool = False  # whether the samples of a batch are one row
    has_rows: bool = False  # whether batches have a row for each sample
    normalizes: bool = False  # whether the loss is averaged over the global batch
    own_loss: bool = False  # whether the Trainer's loss isn't that of a model of transformers or TRL
    not_predicted: str | None = None  # why the cost model makes no predictions
    generates: bool = False  # whether steps begin with samples that the model generates
    # The recipe whose Trainer of TRL's it is.
    recipe: Literal["sft", "dpo", "reward", "kto"] | None = None


# Optimizer steps before `Trainer.train` by which code is taken for a loop of its own, which might go on for hours.
OWN_STEPS = 20


class OwnCode(Traits):
    """A script or a pickled function that makes a Trainer, and what a search may change of its training."""

    kind: Literal["script", "pickle"]
    shown: str  # the code as the user named it
    command: tuple[str, ...] = ()  # script: path or module, followed by its arguments
    is_module: bool = False  # whether the script is a module, as for python -m
    is_loop: bool = False  # whether it trains in a loop of its own, which can be rehearsed but not tuned
    directory: str  # working directory of the code
    sha256: str = ""  # pickled code: digest of `CODE_FILE`; a file with another digest is not loaded
    held: dict[str, Held] = Field(default_factory=dict)  # knobs that can't be changed, by name
    launched: dict[str, Any] | None = None  # arguments that a launcher sets where the code doesn't; None: it is alone
    variables: dict[str, str] = Field(default_factory=dict)  # of its launcher, which a loop of its own may read

    @property
    def name(self) -> str:
        return PurePath(self.command[0]).stem if self.command else self.shown.rpartition(" ")[2]

    @property
    def file(self) -> str:
        """The name of the script's file or module; of pickled code, as the user named it."""
        return PurePath(self.command[0]).name if self.command else self.shown

    @property
    def command_line(self) -> str:
        """The command that runs the code; empty for pickled code."""
        return shlex.join(["python", *(["-m"] if self.is_module else []), *self.command]) if self.command else ""


class OwnFound(Traits):
    """Everything that was found by running the code up to the first training step."""

    spec: ModelSpec
    task: Task
    sequence_length: PositiveInt
    target_length: PositiveInt | None = None
    fixed: dict[str, Any]  # its other TrainingArguments, where they differ from the defaults
    held: dict[str, str]  # knobs that can't be changed, with the reasons


# Number of synthetic samples, used without real data.
SYNTHETIC_SAMPLES = 512

# Upper bound of the sequence length in tokens: the context of Llama 4 Scout, the longest of published weights
# (https://ai.meta.com/blog/llama-4-multimodal-intelligence).
LONGEST_SAMPLE = 10_000_000


RecipeName = Literal["sft", "dpo", "reward", "kto", "grpo", "rloo"]


class RecipeKind(NamedTuple):
    """Needs and steps of a recipe's Trainer in TRL."""

    trainer: str  # class of TRL
    columns: tuple[str, ...]  # of its data, of which the first ones are texts
    task: Task = Task.CAUSAL_LM
    sequences: int = 1  # rows of the forward pass for each sample
    generates: bool = False  # whether it samples completions in each step
    reference: bool = False  # whether a copy of the model is kept as the reference; with an adapter it is its own base
    scorings: int = 0  # forward passes without gradients of each micro-batch, of the policy or the reference
    precomputes: bool = False  # whether those can be run once, before training
    coupled: str | None = None  # why another micro-batch is another training; None: it isn't

    @property
    def config(self) -> str:
        """The class of its arguments."""
        return self.trainer.replace("Trainer", "Config")

    def weighing(self, beta: float | None) -> Self:
        """Return the kind where TRL's argument `beta` is given: what generates has a reference unless that is 0."""
        is_other = self.generates and beta is not None and bool(beta) != self.reference
        return self._replace(reference=bool(beta), scorings=self.scorings + (1 if beta else -1)) if is_other else self


# TRL 1.16, by its defaults: RLOO's beta is 0.05, GRPO's 0. KTO holds each completion against those of its micro-batch
# to estimate the KL divergence (arXiv:2402.01306): one pass more of the policy, and one of the reference.
RECIPES: dict[RecipeName, RecipeKind] = {
    "sft": RecipeKind("SFTTrainer", ("prompt", "completion")),
    "dpo": RecipeKind(
        "DPOTrainer", ("prompt", "chosen", "rejected"), sequences=2, reference=True, scorings=1, precomputes=True
    ),
    "reward": RecipeKind("RewardTrainer", ("chosen", "rejected"), task=Task.SEQUENCE_CLASSIFICATION, sequences=2),
    "kto": RecipeKind(
        "KTOTrainer",
        ("prompt", "completion", "label"),
        reference=True,
        scorings=3,
        precomputes=True,
        coupled="KTO estimates the KL divergence within each micro-batch",
    ),
    "grpo": RecipeKind("GRPOTrainer", ("prompt",), generates=True),
    "rloo": RecipeKind("RLOOTrainer", ("prompt",), reference=True, scorings=2, generates=True),
}


class Recipe(Value):
    """Post-training by one of TRL's Trainers."""

    name: RecipeName
    prompt_length: PositiveInt  # tokens of a prompt
    completion_length: PositiveInt  # tokens of a completion; generated ones all have so many
    generations: PositiveInt = 1  # completions of a prompt
    reward: str | None = None  # user's reward function, as module:function; None: built in
    directory: str | None = None  # folder from which the reward's module is imported

    @property
    def kind(self) -> RecipeKind:
        return RECIPES[self.name]

    def shown(self, samples: int) -> str:
        """Return a step of so many samples in words: '8 prompts x 4 generations a step'."""
        if not self.kind.generates:
            return f"{samples} {'pair' if self.kind.sequences > 1 else 'sample'}{'s' * (samples > 1)} a step"
        prompts = samples // self.generations
        return f"{prompts} prompt{'s' * (prompts > 1)} x {self.generations} generations a step"


class LengthProfile(Value):
    """Lengths of the samples in tokens, after truncation to the sequence length."""

    samples: PositiveInt
    mean: float
    minimum: int
    median: int
    p95: int
    maximum: int
    mean_target: float | None = None  # mean length of the decoder's targets, if any

    @property
    def differ(self) -> bool:
        return self.minimum < self.maximum

    @property
    def shown(self) -> str:
        count = f"{self.samples:,} sample{'s' * (self.samples > 1)}"
        return f"{count} of {self.minimum} to {self.maximum} tokens, {self.mean:.0f} on average"


class Workload(Value):
    """The training of every trial: model, task, data and global batch, held fixed so that throughputs compare."""

    model: ModelSpec
    task: Task
    sequence_length: PositiveInt = Field(description="tokens, or audio frames; longer samples are truncated")
    target_length: PositiveInt | None = Field(default=None, description="decoder tokens, encoder-decoders only")
    images: PositiveInt | None = Field(default=None, description="images of a sample of text; None: no such samples")
    image_size: PositiveInt | None = Field(default=None, description="edge of its images in pixels")
    global_batch_size: PositiveInt | None = Field(description="samples per optimizer step; None: free")
    dataset: str | None = Field(default=None, description="file of real data; None: synthetic samples")
    text_field: str | None = None
    lengths: LengthProfile | None = Field(default=None, description="lengths of the real data's samples")
    seed: int = 42
    fixed_arguments: dict[str, Any] = Field(
        default_factory=dict, description="the user's TrainingArguments that a search leaves as they are"
    )
    own_code: OwnCode | None = Field(default=None, description="the user's code that makes Trainer and model")
    own_step: OwnStep | None = Field(default=None, description="the user's training loop; None: the Trainer's")
    recipe: Recipe | None = Field(default=None, description="post-training by a Trainer of TRL")

    @property
    def is_users_own(self) -> bool:
        """Whether the user's own code or loop trains, whose steps may differ from those of the Trainer."""
        return self.own_code is not None or self.own_step is not None

    def differing(self, other: Self) -> str | None:
        """Return the first trait that makes it another training than `other`, with both values, or None."""
        ours, theirs = self._traits(), other._traits()
        for name in {**ours, **theirs}:
            values = [ours.get(name), theirs.get(name)]
            if values[0] != values[1]:
                shown = ["none" if v is None else getattr(v, "name", getattr(v, "mean", v)) for v in values]
                return f"{name} {shown[0]} and {shown[1]}"
        return None

    def _traits(self) -> dict[str, Any]:
        beside_steps = ("log", "eval_", "save_", "hub_", "push_", "report_to", "load_best", "do_")
        fields = ("task", "sequence_length", "target_length", "global_batch_size", "images", "recipe")
        return {
            "model": self.model.model_copy(update={"reference": "", "path": None}),
            **{name.replace("_", " "): getattr(self, name) for name in fields},
            "image size": self.image_size if self.images else None,  # elsewhere the model's config decides it
            "mean length of the data": self.lengths,
            "loop": "its own" if self.own_step is not None else None,
            **{n: v for n, v in self.fixed_arguments.items() if not (n in WITHOUT_COST or n.startswith(beside_steps))},
        }

    def accumulation_steps(self, config: TrainConfig) -> int:
        """Return micro-batches per optimizer step on one device; ValueError: they don't divide the global batch."""
        if self.global_batch_size is None:
            return 1
        ranks = config.parallelism.data_parallel
        steps, rest = divmod(self.global_batch_size, config.per_device_train_batch_size * ranks)
        if rest or not steps:
            raise ValueError(
                f"a micro-batch of {config.per_device_train_batch_size}{f' on each of {ranks} devices' * (ranks > 1)} "
                f"does not divide the global batch of {self.global_batch_size}"
            )
        return steps

    def samples_per_step(self, config: TrainConfig) -> int:
        """Return the samples of one optimizer step, all devices together."""
        return self.accumulation_steps(config) * config.per_device_train_batch_size * config.parallelism.data_parallel

    @property
    def generates(self) -> bool:
        """Whether steps begin with samples that the model generates."""
        code, recipe = self.own_code, self.recipe
        return (code is not None and code.generates) or (recipe is not None and recipe.kind.generates)

    def warm_up_micro_steps(self, config: TrainConfig) -> int:
        """Return the micro-batches that a trial of whole steps runs in those before the measured ones."""
        # All, where a user's code or several devices may count them, or workers would find time to load ahead.
        is_named = self.own_code is None and self.own_step is None and self.recipe is None
        is_plain = is_named and config.parallelism.is_single and not config.is_balanced
        full = self.accumulation_steps(config)
        return min(full, FEW_MICRO_STEPS) if is_plain and not config.dataloader_num_workers else full

    @property
    def shown_length(self) -> str:
        """The size of a sample in words: 'sequence 512', '3000 frames' or 'images of 224 pixels'."""
        if self.task.takes_audio:
            return f"{self.sequence_length} frames"
        count = "" if self.images is None else f"{self.images} "
        images = f"{count}image{'s' * (self.images != 1)} of {self.image_size} pixels" if self.image_size else ""
        is_told = self.own_code is None or self.sequence_length > 1  # 1: of a code whose batches have no token ids
        text = f"sequence {self.sequence_length}" if self.task.takes_text and is_told else ""
        return " with ".join(filter(None, (text, images)))

    @property
    def tokens_per_sample(self) -> float | None:
        """Mean tokens of a sample, source and target together; None for images, sound, and texts that don't tell."""
        if self.recipe is not None:
            return None if self.dataset is not None else float(self.recipe.kind.sequences * self.sequence_length)
        if self.lengths is not None:
            return self.lengths.mean + (self.lengths.mean_target or 0.0)
        is_told = self.own_code is None or self.sequence_length > 1
        return float(self.sequence_length + (self.target_length or 0)) if self.task.takes_text and is_told else None
