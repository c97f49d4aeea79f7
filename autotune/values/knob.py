"""Metadata of the knobs of a configuration, and the classes of changes that a user may allow.

Each field of `TrainConfig` and `Parallelism` is annotated with a :class:`Knob`. Code that exports, names, predicts or
shows knobs reads this metadata instead of listing fields.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import KW_ONLY, dataclass
from enum import StrEnum
from typing import Any, Literal, NamedTuple

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from autotune.values.model import ModelFacts


class Allowance(StrEnum):
    """How much a knob may change of the user's training; each class includes those before it.

    Examples:
        >>> Allowance.OPTIMIZER.admits(Allowance.NUMERICS), Allowance.OPTIMIZER.admits(Allowance.METHOD)
        (True, False)
    """

    EXACT = "exact"
    NUMERICS = "numerics"
    OPTIMIZER = "optimizer"
    METHOD = "method"

    @property
    def rank(self) -> int:
        """Position from the strictest (0) to the freest (3)."""
        return list(Allowance).index(self)

    def admits(self, other: Allowance) -> bool:
        """Whether a change of class `other` is allowed."""
        return other.rank <= self.rank


def deepest_class(classes: Iterable[Allowance]) -> Allowance:
    """Return the freest of the classes of some changes; `EXACT` without any."""
    return max(classes, key=lambda c: c.rank, default=Allowance.EXACT)


# The values of `Allowance`, as they are written in declarations of knobs.
AllowanceName = Literal["exact", "numerics", "optimizer", "method"]


class Difference(NamedTuple):
    """A knob whose value differs between the baseline and a configuration.

    Attributes:
        before: The baseline's value.
        after: The configuration's value.
        facts: Facts of the model.
        precision: The configuration's precision.
        rounds: Whether fp32 matrix products run as TF32 in exactly one of the two.
    """

    before: Any
    after: Any
    facts: ModelFacts
    precision: str
    rounds: bool


# A format string with {} for the value, which gives None for the field's default; or a function of the value.
Template = str | Callable[[Any], str | None]


@dataclass(frozen=True)
class Knob:
    """Metadata of a field: all but its type, default and description.

    Attributes:
        allowance: Class of a change of the knob, or a function that returns it.
        short: Name in tables and on the command line; None: the field's name with hyphens.
        argument: When the value is copied to the field of `TrainingArguments` of the same name: always, or unless it is
            the default of both; None: `training.arguments` maps it in another way.
        is_traced: Whether predicted time and memory depend on the knob.
        feature: Name of the feature of the time model's correction that the value switches on.
        word: Text for the value in a one-line description, joined by a comma unless it begins with a space.
    """

    allowance: AllowanceName | Callable[[Difference], AllowanceName]
    short: str | None = None
    _: KW_ONLY
    argument: Literal["always", "unless default"] | None = None
    is_traced: bool = True
    feature: Template | None = None
    word: Template | None = None

    def allowance_of(self, difference: Difference) -> AllowanceName:
        """Return the class of a change."""
        return self.allowance(difference) if callable(self.allowance) else self.allowance


class KnobField(NamedTuple):
    """A knob and its field."""

    knob: Knob
    field: FieldInfo

    def filled(self, template: Template | None, value: Any) -> str | None:
        """Return the text that one of the knob's templates gives for `value`, or None."""
        if callable(template):
            return template(value)
        return None if template is None or value == self.field.default else template.format(value)


def knobs_of(kind: type[BaseModel], prefix: str = "") -> dict[str, KnobField]:
    """Return the knobs by name, in the order of the fields; fields of a nested model are named 'parent.field'.

    Raises:
        TypeError: A field has no `Knob`.
    """
    found: dict[str, KnobField] = {}
    for name, field in kind.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            found |= knobs_of(field.annotation, f"{prefix}{name}.")
            continue
        knob = next((m for m in field.metadata if isinstance(m, Knob)), None)
        if knob is None:
            raise TypeError(f"{kind.__name__}.{name} has no Knob that says what a change of it means")
        found[prefix + name] = KnobField(knob, field)
    return found


def each(text: str) -> Template:
    """Return a template that gives a text for every value, the default included."""
    return text.format


# Optimizers with the same update rule, scheduled differently on the device.
_SAME_OPTIMIZER = frozenset({"adamw_torch", "adamw_torch_fused"})


def of_split(change: Difference) -> AllowanceName:
    """Return the class of another micro-batch: exact, unless the model couples samples (batch norm, router loss)."""
    if change.facts.split_changes is not None:
        return "method"
    return "numerics" if change.facts.batch_coupled else "exact"


def of_redrawing(change: Difference) -> AllowanceName:
    """Return the class of another layout of the same samples, in rows or over ranks.

    It changes the random numbers of dropout, and padding and size of the micro-batches that a model may couple.
    """
    return "numerics" if change.facts.has_dropout or change.facts.batch_coupled else "exact"


def of_rounding(change: Difference) -> AllowanceName:
    """Return the class of a knob that may switch TF32 on."""
    return "numerics" if change.rounds else "exact"


def of_compiling(change: Difference) -> AllowanceName:
    """Return the class of compiling: it may switch TF32 on, and compiled dropout draws other random numbers."""
    return "numerics" if change.facts.has_dropout or change.rounds else "exact"


def of_optimizer(change: Difference) -> AllowanceName:
    """Return the class of another optimizer."""
    return "exact" if {change.before, change.after} <= _SAME_OPTIMIZER else "optimizer"


def of_precision(change: Difference) -> AllowanceName:
    """Return the class of another precision."""
    return "method" if "pure_bf16" in (change.before, change.after) else "numerics"


def of_sharding(change: Difference) -> AllowanceName:
    """Return the class of another sharding.

    Sharding changes no number in fp32. With 16-bit arithmetic each library rounds in other places: DDP reduces
    gradients in fp32 and casts operator by operator; accelerate has FSDP reduce in 16 bits and cast whole units
    (`set_mixed_precision`); DeepSpeed trains 16-bit weights with fp32 masters.
    """
    libraries = {sharding.partition("_")[0] for sharding in (change.before, change.after)}
    return "numerics" if change.precision in ("bf16", "fp16") and len(libraries) > 1 else "exact"
