"""The options of a search, each defined once: its type, default, help text and the group in which help lists it.

The command line makes its options from these fields (`autotune.cli.console`), and `takes_options` the signatures and
docstrings of `autotune.find` and `autotune.estimate`. Values may be given as text.
"""

import functools
import inspect
import re
import textwrap
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, Literal, TypeVar, cast, get_args, get_origin

from pydantic import BeforeValidator, ConfigDict, Field, NonNegativeInt, PositiveInt, ValidationError, ValidationInfo
from pydantic.fields import FieldInfo

from autotune.errors import InputError, first_complaint, suggestion
from autotune.space.knobs import fixed_values, fixed_words, in_words, knob_named
from autotune.units import parse_count, parse_memory, parse_time_s
from autotune.value import Value
from autotune.values.budget import LEAST_LOSS_STEPS, Effort
from autotune.values.config import LARGEST_BATCH, LARGEST_SEED, Allowance, Scalar
from autotune.values.estimate import Evaluation
from autotune.values.problem import Engine, Fleet
from autotune.values.workload import LONGEST_SAMPLE, OwnKnobs, RecipeName

AnyOptions = TypeVar("AnyOptions", bound="WorkloadOptions")
AnyFunction = TypeVar("AnyFunction", bound=Callable[..., Any])

# Groups in which a command's help lists its options, in this order.
MODEL, CHANGES, LIMITS = "Model and data", "What may change", "Limits"
PLACES, OUTPUT = "Where it runs", "Output"
GROUPS = (MODEL, CHANGES, LIMITS, PLACES, OUTPUT)


def option(group: str, words: str, default: Any = None, **more: Any) -> Any:
    """Return the field of an option, which help lists in `group` with these words."""
    return Field(default, description=words, json_schema_extra={"group": group}, **more)


def _as_text(parse: Callable[[str], float]) -> BeforeValidator:
    return BeforeValidator(lambda value: parse(value) if isinstance(value, str) else value)


def _names(value: object) -> object:
    """Return the names in text such as 'wandb, MLflow' or in a list: in lower case, each once."""
    listed = [value] if isinstance(value, str) else value
    if not isinstance(listed, list | tuple):
        return value
    names = (name.strip().lower() for part in listed for name in str(part).split(","))
    return tuple(dict.fromkeys(name for name in names if name))


def _knobs(value: object, info: ValidationInfo) -> object:
    names = _names(value)
    if names == () and value:
        raise ValueError("expected names of knobs, as in --only micro-batch,optim")
    if not isinstance(names, tuple):
        return names
    return tuple(dict.fromkeys(knob_named(name, "--only", info.context or ()).option for name in names))


def _fixed(value: object, info: ValidationInfo) -> object:
    """Return words 'KNOB=VALUE', by the knobs' options, from text, a list, or values by knob."""
    if isinstance(value, Mapping):
        value = [in_words(str(name), held) for name, held in value.items()]
    listed = [value] if isinstance(value, str) else value
    if not isinstance(listed, list | tuple):
        return value
    # The comma before the next KNOB=VALUE; a value may have commas.
    words = (word.strip() for part in listed for word in re.split(r",(?=[^,=]*=)", str(part)))
    return fixed_words([word for word in words if word], info.context or {})


Name = Annotated[str, BeforeValidator(lambda value: str(value) if isinstance(value, Path) else value)]
Device = Annotated[str, BeforeValidator(str)]  # of a torch.device
Bytes = Annotated[PositiveInt, _as_text(parse_memory)]
Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False), _as_text(parse_time_s)]
Count = Annotated[float, Field(gt=0, allow_inf_nan=False), _as_text(parse_count)]
Fixed = Annotated[tuple[str, ...], BeforeValidator(_fixed)]
KnobNames = Annotated[tuple[str, ...], BeforeValidator(_knobs)]
Names = Annotated[tuple[str, ...], BeforeValidator(_names)]


class WorkloadOptions(Value):
    """Model, data and device of a training. None means the default, which may depend on the device.

    The alias of a field whose name ends in a unit is the name of its option.
    """

    model_config = ConfigDict(validate_by_name=True, validate_by_alias=True)

    model: Name = option(MODEL, "Catalogue name, directory with config.json, or hub id.", ...)
    task: str | None = option(MODEL, "Head to train; by default that of config.json.")
    seq_len: PositiveInt | None = option(MODEL, "Tokens of a sample, or frames [512; CPU 64].", le=LONGEST_SAMPLE)
    target_len: PositiveInt | None = option(MODEL, "Decoder tokens [as --seq-len; speech 128].", le=LONGEST_SAMPLE)
    images: PositiveInt | None = option(MODEL, "Images of a sample of text [1].")
    image_size: PositiveInt | None = option(MODEL, "Edge of these, in pixels.")
    freeze_vision: bool = option(MODEL, "Train all but the vision part.", False)
    global_batch: PositiveInt | Literal["any"] | None = option(MODEL, "Samples per step, or 'any' [64; CPU 8].")
    recipe: RecipeName | None = option(MODEL, "Post-training by TRL: sft, dpo, reward, kto, grpo, rloo.")
    prompt_len: PositiveInt | None = option(MODEL, "Tokens of a recipe's prompt [256; CPU 32].", le=LONGEST_SAMPLE)
    completion_len: PositiveInt | None = option(MODEL, "Tokens of its completion [256; CPU 32].", le=LONGEST_SAMPLE)
    generations: int | None = option(MODEL, "Completions of a prompt, grpo and rloo [8; 2].", ge=2, le=LARGEST_BATCH)
    revision: str | None = option(MODEL, "Revision of a hub id.")
    trust_remote_code: bool = option(MODEL, "Run the model's own code.", False)
    device: Device = option(PLACES, "Device of this machine: auto, cpu, cuda or cuda:N.", "auto")
    memory_bytes: Bytes | None = option(LIMITS, "Device memory to stay within, such as 24GiB.", alias="memory")


