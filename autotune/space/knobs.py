"""The knobs of a configuration as options of the command line: derived from the fields of `TrainConfig`.

A field keeps its name with hyphens, or the shorter one below; a field of an adapter, whichever kinds have it, stands
behind `adapter` (`--adapter-rank`). What was written becomes a value when the configuration is made, which is also what
checks it.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from enum import StrEnum
from types import NoneType
from typing import TYPE_CHECKING, Any, Literal, get_args, get_origin

from pydantic import ValidationError
from pydantic.fields import FieldInfo

from autotune.errors import InputError, complaint, suggestion
from autotune.value import Value
from autotune.values.adapters import ADAPTERS, kinds_with
from autotune.values.config import Parallelism, TrainConfig
from autotune.values.unavailable import why_not

if TYPE_CHECKING:
    from autotune.values.result import Change

Scalar = bool | int | float | str | None

# Fields whose names are long for a table or a command line.
SHORT_NAMES = {
    "per_device_train_batch_size": "micro-batch",
    "attn_implementation": "attention",
    "experts_implementation": "experts",
    "use_liger_kernel": "liger",
    "torch_compile_backend": "compile",
    "torch_compile_mode": "compile-mode",
    "dataloader_num_workers": "workers",
    "dataloader_prefetch_factor": "prefetch",
    "dataloader_pin_memory": "pin-memory",
    "train_sampling_strategy": "sampling",
    "parallelism.world_size": "devices",
    "parallelism.sharding": "sharding",
    "parallelism.tensor_parallel": "tensor-parallel",
    "parallelism.pipeline_parallel": "pipeline-parallel",
    "parallelism.offload": "offload",
    "parallelism.offload_to": "offload-to",
    "parallelism.nvme_path": "nvme-path",
    "parallelism.wrapping": "fsdp-wrapping",
    "parallelism.ddp_bucket_cap_mb": "ddp-bucket-cap-mb",
    "parallelism.ddp_static_graph": "ddp-static-graph",
}


def shown_changes(changed: Iterable[Change]) -> str:
    """Return what a configuration changes: 'precision bf16, micro-batch 16', or 'the baseline' if nothing."""
    return ", ".join(f"{SHORT_NAMES.get(c.knob, c.knob)} {c.after}" for c in changed) or "the baseline"


# In place of the field's description, which is for who makes a configuration.
_HELP = {
    "attn_implementation": "Kernel, such as sdpa, eager or flash_attention_2.",
    "experts_implementation": "How experts run: grouped_mm, batched_mm or eager.",
    "use_liger_kernel": "Fused kernels of the package liger-kernel.",
    "torch_compile_backend": "inductor, or none.",
    "optim": "As transformers calls it.",
    "dataloader_num_workers": "Processes that load data.",
    "dataloader_prefetch_factor": "Batches that each of them prepares ahead.",
    "dataloader_pin_memory": "Copy to the device from pinned memory.",
    "adapter.dropout": "Of the adapter's input",
    "adapter.rank": "Of the adapter's factors",
    "adapter.target_modules": "all-linear, attention or all-linear+experts",
    "quantization": "Base weights that bitsandbytes packs, under an adapter: int8, nf4, nf4-double, fp4 or fp4-double.",
}

# Who names a field of an adapter and no kind means this one, if it has the field.
_USUAL_ADAPTER = "lora"


class Knob(Value):
    """One knob, and what it is called."""

    parameter: str  # as in the files of search spaces, such as 'adapter.rank'
    option: str  # without hyphens before it, such as 'adapter-rank'
    choices: tuple[str, ...]  # empty: free
    is_flag: bool
    may_be_none: bool
    help: str


@functools.cache
def knobs() -> tuple[Knob, ...]:
    """Return all knobs in the order of the fields."""
    found = []
    for name, field in TrainConfig.model_fields.items():
        if name == "parallelism":
            found += [_knob(p := f"{name}.{f}", SHORT_NAMES[p], i) for f, i in Parallelism.model_fields.items()]
            continue
        if name != "adapter":
            found.append(_knob(name, SHORT_NAMES.get(name, name.replace("_", "-")), field))
            continue
        found.append(
            Knob(
                parameter=name,
                option=name,
                choices=(*ADAPTERS, "none"),
                is_flag=False,
                may_be_none=True,
                help=f"{_either((*ADAPTERS, 'none'))}.",
            )
        )
        found += _adapter_knobs()
    return tuple(found)


def _adapter_knobs() -> list[Knob]:
    """Return a knob for each field that any kind of adapter has."""
    fields = dict.fromkeys(f for kind in ADAPTERS.values() for f in kind.model_fields if f != "kind")
    return [_adapter_knob(field) for field in fields]


def _adapter_knob(field: str) -> Knob:
    having = {kind: ADAPTERS[kind].model_fields[field] for kind in kinds_with(field)}
    first = next(iter(having.values()))
    knob = _knob(f"adapter.{field}", f"adapter-{field.replace('_', '-')}", first)
    described = _HELP.get(knob.parameter) or _sentence(first.description or "")
    default = _written(first.default)
    others = [f"{_written(f.default)} for {kind}" for kind, f in having.items() if f.default != first.default]
    said = f"{described.removesuffix('.')} [{', '.join((default, *others))}]; of {', '.join(having)}."
    return knob.model_copy(update={"help": said})


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
        reason = why_not(knob.parameter, value)
        if reason is not None:
            raise InputError(f"--{option} {value}: {reason}")
        if knob.choices and value not in knob.choices:
            near = suggestion(str(value), knob.choices)
            raise InputError(f"--{option} {value}: expected {_either(knob.choices)}{near}")
        point[knob.parameter] = None if knob.may_be_none and value == "none" else value
        parent, dot, _ = knob.parameter.partition(".")
        if parent != "adapter":
            continue
        if dot and written.get(parent) == "none":
            raise InputError(f"--{option} {value}: there is no adapter (--{parent} none)")
        if dot and parent not in written:
            point[parent] = _USUAL_ADAPTER
        having = kinds_with(knob.parameter.partition(".")[2])
        if dot and (kind := written.get(parent, _USUAL_ADAPTER)) not in having:
            raise InputError(f"--{option} {value}: {kind} has none (--adapter {_either(having)} has)")
    return point


def shown(option: str, value: Scalar) -> str:
    """Return an option as it is written: '--precision bf16', '--no-tf32', '--compile none'."""
    if isinstance(value, bool):
        return f"--{option}" if value else f"--no-{option}"
    return f"--{option} {'none' if value is None else value}"


def refused(error: ValidationError) -> InputError:
    """Return the error of a configuration that can't be made, as a line about the option."""
    first = error.errors()[0]
    if not first["loc"]:  # what several options say together
        return InputError(complaint(first))
    field = str(first["loc"][0])
    knob = next((k for k in knobs() if k.parameter in (field, f"adapter.{field}", f"parallelism.{field}")), None)
    option = knob.option if knob is not None else field
    return InputError(f"--{option} {first['input']}: {complaint(first)}")


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
    others = [kind for kind in get_args(annotation) if kind is not NoneType]
    if NoneType in get_args(annotation) and len(others) == 1 and (found := _choices(others[0])):
        return (*found, "none")
    if get_origin(annotation) is Literal:
        return tuple(map(str, get_args(annotation)))
    if isinstance(annotation, type) and issubclass(annotation, StrEnum):
        return tuple(map(str, annotation))
    return ()


def _either(words: tuple[str, ...]) -> str:
    return f"{', '.join(words[:-1])} or {words[-1]}" if len(words) > 1 else words[0]


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:]


def _written(default: Any) -> str:
    if isinstance(default, bool):
        return "yes" if default else "no"
    return str(default)
