"""Reads search spaces from YAML, strictly: every mistake is one line with file, path and what is expected.

::

    description: for whom, how big
    parameters:                       # in the order of their expected effect, which is the order of trying
      precision:
        choices: [fp32, bf16]
      adapter.rank:
        choices: [8, 64]
        when: {adapter: [lora]}       # only then does it exist
      torch_compile_backend:
        choices: [null, inductor]
        from_effort: standard         # too dear for a quick search
    rules:
      - forbid: {optim: [adamw_bnb_8bit], precision: [fp32]}
        reason: why nobody would want it
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import Field, ValidationError, field_validator

from autotune.config import Effort, LoraAdapter, TrainConfig
from autotune.errors import SearchSpaceError, suggestion
from autotune.values import Value

Scalar = bool | int | str | None

ADAPTERS: dict[str, type[LoraAdapter]] = {"lora": LoraAdapter}

# The names a file may use: every field of TrainConfig, and the fields of adapters behind a dot.
PARAMETERS = frozenset(TrainConfig.model_fields) | {
    f"adapter.{field}" for kind in ADAPTERS.values() for field in kind.model_fields if field != "kind"
}


class Parameter(Value):
    """One dimension: its choices, and when it exists."""

    choices: tuple[Scalar, ...] | Literal["lattice"] = Field(
        description="values, or 'lattice' for the micro-batch: what divides the global batch"
    )
    when: dict[str, tuple[Scalar, ...]] = Field(default_factory=dict)
    from_effort: Effort = Effort.QUICK

    @field_validator("choices")
    @classmethod
    def _not_empty(cls, value: Any) -> Any:
        if not value:
            raise ValueError("needs at least one choice")
        if value != "lattice" and len(set(map(repr, value))) != len(value):
            raise ValueError("has a choice twice")
        return value


class ForbidRule(Value):
    """A combination nobody wants: refused when every named parameter has one of the values."""

    forbid: dict[str, tuple[Scalar, ...]]
    reason: str = Field(min_length=1)


class SpaceFile(Value):
    """A search space as written, not yet bound to a workload."""

    name: str
    description: str = Field(min_length=1)
    parameters: dict[str, Parameter]
    rules: tuple[ForbidRule, ...] = ()


def spaces_directory() -> Path:
    """Return the directory of the built-in spaces: inside the wheel, or beside the package in a checkout."""
    inside = Path(__file__).parents[1] / "search_spaces"
    return inside if inside.is_dir() else Path(__file__).parents[2] / "search_spaces"


def builtin_spaces() -> tuple[str, ...]:
    """Return the names of the spaces that come with autotune."""
    return tuple(sorted(path.stem for path in spaces_directory().glob("*.yaml")))


def load_space(reference: str) -> SpaceFile:
    """Return the built-in space `reference`, or the one in the file of that path.

    Raises:
        SearchSpaceError: No such space, or the file is malformed.
    """
    if reference in builtin_spaces():
        return read_space(spaces_directory() / f"{reference}.yaml")
    path = Path(reference)
    if path.suffix not in (".yaml", ".yml") and not path.exists():
        known = builtin_spaces()
        raise SearchSpaceError(
            f"search space {reference!r} is unknown{suggestion(reference, known)}; "
            f"there are {', '.join(known)}, or give a .yaml file"
        )
    return read_space(path)


def read_space(path: Path) -> SpaceFile:
    """Return the space in `path`.

    Raises:
        SearchSpaceError: The file can't be read or is malformed.
    """
    try:
        document = yaml.load(path.read_text(encoding="utf-8"), Loader=_StrictLoader)
    except OSError as error:
        raise SearchSpaceError(f"{path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise SearchSpaceError(f"{path}: not UTF-8 text") from None
    except yaml.YAMLError as error:
        raise SearchSpaceError(f"{path}: {_yaml_message(error)}") from None
    if not isinstance(document, dict):
        raise SearchSpaceError(f"{path}: expected a mapping with 'description' and 'parameters'")
    _check_names(path, document)
    try:
        space = SpaceFile.model_validate({**document, "name": path.stem})
    except ValidationError as error:
        raise SearchSpaceError(f"{path}: {_validation_message(error)}") from None
    _check_values(path, space)
    return space


class _StrictLoader(yaml.SafeLoader):
    """SafeLoader that refuses a key given twice, which YAML forbids and PyYAML lets pass."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[Any] = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if not isinstance(key, str):
                raise yaml.constructor.ConstructorError(None, None, f"key {key!r} is not text", key_node.start_mark)
            if key in seen:
                raise yaml.constructor.ConstructorError(None, None, f"key {key!r} stands twice", key_node.start_mark)
            seen.add(key)
        return super().construct_mapping(node, deep)


