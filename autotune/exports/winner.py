"""A target of an export gets a :class:`Winner`, the answer, and returns a :class:`Draft`, the files.

Everything is taken from the arguments that were measured. Where the user said nothing, `TrainingArguments` decided, and
its defaults are written out, since other tools have others.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import re
import shlex
from collections.abc import Collection
from pathlib import PurePath
from typing import TYPE_CHECKING, Any, NamedTuple

from autotune.errors import InputError
from autotune.training.adapters import BITFIT
from autotune.units import show_rate
from autotune.values.config import KNOBS, TrainConfig
from autotune.values.model import Task
from autotune.values.workload import Workload

if TYPE_CHECKING:
    from autotune.values.result import ResultData

# Defaults of TrainingArguments (transformers 5.17 to 5.23) for the hyperparameters.
DEFAULTS: dict[str, Any] = {
    "learning_rate": 5e-5,
    "lr_scheduler_type": "linear",
    "warmup_steps": 0,
    "weight_decay": 0.0,
    "adam_beta1": 0.9,
    "adam_beta2": 0.999,
    "adam_epsilon": 1e-8,
    "max_grad_norm": 1.0,
}

# The user's arguments that a Trainer refuses without samples to evaluate on, which no export has.
EVALUATING = frozenset({"eval_strategy", "eval_on_start", "do_eval", "do_predict", "load_best_model_at_end"})


class Draft(NamedTuple):
    """The file of one target, before it is written."""

    files: dict[str, str]  # one, by its name
    launch: tuple[str, ...] = ()  # command lines, the preferred one first
    lost: tuple[str, ...] = ()  # what the target can't express, a line each

    def placed(self, path: PurePath) -> Draft:
        """Return the draft under the path that its file is written to.

        Command lines then name its path; the text of the file, where it says how it is run, its name.
        """
        ((name, text),) = self.files.items()
        # A name that would have to be escaped within a script's docstring or a comment is left out of it.
        if path.name.isprintable() and not set(path.name) & set('\\"'):
            text = _renamed(text, name, shlex.quote(path.name))
        return self._replace(
            files={path.name: text}, launch=tuple(_renamed(line, name, shlex.quote(str(path))) for line in self.launch)
        )


def _renamed(text: str, name: str, other: str) -> str:
    return re.sub(rf"(?<![\w./-]){re.escape(name)}(?![\w/-])", lambda _: other, text)


@dataclasses.dataclass(frozen=True)
class Winner:
    """The answer of a search, with what several targets need to know of it."""

    result: ResultData

    @property
    def config(self) -> TrainConfig:
        """The configuration that won."""
        return self.result.best.config

    @property
    def workload(self) -> Workload:
        """Model, task, data and global batch."""
        return self.result.workload

    @property
    def arguments(self) -> dict[str, Any]:
        """The measured TrainingArguments."""
        return self.result.arguments.training_arguments

    @property
    def user_arguments(self) -> dict[str, Any]:
        """The user's own TrainingArguments, with their values in the answer."""
        return {name: self.arguments.get(name, value) for name, value in self.workload.fixed_arguments.items()}

    @property
    def samples_per_step(self) -> int:
        """Samples of a step on all devices together."""
        return self.workload.samples_per_step(self.config)

    @property
    def reference(self) -> str:
        """The name or path by which `from_pretrained` finds the model."""
        spec = self.workload.model
        return spec.path if spec.source == "directory" and spec.path is not None else spec.name

    @property
    def measured(self) -> float | None:
        """Samples per second; None where nothing was measured."""
        measurement = self.result.best.measurement
        return measurement.samples_per_second if measurement is not None else None

    @property
    def promise(self) -> str:
        """The measured throughput and the device, in words."""
        rate = f"{show_rate(self.measured)} samples/s" if self.measured is not None else "not measured"
        versions = self.result.hardware.versions
        found = ", ".join(f"{name} {versions[name]}" for name in ("torch", "transformers") if name in versions)
        devices = f"{self.config.parallelism.world_size} x " if self.config.parallelism.world_size > 1 else ""
        return f"{rate} on {devices}{self.result.hardware.name} ({found or 'unknown versions'})"

    @property
    def shifts_labels(self) -> bool:
        """Whether the loss leaves out the first label of each row.

        Adapters that put tokens with ignored labels before the sample leave something that predicts it.
        """
        adapter = self.config.adapter
        causal = self.workload.task in (Task.CAUSAL_LM, Task.IMAGE_TEXT_TO_TEXT)
        return causal and (adapter is None or adapter.kind not in ("prompt", "p-tuning"))

    @property
    def sums_its_loss(self) -> bool:
        """Whether the loss of a micro-batch is a sum, so that those of a step simply add up."""
        reduction = self.workload.model.config.get("ctc_loss_reduction", "sum")
        return self.workload.task is Task.SPEECH_CTC and reduction == "sum"

    @property
    def peft_arguments(self) -> dict[str, Any] | None:
        """Arguments of peft's config; None where all weights are trained, or biases alone."""
        return None if self.trains_biases else self.result.arguments.adapter

    @property
    def trains_biases(self) -> bool:
        """Whether BitFit won, which peft doesn't have."""
        return (self.result.arguments.adapter or {}).get("peft_type") == BITFIT

    def hyperparameter(self, name: str) -> Any:
        """Return a hyperparameter of TrainingArguments: the user's, or the default.

        Raises:
            InputError: The user's is of another kind than the default.
        """
        default = DEFAULTS[name]
        value = self.arguments.get(name, default)
        expected: tuple[type, ...] = (str,) if isinstance(default, str) else (int, float)
        if not isinstance(value, expected) or isinstance(value, bool):
            raise InputError(f"{name}: expected {'text' if expected == (str,) else 'a number'}, not {value!r}")
        return value


def lost_arguments(winner: Winner, said: Collection[str]) -> list[str]:
    """Return a line for each argument that isn't the default and that a target doesn't express.

    They are the user's own, and those of knobs that targets have no way of their own to say. A target expresses those
    that are `said`, and the hyperparameters, which every target does.
    """
    own = winner.user_arguments
    # Every target translates these.
    translated = {"use_liger_kernel", "torch_compile_backend", "torch_compile_mode", "dataloader_prefetch_factor"}
    of_knobs = (n for n, (knob, _) in KNOBS.items() if knob.argument == "unless default" and n not in translated)
    plain = {**own, **{name: winner.arguments[name] for name in of_knobs if name in winner.arguments}}
    given = {n: value for n, value in plain.items() if n not in said and n not in DEFAULTS}
    usual = _default_arguments() if given else ()
    lost = {n: value for n, value in given.items() if all(u.get(n, u) != value for u in usual)}
    return [f"{'your own argument ' * (n in own)}{n}={value!r}" for n, value in lost.items()]


@functools.cache
def _default_arguments() -> tuple[dict[str, Any], ...]:
    """Return the defaults of TrainingArguments, twice: as declared, and as `to_json_string` writes them."""
    from transformers import TrainingArguments

    declared = {field.name: field.default for field in dataclasses.fields(TrainingArguments)}
    return declared, json.loads(TrainingArguments("out", use_cpu=True, disable_tqdm=False).to_json_string())
