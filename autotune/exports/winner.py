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
from autotune.values.config import KNOBS, TrainConfig
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
    def peft_arguments(self) -> dict[str, Any] | None:
        """Arguments of peft's config; None where all weights are trained, or biases alone."""
        adapter = self.result.arguments.adapter
        return None if adapter is None or adapter.get("peft_type") == BITFIT else adapter

    def hyperparameter(self, name: str) -> Any:
        """Return a hyperparameter of TrainingArguments: the user's, or the default, of the kind of the default."""
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