def _yaml_message(error: yaml.YAMLError) -> str:
    mark = getattr(error, "problem_mark", None)
    where = f"line {mark.line + 1}: " if mark is not None else ""
    return where + str(getattr(error, "problem", None) or error).splitlines()[0]


def _check_names(path: Path, document: dict[str, Any]) -> None:
    """Give unknown names a suggestion before anything else is looked at."""
    for key in document:
        if key not in ("description", "parameters", "rules"):
            expected = ("description", "parameters", "rules")
            raise SearchSpaceError(f"{path}: {key!r} is unknown{suggestion(key, expected)}")
    parameters = document.get("parameters")
    named = list(parameters) if isinstance(parameters, dict) else []
    for value in parameters.values() if isinstance(parameters, dict) else ():
        when = value.get("when") if isinstance(value, dict) else None
        named += list(when) if isinstance(when, dict) else []
    for rule in document.get("rules") or ():
        forbid = rule.get("forbid") if isinstance(rule, dict) else None
        named += list(forbid) if isinstance(forbid, dict) else []
    for name in named:
        if name not in PARAMETERS:
            raise SearchSpaceError(f"{path}: parameter {name!r} is unknown{suggestion(str(name), PARAMETERS)}")


def _validation_message(error: ValidationError) -> str:
    first = error.errors()[0]
    where = ".".join(str(part) for part in first["loc"] if part not in ("literal['lattice']",))
    where = where.replace(".tuple[union[bool,int,str,none],...]", "")
    if first["type"] == "extra_forbidden":
        key = str(first["loc"][-1])
        known = (*Parameter.model_fields, *ForbidRule.model_fields)
        return f"{where}: {key!r} is unknown{suggestion(key, known)}"
    return f"{where}: {first['msg'].removeprefix('Value error, ')}"


def _check_values(path: Path, space: SpaceFile) -> None:
    """Refuse values that no configuration could take."""
    for name, parameter in space.parameters.items():
        if parameter.choices == "lattice":
            if name != "per_device_train_batch_size":
                raise SearchSpaceError(f"{path}: parameters.{name}.choices: 'lattice' is for the micro-batch only")
            continue
        for value in parameter.choices:
            _check_value(path, name, value)
    names = list(space.parameters)
    for name, parameter in space.parameters.items():
        for other in parameter.when:
            if other not in names[: names.index(name)]:
                raise SearchSpaceError(f"{path}: parameters.{name}.when: {other!r} is not a parameter above it")
    for name in space.parameters:
        if name.startswith("adapter.") and "adapter" not in space.parameters:
            raise SearchSpaceError(f"{path}: parameters.{name}: there is no parameter 'adapter'")


def _check_value(path: Path, name: str, value: Scalar) -> None:
    try:
        make_config({"per_device_train_batch_size": 1, **_with_adapter(name), name: value})
    except ValidationError as error:
        raise SearchSpaceError(
            f"{path}: parameters.{name}.choices: {value!r} is no value for it ({error.errors()[0]['msg']})"
        ) from None
    except KeyError:
        raise SearchSpaceError(
            f"{path}: parameters.{name}.choices: {value!r} is unknown{suggestion(str(value), ADAPTERS)}"
        ) from None


def _with_adapter(name: str) -> dict[str, Scalar]:
    return {"adapter": "lora"} if name.startswith("adapter.") else {}


def make_config(point: dict[str, Scalar]) -> TrainConfig:
    """Return the configuration at `point`: a value for each parameter, an adapter's fields behind a dot.

    Raises:
        pydantic.ValidationError: A value doesn't fit its field.
        KeyError: The adapter is unknown.
    """
    fields: dict[str, Any] = {k: v for k, v in point.items() if not k.startswith("adapter")}
    kind = point.get("adapter")
    if kind is not None:
        options = {k.removeprefix("adapter."): v for k, v in point.items() if k.startswith("adapter.")}
        fields["adapter"] = ADAPTERS[str(kind)](**options)
    return TrainConfig(**fields)
