"""Reads search spaces from YAML files; each mistake is reported in one line with file, path and expected value.

The form of a file: docs/search-spaces.md.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BeforeValidator, Field, ValidationError

from autotune.errors import SearchSpaceError, complaint, one_line, suggestion
from autotune.space.knobs import ATTENTION, MICRO_BATCH, PARAMETERS, has_field, problem
from autotune.training.adapters import ATTENTION_MODULES, IA3_MODULES
from autotune.value import Value
from autotune.values.budget import Effort
from autotune.values.config import Scalar
from autotune.values.model import EXPERTS_IMPLEMENTATIONS, ModelFacts, Task


def _listed(value: Any) -> Any:
    """Refuse anything but a list of values, in fewer words than pydantic's."""
    if not isinstance(value, list | tuple) or not value or not all(isinstance(item, Scalar) for item in value):
        raise ValueError(f"expected a list of texts, numbers, true, false or null, not {value!r}")
    if len(set(map(repr, value))) != len(value):
        raise ValueError("has a value twice")
    return value


Values = Annotated[tuple[Scalar, ...], BeforeValidator(_listed)]
Condition = dict[str, Values]

# Aliases (*name) of a file. Nested in each other they multiply: these stand for some 6,500 values at most.
_MOST_ALIASES = 24


class Parameter(Value):
    """One parameter: its choices, and when it exists."""

    choices: Annotated[
        tuple[Scalar, ...] | Literal["lattice"], BeforeValidator(lambda v: v if v == "lattice" else _listed(v))
    ] = Field(description="values, or 'lattice' for the micro-batch: divisors of the global batch")
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

    @property
    def facts(self) -> ModelFacts:
        """Facts about the model of a user's own loop, which is assumed to support all parameters."""
        named = set(self.parameters)
        has_experts = bool(named & {"experts_implementation", "experts_per_token", "expert_capacity"})
        return ModelFacts(
            task=Task.OWN,
            parameters=0,
            attn_implementations=ATTENTION if "attn_implementation" in named else (),
            experts=8 if has_experts else 0,
            experts_implementations=EXPERTS_IMPLEMENTATIONS if has_experts else (),
            experts_per_token=2 if has_experts else None,
            supports_checkpointing=True,
            has_dropout=True,  # it may; compiling then changes the random numbers
            liger="use_liger_kernel" in named,
            chunks_loss="chunked_loss" in named,
            linear_modules=tuple(dict.fromkeys((*ATTENTION_MODULES, *IA3_MODULES))),
        )


def spaces_directory() -> Path:
    """Return the directory of the built-in spaces: in the installed package, or beside it in a checkout."""
    inside = Path(__file__).parents[1] / "search_spaces"
    return inside if inside.is_dir() else Path(__file__).parents[2] / "search_spaces"


def builtin_spaces() -> tuple[str, ...]:
    return tuple(sorted(path.stem for path in spaces_directory().glob("*.yaml")))


def load_space(reference: str) -> SpaceFile:
    """Return the built-in space `reference`, or the one in the file of that path."""
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
    try:
        text = path.read_bytes().decode()
        aliases = sum(isinstance(event, yaml.AliasEvent) for event in yaml.parse(text, Loader=yaml.SafeLoader))
        if aliases > _MOST_ALIASES:
            raise SearchSpaceError(f"{path}: more than {_MOST_ALIASES} aliases (*name); write their values out")
        document = yaml.load(text, Loader=_StrictLoader)
    except OSError as error:
        raise SearchSpaceError(f"{path}: {error.strerror}") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"line {mark.line + 1}: " if mark is not None else ""
        words = str(getattr(error, "problem", None) or error).splitlines()[0]
        raise SearchSpaceError(f"{path}: {where}{words}") from None
    except (ValueError, RecursionError) as error:  # no UTF-8, a number of thousands of digits
        raise SearchSpaceError(f"{path}: not YAML: {one_line(error)}") from None
    if not isinstance(document, dict):
        raise SearchSpaceError(f"{path}: expected a mapping with 'description' and 'parameters'")
    try:
        space = SpaceFile.model_validate({**document, "name": path.stem})
    except ValidationError as error:
        # An unknown key first: it may be a missing one, misspelt.
        first = min(error.errors(), key=lambda e: e["type"] != "extra_forbidden")
        where, words = ".".join(map(str, first["loc"])), complaint(first)
        if first["type"] == "extra_forbidden":
            known = (*SpaceFile.model_fields, *Parameter.model_fields, *ForbidRule.model_fields)
            words = f"is unknown{suggestion(str(first['loc'][-1]), known)}"
        raise SearchSpaceError(f"{path}: {where}: {words}") from None
    if (mistake := next(_mistakes(space), None)) is not None:
        raise SearchSpaceError(f"{path}: {mistake}")
    return space


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


def _mistakes(space: SpaceFile) -> Iterator[str]:
    """Yield names that are no parameters and values that no configuration can have; the first may cause the others."""

    def of(where: str, condition: Mapping[str, tuple[Scalar, ...]]) -> Iterator[str]:
        for name, values in condition.items():
            if name not in PARAMETERS:
                yield f"parameter {name!r} is unknown{suggestion(name, PARAMETERS)}"
            yield from (f"{where}.{name}: {wrong}" for value in values if (wrong := problem(name, value)) is not None)

    above: list[str] = []
    for name, parameter in space.parameters.items():
        at = f"parameters.{name}"
        yield from of("parameters", {name: () if parameter.choices == "lattice" else parameter.choices})
        if parameter.choices == "lattice" and name != MICRO_BATCH:
            yield f"{at}.choices: 'lattice' is for the micro-batch only"
        yield from of(f"{at}.when", parameter.when)
        yield from (f"{at}.when: {n!r} is not a parameter above it" for n in parameter.when if n not in above)
        kinds = parameter.when.get("adapter", ())
        yield from (f"{at}.when.adapter: {k} has no {name.partition('.')[2]}" for k in kinds if not has_field(k, name))
        if name.startswith("adapter.") and "adapter" not in above:
            yield f"{at}: there is no parameter 'adapter' above it"
        above.append(name)
    for number, rule in enumerate(space.rules):
        yield from of(f"rules.{number}.forbid", rule.forbid)
