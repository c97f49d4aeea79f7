"""The knobs of a configuration as options of the command line: derived from the fields of `TrainConfig`.

A field keeps its name with hyphens, or the shorter one below; a field of an adapter stands behind the adapter's kind
(`--lora-rank`). What was written becomes a value when the configuration is made, which is also what checks it.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from enum import StrEnum
from types import NoneType
from typing import Any, Literal, get_args, get_origin

from pydantic import ValidationError
from pydantic.fields import FieldInfo

from autotune.config import TrainConfig
from autotune.errors import InputError, suggestion
from autotune.values import Value

Scalar = bool | int | float | str | None

_SHORT = {
    "per_device_train_batch_size": "micro-batch",
    "attn_implementation": "attention",
    "torch_compile_backend": "compile",
    "dataloader_num_workers": "workers",
    "dataloader_pin_memory": "pin-memory",
}

# In place of the field's description, which is for who makes a configuration.
_HELP = {
    "attn_implementation": "Kernel, such as sdpa, eager or flash_attention_2.",
    "torch_compile_backend": "inductor, or none.",
    "optim": "As transformers calls it.",
    "dataloader_num_workers": "Processes that load data.",
    "dataloader_pin_memory": "Copy to the device from pinned memory.",
    "adapter.alpha": "The adapter's output is scaled by alpha / rank.",
    "adapter.dropout": "Before the adapter.",
    "adapter.rank": "Of the adapter; stands for --adapter lora too.",
}


class Knob(Value):
    """One knob, and what it is called."""

    parameter: str  # as in the files of search spaces, such as 'adapter.rank'
    option: str  # without hyphens before it, such as 'lora-rank'
    choices: tuple[str, ...]  # empty: free
    is_flag: bool
    may_be_none: bool
    help: str


@functools.cache
def knobs() -> tuple[Knob, ...]:
    """Return all knobs in the order of the fields."""
    found = []
    for name, field in TrainConfig.model_fields.items():
        adapter = _value_class(field.annotation)
        if adapter is None:
            found.append(_knob(name, _SHORT.get(name, name.replace("_", "-")), field))
            continue
        kind = str(adapter.model_fields["kind"].default)
        found.append(
            Knob(
                parameter=name,
                option=name,
                choices=(kind, "none"),
                is_flag=False,
                may_be_none=True,
                help=f"{kind}, or none.",
            )
        )
        for inner, inner_field in adapter.model_fields.items():
            if inner != "kind":
                found.append(_knob(f"{name}.{inner}", f"{kind}-{inner.replace('_', '-')}", inner_field))
    return tuple(found)


def point_of(written: Mapping[str, str | bool]) -> dict[str, Scalar]:
    """Return the point, as search spaces have it, of what was written: values by option.

    Raises:
        InputError: An option is unknown, or has none of its values.
    """
    known = {knob.option: knob for knob in knobs()}
    point: dict[str, Scalar] = {}
    for option, value in written.items():
        knob = known.get(option)
        if knob is None:
            raise InputError(f"--{option}: unknown{suggestion(option, known)}")
        if knob.choices and value not in knob.choices:
            near = suggestion(str(value), knob.choices)
            raise InputError(f"--{option} {value}: expected {_either(knob.choices)}{near}")
        point[knob.parameter] = None if knob.may_be_none and value == "none" else value
        parent, dot, _ = knob.parameter.partition(".")
        if dot and written.get(parent) == "none":
            raise InputError(f"--{option} {value}: there is no adapter (--{parent} none)")
        if dot and parent not in written:
            point[parent] = option.partition("-")[0]
    return point


def shown(option: str, value: Scalar) -> str:
    """Return an option as it is written: '--precision bf16', '--no-tf32', '--compile none'."""
    if isinstance(value, bool):
        return f"--{option}" if value else f"--no-{option}"
    return f"--{option} {'none' if value is None else value}"


def refused(error: ValidationError) -> InputError:
    """Return the error of a configuration that can't be made, as a line about the option."""
    first = error.errors()[0]
    field = str(first["loc"][0])
    knob = next((k for k in knobs() if k.parameter in (field, f"adapter.{field}")), None)
    option = knob.option if knob is not None else field
    return InputError(f"--{option} {first['input']}: {first['msg'].removeprefix('Value error, ')}")


def _knob(parameter: str, option: str, field: FieldInfo) -> Knob:
    kinds = [kind for kind in get_args(field.annotation) or (field.annotation,) if kind is not NoneType]
    choices = _choices(field.annotation)
    described = _HELP.get(parameter) or (f"{_either(choices)}." if choices else _sentence(field.description or ""))
    default = "" if field.is_required() or field.default in (None, "") else f" [{_written(field.default)}]"
    return Knob(
        parameter=parameter,
        option=option,
        choices=choices,
        is_flag=kinds == [bool],
        may_be_none=NoneType in get_args(field.annotation),
        help=described.removesuffix(".") + (default or "") + ".",
    )


def _choices(annotation: Any) -> tuple[str, ...]:
    if get_origin(annotation) is Literal:
        return tuple(map(str, get_args(annotation)))
    if isinstance(annotation, type) and issubclass(annotation, StrEnum):
        return tuple(map(str, annotation))
    return ()


def _value_class(annotation: Any) -> type[Value] | None:
    """Return the class of values that a field holds, such as an adapter's, if it does."""
    classes = [kind for kind in get_args(annotation) if isinstance(kind, type) and issubclass(kind, Value)]
    return classes[0] if classes else None


def _either(words: tuple[str, ...]) -> str:
    return f"{', '.join(words[:-1])} or {words[-1]}" if len(words) > 1 else words[0]


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:]


def _written(default: Any) -> str:
    if isinstance(default, bool):
        return "yes" if default else "no"
    return str(default)