class SearchOptions(WorkloadOptions):
    """The options of `autotune find` and `autotune.find`."""

    data: Name | None = option(MODEL, "JSONL, CSV, Parquet or text; default: synthetic.")
    text_field: str | None = option(MODEL, "Column of --data that holds the text.")
    reward: str | None = option(MODEL, "Reward function, as MODULE:FUNCTION [built in].")
    baseline: Name | None = option(CHANGES, "JSON of your TrainingArguments to compare with.")
    against: Name | None = option(CHANGES, "Earlier best-config.json: its winner is measured again and compared.")
    allow: Allowance = option(CHANGES, "What may change: exact, numerics, optimizer, method.", Allowance.OPTIMIZER)
    effort: Effort = option(LIMITS, "How long to search: quick, standard, thorough.", Effort.STANDARD)
    fix: Fixed = option(CHANGES, "KNOB=VALUE in every configuration and the baseline.", ())
    only: KnobNames = option(CHANGES, "Knobs to search; the others stay as in the baseline.", ())
    space: Name | None = option(CHANGES, "Built-in search space or YAML file.")
    max_trials: PositiveInt | None = option(LIMITS, "Trials of the search.", le=1_000_000)
    max_time_s: Seconds | None = option(LIMITS, "Time of the whole search, such as 10m.", alias="max_time")
    # At a microsecond each, the most steps take eleven days.
    train_steps: PositiveInt | None = option(MODEL, "Minimise the time of a run of so many steps.", le=10**12)
    train_tokens: Count | None = option(MODEL, "Minimise the time of a run of so many tokens, as 20B.")
    check_loss: NonNegativeInt | None = option(LIMITS, "Steps whose losses must agree [20; quick 0].", le=100_000)
    seed: int = option(MODEL, "Seed of weights, data and the search.", 42, ge=0, le=LARGEST_SEED)
    devices: Annotated[
        tuple[PositiveInt | Literal["all"], ...],
        BeforeValidator(lambda value: _names([value] if hasattr(value, "__index__") else value or ())),  # NumPy's too
    ] = option(PLACES, "Spread each training over so many; several, or all, to compare, the baseline's first [1].", ())
    nodes: PositiveInt | None = option(PLACES, "Machines of a Ray cluster that --devices are on [1].")
    workers: PositiveInt | None = option(PLACES, "Trials at once, each on a GPU [1].")
    engine: Engine = option(PLACES, "What runs trials: local, or ray for a cluster.", "local")
    address: str | None = option(PLACES, "Address of the Ray cluster [RAY_ADDRESS, else one here].")
    kind: str | None = option(PLACES, "Part of a device's name in a mixed cluster [most nodes].")
    record: bool = option(OUTPUT, "Use, and add to, `autotune history`.", True)
    report_to: Names = option(OUTPUT, "Tell tensorboard, wandb, mlflow of each trial.", ())
    output: Name | None = option(OUTPUT, "Write the answer here too.")

    @property
    def fleet(self) -> Fleet:
        devices = max((number for number in self.devices if isinstance(number, int)), default=1)
        given = {name: getattr(self, name) for name in ("workers", "address", "kind")}
        engine: Engine = "ray" if (self.nodes or 1) > 1 else self.engine
        return Fleet(engine=engine, devices=devices, nodes=self.nodes or 1, **given)

    def loss_steps(self) -> int:
        """Return the optimizer steps over which losses are compared; 0: none; InputError: they can't be."""
        asked, is_free = self.check_loss, self.global_batch == "any"
        if asked and is_free:
            why = "with --global-batch any no two configurations take the same steps; name a global batch"
            raise InputError(f"--check-loss {asked}: {why}")
        if asked and asked < LEAST_LOSS_STEPS:
            raise InputError(f"--check-loss {asked}: fewer than {LEAST_LOSS_STEPS} steps tell nothing")
        return asked if asked is not None else 0 if is_free else self.effort.loss_steps


