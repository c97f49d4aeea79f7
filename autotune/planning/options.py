"""The options of a search, each defined once: its type, default, help text and the group in which help lists it.

The command line makes its options from these fields (`autotune.cli.options`); a test compares the signature of
`autotune.find` with them. Values may be given as text: '24GiB' and 25769803776 are the same memory. The command line
takes defaults from a project's pyproject.toml, too.
"""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BeforeValidator, ConfigDict, Field, NonNegativeInt, PositiveInt, ValidationError
from pydantic.config import JsonDict
from pydantic.fields import FieldInfo

from autotune.errors import InputError, first_complaint, suggestion
from autotune.space.knobs import fixed_words, knob_named
from autotune.units import parse_count, parse_memory, parse_time_s
from autotune.value import Value
from autotune.values.budget import Effort
from autotune.values.config import LARGEST_BATCH, LARGEST_SEED
from autotune.values.knob import Allowance
from autotune.values.placement import Engine, Fleet
from autotune.values.workload import LONGEST_SAMPLE, RecipeName

AnyOptions = TypeVar("AnyOptions", bound="WorkloadOptions")

# Groups in which a command's help lists its options, in this order.
MODEL: JsonDict = {"group": "Model and data"}
CHANGES: JsonDict = {"group": "What may change"}
LIMITS: JsonDict = {"group": "Limits"}
PLACES: JsonDict = {"group": "Where it runs"}
OUTPUT: JsonDict = {"group": "Output"}
GROUPS = tuple(str(group["group"]) for group in (MODEL, CHANGES, LIMITS, PLACES, OUTPUT))

_NEXT = re.compile(r",(?=[^,=]*=)")  # the comma before the next KNOB=VALUE; a value may have commas
_SHOWN = 100  # characters of a refused value


def _as_text(parse: Callable[[str], float]) -> BeforeValidator:
    """Return a validator that parses text by `parse` and leaves other values to pydantic."""
    return BeforeValidator(lambda value: parse(value) if isinstance(value, str) else value)


def _names(value: object) -> object:
    """Return the names in text such as 'wandb, MLflow' or in a list: in lower case, each once."""
    listed = [value] if isinstance(value, str) else value
    if not isinstance(listed, list | tuple):
        return value
    names = (name.strip().lower() for part in listed for name in str(part).split(","))
    return tuple(dict.fromkeys(name for name in names if name))


def _knobs(value: object) -> object:
    """Return the options of the knobs in text such as 'micro-batch,optim' or in a list."""
    names = _names(value)
    return tuple(dict.fromkeys(knob_named(n, "--only").option for n in names)) if isinstance(names, tuple) else names


def _fixed(value: object) -> object:
    """Return words 'KNOB=VALUE' by the knobs' options, of text, of a list, or of values by knob."""
    if isinstance(value, Mapping):
        value = [f"{name}={'none' if held is None else held}" for name, held in value.items()]
    listed = [value] if isinstance(value, str) else value
    if not isinstance(listed, list | tuple):
        return value
    return fixed_words([word.strip() for part in listed for word in _NEXT.split(str(part)) if word.strip()])


Name = Annotated[str, BeforeValidator(lambda value: str(value) if isinstance(value, Path) else value)]
Bytes = Annotated[PositiveInt, _as_text(parse_memory)]
Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False), _as_text(parse_time_s)]
Count = Annotated[float, Field(gt=0, allow_inf_nan=False), _as_text(parse_count)]
Fixed = Annotated[tuple[str, ...], BeforeValidator(_fixed)]


