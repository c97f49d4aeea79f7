"""Converts points of a search space, plain values by name of parameter, to configurations and back.

Nested fields are named 'adapter.rank'. A point may have fields that its kind of adapter lacks, as when a search changes
the kind alone; `fitting` leaves them out, and `make_config` refuses them.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from autotune.errors import complaint, suggestion
from autotune.values.adapters import ADAPTERS, kinds_with
from autotune.values.config import Parallelism, TrainConfig
from autotune.values.model import EXPERTS_IMPLEMENTATIONS
from autotune.values.techniques import BACKENDS, why_not

Scalar = bool | int | float | str | None

MICRO_BATCH = "per_device_train_batch_size"

ATTENTION = ("sdpa", "eager", "flash_attention_2", "flash_attention_3", "flex_attention")

_FIELD = "adapter."
_PARALLEL = "parallelism."

# Names of parameters: fields of TrainConfig, 'parallelism.FIELD', and 'adapter.FIELD' for each kind of adapter.
PARAMETERS = (
    (frozenset(TrainConfig.model_fields) - {"parallelism"})
    | {f"{_PARALLEL}{field}" for field in Parallelism.model_fields}
    | {f"{_FIELD}{field}" for kind in ADAPTERS.values() for field in kind.model_fields if field != "kind"}
)

# Valid values of parameters with free text; TrainConfig itself checks the others.
_KNOWN_TEXTS = {
    "attn_implementation": ATTENTION,
    "experts_implementation": EXPERTS_IMPLEMENTATIONS,
    "torch_compile_backend": BACKENDS,
}


def make_config(point: Mapping[str, Scalar]) -> TrainConfig:
    """Return the configuration at `point`.

    Raises:
        pydantic.ValidationError: A value is invalid, or the adapter lacks a field.
        KeyError: The adapter is unknown.
    """

    def nested(prefix: str) -> dict[str, Scalar]:
        return {name.removeprefix(prefix): value for name, value in point.items() if name.startswith(prefix)}

    fields: dict[str, Any] = {name: value for name, value in point.items() if "." not in name and name != "adapter"}
    if parallel := nested(_PARALLEL):
        fields["parallelism"] = Parallelism.model_validate(parallel)
    if (kind := point.get("adapter")) is not None:
        fields["adapter"] = ADAPTERS[str(kind)].model_validate(nested(_FIELD))
    return TrainConfig(**fields)


@functools.lru_cache(maxsize=4096, typed=True)
def valid(name: str, value: Scalar) -> Any:
    """Return the value of a field of `TrainConfig`, checked once for all points; no check is of several fields.

    Raises:
        pydantic.ValidationError: It is invalid.
    """
    return getattr(TrainConfig(**{MICRO_BATCH: 1, name: value}), name)


def make_point(config: TrainConfig) -> dict[str, Scalar]:
    """Return the point of `config`: the inverse of `make_config`."""
    point: dict[str, Scalar] = {}
    for name in TrainConfig.model_fields:
        value = getattr(config, name)
        if name == "adapter":
            point[name] = value.kind if value is not None else None
            if value is not None:
                point |= {f"{_FIELD}{field}": v for field, v in value.model_dump(exclude={"kind"}).items()}
        elif name == "parallelism":
            point |= {f"{_PARALLEL}{field}": getattr(value, field) for field in Parallelism.model_fields}
        else:
            point[name] = str(value) if name == "precision" else value
    return point


def differing(config: TrainConfig, baseline: TrainConfig) -> dict[str, Scalar]:
    """Return what `--fix` has to name for `config`: where it isn't as `baseline`, or as its kind of adapter has it.

    The number of devices is left out, as `--devices` says it.
    """
    point, of_baseline = make_point(config), make_point(baseline)
    usual = make_point(make_config(fitting({"adapter": point["adapter"]}, of_baseline)))
    usual |= {"adapter": of_baseline["adapter"], f"{_PARALLEL}world_size": config.parallelism.world_size}
    return {name: value for name, value in point.items() if value != usual.get(name)}


def has_field(kind: Scalar, parameter: str) -> bool:
    """Return whether `parameter` exists with that kind of adapter; `kind` None: without an adapter."""
    if not parameter.startswith(_FIELD):
        return True
    return kind is not None and parameter.removeprefix(_FIELD) in ADAPTERS[str(kind)].model_fields


def fitting(point: Mapping[str, Scalar], origin: Mapping[str, Scalar]) -> dict[str, Scalar]:
    """Return `origin` updated by `point`, without fields that the adapter lacks.

    If the kind of adapter changes, the fields that `point` doesn't name have the defaults of the new kind.
    """
    kind = point["adapter"] if "adapter" in point else origin.get("adapter")
    kept = {k: v for k, v in origin.items() if kind == origin.get("adapter") or not k.startswith(_FIELD)}
    return {k: v for k, v in {**kept, **point}.items() if has_field(kind, k)}


def problem(parameter: str, value: Scalar) -> str | None:
    """Return why `value` is invalid for `parameter`, or None; a value of another type, such as '8', is invalid."""
    reason = why_not(parameter, value)
    if reason is not None:
        return f"{value!r}: {reason}"
    known = _KNOWN_TEXTS.get(parameter)
    if known is not None and value is not None and value not in known:
        near = suggestion(str(value), known) or f"; there are {', '.join(known)}"
        return f"{value!r} is unknown{near}"
    if parameter == "adapter" and value is not None and value not in ADAPTERS:
        return f"{value!r} is unknown{suggestion(str(value), ADAPTERS)}"
    kinds = kinds_with(parameter.removeprefix(_FIELD)) if parameter.startswith(_FIELD) else (None,)
    problems = []
    for kind in kinds:
        point = {MICRO_BATCH: 1, **({} if kind is None else {"adapter": kind}), parameter: value}
        try:
            taken = make_point(make_config(point))[parameter]
        except ValidationError as error:
            problems.append(f"{value!r} is no value for it ({complaint(error.errors()[0])})")
        else:
            if type(taken) is type(value):
                return None
            problems.append(f"{value!r} is no value for it (did you mean {taken!r}?)")
    return problems[0]
