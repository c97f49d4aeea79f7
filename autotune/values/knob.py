"""What a knob is: the metadata that each field of a configuration has, and the classes of what changing it changes.

A field of `TrainConfig` or `Parallelism` is annotated with a :class:`Knob`; type, default and description are the
field's own. Who maps, names, predicts or shows knobs reads these instead of listing fields.
"""

from __future__ import annotations

from collections.abc import Callable
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


# The values of `Allowance`, which declarations of knobs are written with.
AllowanceName = Literal["exact", "numerics", "optimizer", "method"]


class Difference(NamedTuple):
    """A knob that a configuration has otherwise than the baseline.

    Attributes:
        before: The baseline's value.
        after: The configuration's.
        facts: Of the model.
        precision: Of the configuration.
        rounds: Whether products in fp32 are TF32 in one of the two alone.
    """

    before: Any
    after: Any
    facts: ModelFacts
    precision: str
    rounds: bool


# A text in which {} stands for the value, used for every value but the field's default; or a function of the value.
Template = str | Callable[[Any], str | None]


@dataclass(frozen=True)
class Knob:
    """A knob beside its field's type, default and description.

    Attributes:
        allowance: The class of a change, or a function that returns it.
        short: Its name in tables and on the command line; None: the field's, with hyphens.
        help: Of its option; None: the choices that its type has, or the field's description.
        argument: Whether the argument of `TrainingArguments` with the field's name is given its value: always, or
            unless that is the field's default, which is the argument's too; None: what it means there is worked out.
        is_traced: Whether the closed forms of time and memory depend on it.
        feature: Of the time model, whose prediction may be off by a factor for it.
        word: What a configuration in one line says, after a comma unless it begins with a space.
    """

    allowance: AllowanceName | Callable[[Difference], AllowanceName]
    short: str | None = None
    _: KW_ONLY
    help: str | None = None
    argument: Literal["always", "unless default"] | None = None
    is_traced: bool = True
    feature: Template | None = None
    word: Template | None = None

    def allowance_of(self, difference: Difference) -> AllowanceName:
        """Return the class of a change."""
        return self.allowance(difference) if callable(self.allowance) else self.allowance


class KnobField(NamedTuple):
    """A knob and the field that it is of."""

    knob: Knob
    field: FieldInfo

    def filled(self, template: Template | None, value: Any) -> str | None:
        """Return the text of a template of the knob for a value; None: it has none for it."""
        if callable(template):
            return template(value)
        return None if template is None or value == self.field.default else template.format(value)


def knobs_of(kind: type[BaseModel], prefix: str = "") -> dict[str, KnobField]:
    """Return the knobs by their names, in the order of the fields; those of a value within are behind a dot.

    Raises:
        TypeError: A field has no knob.
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
    """Return a template for every value, the default too."""
    return text.format


def only(special: object, text: str) -> Template:
    """Return a template for one value alone."""
    return lambda value: text if value == special else None


# The same update rule, differently scheduled on the device.
_SAME_OPTIMIZER = frozenset({"adamw_torch", "adamw_torch_fused"})


def of_split(change: Difference) -> AllowanceName:
    """Return the class of another micro-batch: exact, unless what is computed is coupled over its samples."""
    if change.facts.split_changes is not None:
        return "method"
    return "numerics" if change.facts.batch_coupled else "exact"


def of_redrawing(change: Difference) -> AllowanceName:
    """Return the class of what lays the same samples out otherwise, in rows or over ranks.

    Dropout draws other random numbers then, and what is coupled over a micro-batch is so by its padding and over a
    smaller one.
    """
    return "numerics" if change.facts.has_dropout or change.facts.batch_coupled else "exact"


def of_rounding(change: Difference) -> AllowanceName:
    """Return the class of what may switch TF32 on."""
    return "numerics" if change.rounds else "exact"


def of_compiling(change: Difference) -> AllowanceName:
    """Return the class of a compiler: it may switch TF32 on, and compiled dropout draws other random numbers."""
    return "numerics" if change.facts.has_dropout or change.rounds else "exact"


def of_optimizer(change: Difference) -> AllowanceName:
    """Return the class of another optimizer."""
    return "exact" if {change.before, change.after} <= _SAME_OPTIMIZER else "optimizer"


def of_precision(change: Difference) -> AllowanceName:
    """Return the class of another precision."""
    return "method" if "pure_bf16" in (change.before, change.after) else "numerics"


def of_sharding(change: Difference) -> AllowanceName:
    """Return the class of another sharding.

    Who keeps which shard changes no number in fp32; with 16-bit arithmetic each library rounds in other places: DDP
    adds up gradients in fp32 and casts operator by operator; accelerate has FSDP reduce in 16 bits and cast whole units
    (`set_mixed_precision`), and DeepSpeed trains 16-bit weights with fp32 masters.
    """
    libraries = {sharding.partition("_")[0] for sharding in (change.before, change.after)}
    return "numerics" if change.precision in ("bf16", "fp16") and len(libraries) > 1 else "exact"