class WorkloadOptions(Value):
    """What is trained, and on which device. None means the default, which may depend on the device.

    The alias of a field is the name of its option if the name of the field ends in a unit.
    """

    model_config = ConfigDict(validate_by_name=True, validate_by_alias=True)

    model: Name = Field(description="Catalogue name, directory with config.json, or hub id.", json_schema_extra=MODEL)
    task: str | None = Field(
        None, description="Head to train; by default that of config.json.", json_schema_extra=MODEL
    )
    seq_len: PositiveInt | None = Field(
        None, description="Tokens of a sample, or frames [512; CPU 64].", json_schema_extra=MODEL
    )
    target_len: PositiveInt | None = Field(
        None, description="Decoder tokens [as --seq-len; speech 128].", json_schema_extra=MODEL
    )
    images: PositiveInt | None = Field(None, description="Images of a sample of text [1].", json_schema_extra=MODEL)
    image_size: PositiveInt | None = Field(None, description="Edge of these, in pixels.", json_schema_extra=MODEL)
    freeze_vision: bool = Field(False, description="Train all but the vision part.", json_schema_extra=MODEL)
    global_batch: PositiveInt | Literal["any"] | None = Field(
        None, description="Samples per step, or 'any' [64; CPU 8].", json_schema_extra=MODEL
    )
    recipe: RecipeName | None = Field(
        None, description="Post-training by TRL: sft, dpo, reward, kto, grpo, rloo.", json_schema_extra=MODEL
    )
    prompt_len: PositiveInt | None = Field(
        default=None,
        le=LONGEST_SAMPLE,
        description="Tokens of a recipe's prompt [256; CPU 32].",
        json_schema_extra=MODEL,
    )
    completion_len: PositiveInt | None = Field(
        default=None,
        le=LONGEST_SAMPLE,
        description="Tokens of its completion [256; CPU 32].",
        json_schema_extra=MODEL,
    )
    generations: PositiveInt | None = Field(
        default=None,
        le=LARGEST_BATCH,
        description="Completions of a prompt, grpo and rloo [8; 2].",
        json_schema_extra=MODEL,
    )
    revision: str | None = Field(None, description="Revision of a hub id.", json_schema_extra=MODEL)
    trust_remote_code: bool = Field(False, description="Run the model's own code.", json_schema_extra=MODEL)
    device: str = Field("auto", description="Of this machine: auto, cpu, cuda or cuda:N.", json_schema_extra=PLACES)
    memory_bytes: Bytes | None = Field(
        None, alias="memory", description="Device memory to stay within, such as 24GiB.", json_schema_extra=LIMITS
    )


class SearchOptions(WorkloadOptions):
    """The options of `autotune find` and `autotune.find`."""

    wait: bool = Field(True, description="Don't wait for a quiet machine.", json_schema_extra=PLACES)
    data: Name | None = Field(
        None, description="JSONL, CSV, Parquet or text; default: synthetic.", json_schema_extra=MODEL
    )
    text_field: str | None = Field(None, description="Column of --data that holds the text.", json_schema_extra=MODEL)
    reward: str | None = Field(
        None, description="Reward function, as MODULE:FUNCTION [built in].", json_schema_extra=MODEL
    )
    baseline: Name | None = Field(
        None, description="JSON of your TrainingArguments to compare with.", json_schema_extra=CHANGES
    )
    allow: Allowance = Field(
        Allowance.OPTIMIZER,
        description="What may change: exact, numerics, optimizer, method.",
        json_schema_extra=CHANGES,
    )
    effort: Effort = Field(
        Effort.STANDARD, description="How long to search: quick, standard, thorough.", json_schema_extra=LIMITS
    )
    fix: Fixed = Field((), description="KNOB=VALUE in every configuration and the baseline.", json_schema_extra=CHANGES)
    only: Annotated[tuple[str, ...], BeforeValidator(_knobs)] = Field(
        (), description="Knobs to search; the others stay as in the baseline.", json_schema_extra=CHANGES
    )
    space: Name | None = Field(None, description="Built-in search space or YAML file.", json_schema_extra=CHANGES)
    max_trials: PositiveInt | None = Field(
        default=None, le=1_000_000, description="Trials of the search.", json_schema_extra=LIMITS
    )
    max_time_s: Seconds | None = Field(
        None, alias="max_time", description="Time of the whole search, such as 10m.", json_schema_extra=LIMITS
    )
    train_steps: PositiveInt | None = Field(  # at a microsecond each, the most take eleven days
        default=None, le=10**12, description="Minimise the time of a run of so many steps.", json_schema_extra=MODEL
    )
    train_tokens: Count | None = Field(
        None, description="Minimise the time of a run of so many tokens, as 20B.", json_schema_extra=MODEL
    )
    check_loss: NonNegativeInt | None = Field(
        default=None, le=100_000, description="Steps whose losses must agree [20; quick 0].", json_schema_extra=LIMITS
    )
    exhaustive: bool = Field(False, description="Measure every point; write table.jsonl.", json_schema_extra=LIMITS)
    repeat: PositiveInt = Field(
        default=1, le=1000, description="Times each point is measured (--exhaustive).", json_schema_extra=LIMITS
    )
    seed: int = Field(
        42, ge=0, le=LARGEST_SEED, description="Seed of weights, data and the search.", json_schema_extra=MODEL
    )
    devices: PositiveInt | Literal["all"] | None = Field(
        None, description="Spread each training over so many, or all [1].", json_schema_extra=PLACES
    )
    workers: PositiveInt | None = Field(
        None, description="Trials at once, each on a device or cores [1].", json_schema_extra=PLACES
    )
    engine: Engine = Field(
        "local", description="What runs trials: local, or ray for a cluster.", json_schema_extra=PLACES
    )
    address: str | None = Field(
        None, description="Address of the Ray cluster [RAY_ADDRESS, else one here].", json_schema_extra=PLACES
    )
    kind: str | None = Field(
        None, description="Part of a device's name in a mixed cluster [most nodes].", json_schema_extra=PLACES
    )
    record: bool = Field(True, description="Don't use or add to `autotune history`.", json_schema_extra=OUTPUT)
    report_to: Annotated[tuple[str, ...], BeforeValidator(_names)] = Field(
        (), description="Tell tensorboard, wandb, mlflow of each trial.", json_schema_extra=OUTPUT
    )
    output: Name | None = Field(None, description="Write the answer here too.", json_schema_extra=OUTPUT)

    @property
    def fleet(self) -> Fleet:
        """The places where trials run."""
        devices = self.devices if isinstance(self.devices, int) else 1
        return Fleet(engine=self.engine, workers=self.workers, devices=devices, address=self.address, kind=self.kind)


