"""Reads search spaces from YAML files; each mistake is reported in one line with file, path and expected value.

::

    description: for whom, how big
    parameters:                       # in the order of their expected effect, which is the order of trying
      precision:
        choices: [fp32, bf16]
      adapter:
        choices: [null, lora]
      adapter.rank:
        choices: [8, 64]
        when: {adapter: [lora]}       # the parameter exists only then
      torch_compile_backend:
        choices: [null, inductor]
        from_effort: standard         # too expensive for a quick search
    rules:
      - forbid: {optim: [adamw_bnb_8bit], precision: [fp32]}
        reason: why it is not worth a trial
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal, NoReturn

import yaml
from pydantic import BeforeValidator, Field, ValidationError

from autotune.errors import InputError, SearchSpaceError, complaint, suggestion
from autotune.space.knobs import ATTENTION, MICRO_BATCH, PARAMETERS, Scalar, has_field, problem
from autotune.training.adapters import ATTENTION_MODULES, IA3_MODULES
from autotune.value import Value, read_named
from autotune.values.budget import Effort
from autotune.values.model import EXPERTS_IMPLEMENTATIONS, HUB_EXPERTS, ModelFacts, Task


def _check_list(value: Any, *, of: str, or_else: str = "") -> None:
    """Raise ValueError unless `value` is a list of scalars that isn't empty."""
    if not isinstance(value, list | tuple):
        raise ValueError(f"expected a list, not {value!r}{or_else}")
    if not value:
        raise ValueError(f"needs at least one {of}")
    for item in value:
        if not isinstance(item, Scalar):
            raise ValueError(f"{item!r} is no text, number, true, false or null")


def _choices(value: Any) -> Any:
    if value != "lattice":
        _check_list(value, of="choice", or_else=" (or 'lattice', for the micro-batch)")
        if len(set(map(repr, value))) != len(value):
            raise ValueError("has a choice twice")
    return value


def _condition(value: Any) -> Any:
    for name, values in value.items() if isinstance(value, dict) else ():
        try:
            _check_list(values, of="value")
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from None
    return value


Condition = Annotated[dict[str, tuple[Scalar, ...]], BeforeValidator(_condition)]


class Parameter(Value):
    """One parameter: its choices, and when it exists."""

    choices: Annotated[tuple[Scalar, ...] | Literal["lattice"], BeforeValidator(_choices)] = Field(
        description="values, or 'lattice' for the micro-batch: divisors of the global batch"
    )
    when: Condition = Field(default_factory=dict)
    from_effort: Effort = Effort.QUICK


class ForbidRule(Value):
    """A rule that refuses a configuration if every named parameter has one of the values."""

    forbid: Condition = Field(min_length=1)
    reason: str = Field(min_length=1)


class SpaceFile(Value):
    """A search space as written, not yet bound to a workload."""

    name: str
    description: str = Field(min_length=1)
    parameters: dict[str, Parameter] = Field(min_length=1)
    rules: tuple[ForbidRule, ...] = ()


def spaces_directory() -> Path:
    """Return the directory of the built-in spaces: in the installed package, or beside it in a checkout."""
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
        document = read_yaml(path)
    except InputError as error:
        raise SearchSpaceError(str(error)) from None
    if not isinstance(document, dict):
        raise SearchSpaceError(f"{path}: expected a mapping with 'description' and 'parameters'")
    try:
        space = SpaceFile.model_validate({**document, "name": path.stem})
    except ValidationError as error:
        raise SearchSpaceError(f"{path}: {_validation_message(error)}") from None
    _check_values(path, space)
    return space