class EstimateOptions(WorkloadOptions):
    """The options of an estimate."""

    memory_bytes: Bytes | None = option(LIMITS, "Device memory; without --gpu some GPU of this size.", alias="memory")
    gpu: str | None = option(PLACES, "Device of `autotune gpus` [this machine's]; the command takes all.")
    devices: PositiveInt = option(PLACES, "Devices that share the training.", 1, le=LARGEST_BATCH)
    nodes: PositiveInt | None = option(PLACES, "Machines that --devices are on [of 8 each].")
    # 10^9 bytes/s, one way
    network_gb_s: float | None = option(PLACES, "GB/s of a node to others [25 a device].", gt=0, allow_inf_nan=False)
    host_memory_bytes: Bytes | None = option(PLACES, "Host memory of a node [this machine's].", alias="host_memory")
    allow: Allowance | None = option(CHANGES, "What a ranking may change, as of find [optimizer].")
    tokens: Count | None = option(MODEL, "Length of a run to cost, such as 20B or 300e9.")
    eval_batch: PositiveInt | None = option(
        MODEL, "Batch of an evaluation, which then counts [with --eval-samples 8].", le=LARGEST_BATCH
    )
    eval_samples: PositiveInt | None = option(MODEL, "Samples whose logits compute_metrics keeps.", le=10**9)
    explain: bool = option(OUTPUT, "List what is alive at the peak, by module and operator.", False)
    fix: Fixed = option(CHANGES, "KNOB=VALUE of the configuration to estimate.", ())

    @property
    def point(self) -> dict[str, Scalar]:
        """The knobs that are given, by the names of search spaces; several devices are one of them."""
        several = {"parallelism.world_size": self.devices} if self.devices > 1 else {}
        return {**fixed_values(self.fix), **several}

    @property
    def evaluation(self) -> Evaluation | None:
        if self.eval_batch is None and self.eval_samples is None:
            return None
        given = {} if self.eval_batch is None else {"batch": self.eval_batch}
        return Evaluation(**given, kept_samples=self.eval_samples or 0)


def options_of(kind: type[AnyOptions], given: Mapping[str, Any], own: OwnKnobs | None = None) -> AnyOptions:
    """Return options with the values `given`, which may name a loop's `own` knobs; InputError: one is impossible."""
    try:
        return kind.model_validate(given, context=own)
    except ValidationError as error:
        first = error.errors()[0]
        option, given_as = str(first["loc"][0]).replace("_", "-"), str(first["input"])
        if "\n" in given_as or "object at 0x" in given_as:  # an object of somebody's own, such as a model
            given_as = f"of type {type(first['input']).__name__}"
        raise InputError(f"--{option} {given_as[:100]}: {first_complaint(error)}") from None


def fields_by_name(kind: type[WorkloadOptions]) -> dict[str, FieldInfo]:
    """Return the fields of options by the user's names: 'memory', not 'memory_bytes'."""
    return {field.alias or name: field for name, field in kind.model_fields.items()}


def takes_options(kind: type[WorkloadOptions], only: Collection[str] = ()) -> Callable[[AnyFunction], AnyFunction]:
    """Return a decorator that lists the options of `kind`, or `only` some, in a function's signature and docstring."""

    def decorated(function: AnyFunction) -> AnyFunction:
        own = inspect.signature(function)
        parameters = {name: p for name, p in own.parameters.items() if p.kind is not p.VAR_KEYWORD}
        listed = ""
        for name, field in fields_by_name(kind).items():
            if name not in parameters and (not only or name in only):
                parameters[name] = inspect.Parameter(
                    name, inspect.Parameter.KEYWORD_ONLY, default=field.default, annotation=_python_type(field)
                )
                words = f"{name}: {field.description}"
                listed += textwrap.fill(words, 120, initial_indent=" " * 8, subsequent_indent=" " * 12) + "\n"

        @functools.wraps(function)
        def call(*arguments: Any, **options: Any) -> Any:
            if unknown := [name for name in options if name not in parameters]:
                said = f"{function.__name__}() got an unexpected keyword argument {unknown[0]!r}"
                raise TypeError(said + suggestion(unknown[0], parameters))
            return function(*arguments, **options)

        call.__doc__ = (function.__doc__ or "").replace("        **options: The options below.\n", listed)
        call.__signature__ = own.replace(parameters=[*parameters.values()])  # type: ignore[attr-defined]
        return cast(AnyFunction, call)

    return decorated


def _python_type(field: FieldInfo) -> str:
    """Return the annotation of an option in Python, which takes text as well."""
    if field.annotation is bool:
        return "bool"
    if field.default == ():
        takes_numbers = get_args(get_args(field.annotation)[0])  # beside a word
        return "str | int | Sequence[str | int]" if takes_numbers else "str | Sequence[str] | Mapping[str, Any]"
    names = {"str": None}
    for part in get_args(field.annotation) or (field.annotation,):
        kind = get_args(part)[0] if get_origin(part) is Annotated else part
        named = {int: "int", float: "float", str: "Path" if part is not kind else "str", NoneType: "None"}
        names |= {named[kind]: None} if kind in named else {}
    return " | ".join(names)