def options_of(kind: type[AnyOptions], given: Mapping[str, Any]) -> AnyOptions:
    """Return options of `kind` with the values `given`, by the user's names: 'memory', not 'memory_bytes'.

    Raises:
        InputError: A value is impossible; the message names the option.
    """
    try:
        return kind.model_validate(given)
    except ValidationError as error:
        first = error.errors()[0]
        option = str(first["loc"][0]).replace("_", "-")
        raise InputError(f"--{option} {str(first['input'])[:_SHOWN]}: {first_complaint(error)}") from None


# Options that a project has no default for, as they run code: who runs a command in somebody else's project need not
# trust its models or its cluster.
_NOT_OF_A_PROJECT = ("trust_remote_code", "address")

# Options that name files: those of a project lie beside its pyproject.toml. What isn't a file there may be a name.
_FILES, _FILES_OR_NAMES = ("data", "baseline", "output"), ("model", "space")


def project_defaults(folder: Path) -> tuple[Path, dict[str, Any]] | None:
    """Return the nearest pyproject.toml with a table [tool.autotune] and its values by option; None if there is none.

    It lies in `folder` or, within a git repository, in a folder above it, up to the root of the repository.

    Raises:
        InputError: The file can't be read, or a key or a value of the table is wrong.
    """
    above = [folder, *folder.parents]
    depth = next((depth for depth, parent in enumerate(above) if (parent / ".git").exists()), 0)
    for parent in above[: depth + 1]:
        path = Path(os.path.relpath(parent / "pyproject.toml", folder))  # as it is shown
        try:
            document = tomllib.loads((folder / path).read_text(encoding="utf-8"))
        except FileNotFoundError:
            continue
        except OSError as error:
            raise InputError(f"{path}: {error.strerror}") from None
        except ValueError as error:
            raise InputError(f"{path}: not TOML: {error}") from None
        if "autotune" in document.get("tool", {}):
            found = _project_values(path, document["tool"]["autotune"])
            for name in (n for n in (*_FILES, *_FILES_OR_NAMES) if n in found):
                file = path.parent / found[name]
                if name in _FILES or (folder / file).exists():
                    found[name] = str(file)
                if name == "output" and not (folder / file).resolve().is_relative_to(parent.resolve()):
                    raise InputError(
                        f"{path}: [tool.autotune] output: outside of the project; say it on the command line"
                    )
            return path, found
    return None


def _project_values(path: Path, table: Any) -> dict[str, Any]:
    """Return the values of [tool.autotune] by option, as the command line takes them; errors name file and key."""
    if not isinstance(table, dict):
        raise InputError(f"{path}: tool.autotune: expected a table, not {table!r}")
    known = [name for name in fields_by_name(SearchOptions) if name not in _NOT_OF_A_PROJECT]
    values = {key.replace("-", "_"): value for key, value in table.items()}
    for key in table:
        name = key.replace("-", "_")
        if name in _NOT_OF_A_PROJECT:
            raise InputError(f"{path}: [tool.autotune] {key}: say it on the command line")
        if name not in known:
            near = suggestion(key, [option.replace("_", "-") for option in known])
            raise InputError(f"{path}: [tool.autotune] {key}: no such option{near}")
    try:
        read = options_of(SearchOptions, {"model": "", **values}).model_dump(mode="json", by_alias=True)
    except InputError as error:
        raise InputError(f"{path}: [tool.autotune] {error}") from None
    return {name: read[name] for name in values}


def fields_by_name(kind: type[WorkloadOptions]) -> dict[str, FieldInfo]:
    """Return the fields of options by the user's names: 'memory', not 'memory_bytes'."""
    return {field.alias or name: field for name, field in kind.model_fields.items()}
