"""A target of an export gets the answer and returns a :class:`Draft`, its file.

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
from typing import Any, NamedTuple

from autotune.errors import InputError
from autotune.values.config import KNOBS
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
        """Return the draft under the path that its file is written to, which command lines and its text then name."""
        ((name, text),) = self.files.items()
        # A name that would have to be escaped within a script's docstring or a comment is left out of it.
        if path.name.isprintable() and not set(path.name) & set('\\"'):
            text = _renamed(text, name, shlex.quote(path.name))
        return self._replace(
            files={path.name: text}, launch=tuple(_renamed(line, name, shlex.quote(str(path))) for line in self.launch)
        )


def _renamed(text: str, name: str, other: str) -> str:
    return re.sub(rf"(?<![\w./-]){re.escape(name)}(?![\w/-])", lambda _: other, text)


def user_arguments(result: ResultData) -> dict[str, Any]:
    """Return the user's own TrainingArguments, with their values in the answer."""
    measured = result.arguments.training_arguments
    return {name: measured.get(name, value) for name, value in result.workload.fixed_arguments.items()}


def hyperparameter(result: ResultData, name: str) -> Any:
    """Return a hyperparameter of TrainingArguments: the user's, or the default, of the kind of the default."""
    default = DEFAULTS[name]
    value = result.arguments.training_arguments.get(name, default)
    expected: tuple[type, ...] = (str,) if isinstance(default, str) else (int, float)
    if not isinstance(value, expected) or isinstance(value, bool):
        raise InputError(f"{name}: expected {'text' if expected == (str,) else 'a number'}, not {value!r}")
    return value


def lost_arguments(result: ResultData, said: Collection[str]) -> list[str]:
    """Return a line for each argument that isn't the default and that a target doesn't express.

    They are the user's own, and those of knobs that targets have no way of their own to say. A target expresses those
    that are `said`, and the hyperparameters, which every target does.
    """
    own, measured = user_arguments(result), result.arguments.training_arguments
    # Every target translates these.
    translated = {"use_liger_kernel", "torch_compile_backend", "torch_compile_mode", "dataloader_prefetch_factor"}
    of_knobs = (n for n, (knob, _) in KNOBS.items() if knob.argument == "unless default" and n not in translated)
    plain = {**own, **{name: measured[name] for name in of_knobs if name in measured}}
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
