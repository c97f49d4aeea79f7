"""What the targets of an export have to know of an answer, in the words that files and scripts use.

Pure. Everything comes from the arguments that were measured; where the user said nothing, `TrainingArguments` decided,
and what it decides is written out, since other tools decide otherwise.
"""

from __future__ import annotations

import ast
import contextlib
import functools
from collections.abc import Collection
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autotune.errors import InputError
from autotune.training.peft_arguments import BITFIT
from autotune.units import show_rate
from autotune.values.config import Precision, TrainConfig, Workload
from autotune.values.model import Task

if TYPE_CHECKING:
    from autotune.values.result import ResultData

# What TrainingArguments does where it isn't told, of what decides a training's numbers (transformers 5.17 to 5.23).
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

# Prompts put labels that don't count before the real ones; the first of these then has something to predict it.
_PREPENDING = ("prompt", "p-tuning")


@dataclass(frozen=True)
class Winner:
    """An answer as it is exported."""

    result: ResultData

    @property
    def config(self) -> TrainConfig:
        """The configuration that won."""
        return self.result.best.config

    @property
    def workload(self) -> Workload:
        """What it trains."""
        return self.result.workload

    @property
    def arguments(self) -> dict[str, Any]:
        """Of TrainingArguments, as measured."""
        return self.result.arguments.training_arguments

    @property
    def accumulation(self) -> int:
        """Micro-batches of a step on one device."""
        return self.workload.accumulation_steps(self.config)

    @property
    def samples_per_step(self) -> int:
        """Of all devices together."""
        return self.workload.samples_per_step(self.config)

    @property
    def reference(self) -> str:
        """What `from_pretrained` finds the model by."""
        spec = self.workload.model
        return spec.path if spec.source == "directory" and spec.path is not None else spec.name

    @property
    def measured(self) -> float | None:
        """Samples per second; None where nothing was measured."""
        measurement = self.result.best.measurement
        return measurement.samples_per_second if measurement is not None else None

    @property
    def promise(self) -> str:
        """What was measured and on what, in words."""
        rate = f"{show_rate(self.measured)} samples/s" if self.measured is not None else "not measured"
        versions = self.result.hardware.versions
        found = ", ".join(f"{name} {versions[name]}" for name in ("torch", "transformers") if name in versions)
        devices = f"{self.config.parallelism.world_size} x " if self.config.parallelism.world_size > 1 else ""
        return f"{rate} on {devices}{self.result.hardware.name} ({found or 'unknown versions'})"

    @property
    def length(self) -> int:
        """Tokens of a sample as it was measured: on average, where the user's own data were read."""
        lengths = self.workload.lengths
        return self.workload.sequence_length if lengths is None else max(2, round(lengths.mean))

    @property
    def shifts_labels(self) -> bool:
        """Whether the loss leaves out the first label of each row."""
        adapter = self.config.adapter
        return self.workload.task is Task.CAUSAL_LM and (adapter is None or adapter.kind not in _PREPENDING)

    @property
    def sums_its_loss(self) -> bool:
        """Whether the loss of a micro-batch is a sum, so that those of a step add up by themselves."""
        reduction = self.workload.model.config.get("ctc_loss_reduction", "sum")
        return self.workload.task is Task.SPEECH_CTC and reduction == "sum"

    @property
    def peft_arguments(self) -> dict[str, Any] | None:
        """Of peft's config; None where all weights are trained, or biases alone."""
        adapter = self.result.arguments.adapter
        return adapter if adapter is not None and not self.trains_biases else None

    @property
    def trains_biases(self) -> bool:
        """Whether BitFit won, which peft hasn't."""
        return (self.result.arguments.adapter or {}).get("peft_type") == BITFIT

    @property
    def mixed_precision(self) -> str:
        """What accelerate calls it."""
        return {Precision.BF16: "bf16", Precision.FP16: "fp16"}.get(self.config.precision, "no")

    def hyperparameter(self, name: str) -> Any:
        """Return what a hyperparameter of TrainingArguments is: the user's, or the default.

        Raises:
            InputError: The user's is of another kind than the default.
        """
        default = DEFAULTS[name]
        value = self.arguments.get(name, default)
        expected: tuple[type, ...] = (str,) if isinstance(default, str) else (int, float)
        if not isinstance(value, expected) or isinstance(value, bool):
            raise InputError(f"{name}: expected {'text' if expected == (str,) else 'a number'}, not {value!r}")
        return value

    @property
    def own_arguments(self) -> dict[str, Any]:
        """The user's own arguments, as the answer has them."""
        return {name: self.arguments.get(name, value) for name, value in self.workload.fixed_arguments.items()}


def lost_arguments(winner: Winner, said: Collection[str]) -> list[str]:
    """Return a line for each of the user's own arguments that a target doesn't say.

    Args:
        winner: The answer.
        said: Names of those that it says, beside the hyperparameters, which each does.
    """
    own = {n: value for n, value in winner.own_arguments.items() if n not in said and n not in DEFAULTS}
    usual = _usual_arguments() if own else ()
    return [f"your own argument {n}={value!r}" for n, value in own.items() if all(u.get(n, u) != value for u in usual)]


# What TrainingArguments make of some of their defaults (`__post_init__`; held against it by a test).
_AS_MADE: dict[str, Any] = {
    "disable_tqdm": False,
    "report_to": [],
    "include_for_metrics": [],
    "debug": [],
    "accelerator_config": {
        "split_batches": False,
        "dispatch_batches": None,
        "even_batches": True,
        "use_seedable_sampler": True,
        "non_blocking": False,
        "gradient_accumulation_kwargs": None,
    },
}


@functools.cache
def _usual_arguments() -> tuple[dict[str, Any], ...]:
    """Return what TrainingArguments are by themselves: as declared, and as `to_json_string` writes them.

    The declaration is read, not imported, which would take seconds.
    """
    library = find_spec("transformers")
    assert library is not None, "transformers is required"
    assert library.origin is not None
    tree = ast.parse((Path(library.origin).parent / "training_args.py").read_text(encoding="utf-8"))
    (declaration,) = (n for n in tree.body if isinstance(n, ast.ClassDef) and n.name == "TrainingArguments")
    declared = dict(found for line in declaration.body if (found := _declared(line)) is not None)
    return declared, {**declared, **_AS_MADE}


def _declared(line: ast.stmt) -> tuple[str, Any] | None:
    """Return name and default of a field; None where it has none, or one that is no literal."""
    match line:
        case ast.AnnAssign(target=ast.Name(id=name), value=ast.Call(keywords=keywords)):
            for keyword in keywords:
                with contextlib.suppress(ValueError):
                    if keyword.arg == "default":
                        return name, ast.literal_eval(keyword.value)
    return None