def read_yaml(path: Path) -> Any:
    """Return the document in a file of YAML, or of JSON, which is YAML.

    Raises:
        InputError: It can't be read.
    """
    try:
        return yaml.load(read_named(path).decode(), Loader=_StrictLoader)
    except OSError as error:
        reason = str(error.strerror)
    except UnicodeDecodeError:
        reason = "not UTF-8 text"
    except RecursionError:
        reason = "nested too deeply"
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"line {mark.line + 1}: " if mark is not None else ""
        reason = where + str(getattr(error, "problem", None) or error).splitlines()[0]
    except ValueError as error:  # of a whole number of thousands of digits
        reason = str(error)
    raise InputError(f"{path}: {reason}")


class _StrictLoader(yaml.SafeLoader):
    """SafeLoader that refuses duplicate keys, which YAML forbids and PyYAML accepts."""

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


def _validation_message(error: ValidationError) -> str:
    errors = error.errors()
    first = next((e for e in errors if e["type"] == "extra_forbidden"), errors[0])  # which may be a missing one's name
    where = ".".join(map(str, first["loc"]))
    if first["type"] == "extra_forbidden":
        key = str(first["loc"][-1])
        if len(first["loc"]) == 1:
            return f"{key!r} is unknown{suggestion(key, SpaceFile.model_fields)}"
        known = (*Parameter.model_fields, *ForbidRule.model_fields)
        return f"{where}: {key!r} is unknown{suggestion(key, known)}"
    return f"{where}: {complaint(first)}"


def _check_values(path: Path, space: SpaceFile) -> None:
    """Refuse names that are no parameters, and values that no configuration can have."""

    def refuse(where: str, words: str) -> NoReturn:
        raise SearchSpaceError(f"{path}: {where}: {words}")

    def check(where: str, name: str, values: tuple[Scalar, ...]) -> None:
        if (found := next(filter(None, (problem(name, value) for value in values)), None)) is not None:
            refuse(where, found)

    conditions = (*(p.when for p in space.parameters.values()), *(rule.forbid for rule in space.rules))
    for name in (*space.parameters, *(other for condition in conditions for other in condition)):
        if name not in PARAMETERS:
            raise SearchSpaceError(f"{path}: parameter {name!r} is unknown{suggestion(name, PARAMETERS)}")
    above: list[str] = []
    for name, parameter in space.parameters.items():
        at = f"parameters.{name}"
        if parameter.choices != "lattice":
            check(f"{at}.choices", name, parameter.choices)
        elif name != MICRO_BATCH:
            refuse(f"{at}.choices", "'lattice' is for the micro-batch only")
        for other, values in parameter.when.items():
            check(f"{at}.when.{other}", other, values)
            if other not in above:
                refuse(f"{at}.when", f"{other!r} is not a parameter above it")
        for kind in parameter.when.get("adapter", ()):
            if not has_field(kind, name):
                refuse(f"{at}.when.adapter", f"{kind} has no {name.partition('.')[2]}")
        if name.startswith("adapter.") and "adapter" not in space.parameters:
            refuse(at, "there is no parameter 'adapter'")
        above.append(name)
    for number, rule in enumerate(space.rules):
        for name, values in rule.forbid.items():
            check(f"rules.{number}.forbid.{name}", name, values)


def facts_for(space: SpaceFile) -> ModelFacts:
    """Return the facts about the model of a user's own loop, which is assumed to support all parameters."""
    named = set(space.parameters)
    has_experts = bool(named & {"experts_implementation", "experts_per_token", "expert_capacity"})
    ways = EXPERTS_IMPLEMENTATIONS if has_experts else ()
    return ModelFacts(
        task=Task.OWN,
        parameters=0,
        attn_implementations=ATTENTION if "attn_implementation" in named else (),
        experts=8 if has_experts else 0,
        experts_implementations=tuple(kind for kind in ways if kind not in HUB_EXPERTS),
        experts_per_token=2 if has_experts else None,
        supports_checkpointing=True,
        has_dropout=True,  # it may; compiling then changes the random numbers
        liger="use_liger_kernel" in named,
        chunks_loss="chunked_loss" in named,
        linear_modules=tuple(dict.fromkeys((*ATTENTION_MODULES, *IA3_MODULES))),
    )
