"""The knobs of a configuration: points of a search space, changes against the baseline, and the words for both.

A point has plain values by name of parameter; nested fields are named 'adapter.rank'. It may have fields that its kind
of adapter lacks, as when a search changes the kind alone; `fitting` leaves them out, and `make_config` refuses them.

`--fix` and `--only` name a knob by its short name, its field with hyphens, or the field of TrainingArguments; fields of
any kind of adapter are `adapter-FIELD`; a knob that a loop declares comes first. Values are validated when a
configuration is made of them.
"""

import functools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType, NoneType
from typing import Any, NamedTuple, get_args

from pydantic import ValidationError

from autotune.errors import InputError, complaint, suggestion
from autotune.training.arguments import effective_tf32
from autotune.values.config import KNOBS, OF_DDP, Allowance, Difference, Parallelism, Scalar, TrainConfig, knob_values
from autotune.values.model import EXPERTS_IMPLEMENTATIONS
from autotune.values.problem import Change, Problem
from autotune.values.techniques import ADAPTERS, Adapter, kinds_with, why_not
from autotune.values.workload import OwnKnobs

MICRO_BATCH = "per_device_train_batch_size"

ATTENTION = ("sdpa", "eager", "flash_attention_2", "flash_attention_3", "flex_attention")

_ADAPTER = "adapter."
_PARALLEL = "parallelism."
OWN = "own."

# Names of parameters: fields of TrainConfig, 'parallelism.FIELD', each kind's 'adapter.FIELD', a loop's 'own.NAME'.
_OF_ADAPTERS = dict.fromkeys(f"{_ADAPTER}{f}" for kind in ADAPTERS.values() for f in kind.model_fields if f != "kind")
PARAMETERS = frozenset((*KNOBS, *_OF_ADAPTERS))


def is_nested(parameter: str) -> bool:
    """Return whether the parameter makes the value of a field together with others."""
    return parameter == "adapter" or "." in parameter


def make_config(point: Mapping[str, Scalar]) -> TrainConfig:
    """Return the configuration at `point`; raises pydantic's ValidationError, or KeyError for an unknown adapter."""

    def nested(prefix: str) -> dict[str, Scalar]:
        return {name.removeprefix(prefix): value for name, value in point.items() if name.startswith(prefix)}

    fields: dict[str, Any] = {name: value for name, value in point.items() if not is_nested(name)}
    if own := nested(OWN):
        fields["own"] = own
    if parallel := nested(_PARALLEL):
        fields["parallelism"] = Parallelism.model_validate(parallel)
    if (kind := point.get("adapter")) is not None:
        fields["adapter"] = ADAPTERS[str(kind)].model_validate(nested(_ADAPTER))
    return TrainConfig(**fields)


@functools.lru_cache(maxsize=4096, typed=True)
def valid(name: str, value: Scalar) -> Any:
    """Return the value of a field of `TrainConfig`, checked once for all points; no check is of several fields."""
    return getattr(TrainConfig(**{MICRO_BATCH: 1, name: value}), name)


def make_point(config: TrainConfig) -> dict[str, Scalar]:
    point: dict[str, Scalar] = {}
    for name in TrainConfig.model_fields:
        value = getattr(config, name)
        if name == "adapter":
            point[name] = value.kind if value is not None else None
            if value is not None:
                point |= {f"{_ADAPTER}{field}": v for field, v in value.model_dump(exclude={"kind"}).items()}
        elif name == "parallelism":
            point |= {f"{_PARALLEL}{field}": getattr(value, field) for field in Parallelism.model_fields}
        elif name == "own":
            point |= {f"{OWN}{knob}": v for knob, v in value.model_dump().items()}
        else:
            point[name] = str(value) if name == "precision" else value
    return point


def differing(config: TrainConfig, baseline: TrainConfig) -> dict[str, Scalar]:
    """Return the values of `config` that `--fix` has to name beside `baseline`, without the number of devices."""
    point, of_baseline = make_point(config), make_point(baseline)
    usual = make_point(make_config(fitting({"adapter": point["adapter"]}, of_baseline)))
    usual |= {"adapter": of_baseline["adapter"], f"{_PARALLEL}world_size": config.parallelism.world_size}
    return {name: value for name, value in point.items() if value != usual.get(name)}


def has_field(kind: Scalar, parameter: str) -> bool:
    """Return whether `parameter` exists with that kind of adapter; `kind` None: without an adapter."""
    if not parameter.startswith(_ADAPTER):
        return True
    return kind is not None and parameter.removeprefix(_ADAPTER) in ADAPTERS[str(kind)].model_fields


# Knobs of one kind of sharding, or of DDP.
OF_SHARDING = (*OF_DDP, "wrapping", "offload", "replicas")


def fitting(point: Mapping[str, Scalar], origin: Mapping[str, Scalar]) -> dict[str, Scalar]:
    """Return `origin` updated by `point`; another kind of adapter or sharding has its own fields, with its defaults."""
    whole = {**origin, **point}
    kind = whole.get("adapter")
    idle = {k for k in origin if k.startswith(_ADAPTER)} if kind != origin.get("adapter") else set[str]()
    if any(whole.get(name) != origin.get(name) for name in ("parallelism.sharding", "parallelism.world_size")):
        idle |= {f"parallelism.{name}" for name in OF_SHARDING}
    return {k: v for k, v in whole.items() if has_field(kind, k) and (k in point or k not in idle)}


def problem(parameter: str, value: Scalar) -> str | None:
    """Return why `value` is invalid for `parameter`, or None; a value of another type, such as '8', is invalid."""
    if (reason := why_not(parameter, value)) is not None:
        return f"{value!r}: {reason}"
    # TrainConfig itself checks other parameters.
    known = {"attn_implementation": ATTENTION, "experts_implementation": EXPERTS_IMPLEMENTATIONS}.get(parameter)
    if known is not None and value is not None and value not in known:
        near = suggestion(str(value), known) or f"; there are {', '.join(known)}"
        return f"{value!r} is unknown{near}"
    if parameter == "adapter" and value is not None and value not in ADAPTERS:
        return f"{value!r} is unknown{suggestion(str(value), ADAPTERS)}"
    kinds = kinds_with(parameter.removeprefix(_ADAPTER)) if parameter.startswith(_ADAPTER) else (None,)
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


def shown_value(value: Any) -> str:
    return "none" if value is None else value.shown if isinstance(value, Adapter) else str(value)


def changes(config: TrainConfig, problem: Problem) -> tuple[Change, ...]:
    return tuple(
        Change(knob=knob, before=shown_value(before), after=shown_value(after), allowance=allowance)
        for knob, before, after, allowance in _differences(config, problem)
    )


def allowance_of(config: TrainConfig, problem: Problem) -> Allowance:
    return Allowance.deepest(allowance for *_, allowance in _differences(config, problem))


def _differences(config: TrainConfig, problem: Problem) -> Iterator[tuple[str, Any, Any, Allowance]]:
    """Yield the knobs that differ: name, the baseline's value, the configuration's, and the class of the change."""
    baseline, hardware = problem.baseline, problem.hardware
    rounds = effective_tf32(config, hardware) != effective_tf32(baseline, hardware)  # a compiler switches it on
    values = zip(KNOBS.items(), knob_values(baseline), knob_values(config), strict=True)
    for (name, knob), before, after in values:
        if before != after:
            change = Difference(before, after, problem.facts, config.precision, config.is_adapted, rounds)
            yield name, before, after, Allowance(knob.allowance(change) if callable(knob.allowance) else knob.allowance)
    step = problem.workload.own_step
    for name, declared in step.own.items() if step is not None else ():
        if (before := getattr(baseline.own, name)) != (after := getattr(config.own, name)):
            yield f"{OWN}{name}", before, after, declared.allowance


def shown_changes(changed: Iterable[Change]) -> str:
    """Return changes in words: 'precision bf16, micro-batch 16', or 'the baseline' without any."""
    return ", ".join(f"{short_name(c.knob)} {c.after}" for c in changed) or "the baseline"


def short_name(knob: str) -> str:
    return getattr(KNOBS.get(knob), "short", None) or knob.removeprefix(OWN)


class KnobOption(NamedTuple):
    """A knob as `--fix` and `--only` name it."""

    parameter: str  # name in search spaces, such as 'adapter.rank'
    option: str  # such as 'adapter-rank'
    may_be_none: bool = False


@functools.cache
def knobs() -> tuple[KnobOption, ...]:
    found = []
    for name, knob in KNOBS.items():
        may_be_none = NoneType in get_args(knob.field.annotation)
        found.append(KnobOption(name, knob.short or name.replace("_", "-"), may_be_none))
        if name == "adapter":  # and the fields that some kinds of adapters have
            found += [KnobOption(own, _hyphened(own)) for own in _OF_ADAPTERS]
    return tuple(found)


def in_words(parameter: str, value: Scalar) -> str:
    """Return a value of a parameter of a space as `--fix` takes it: 'precision=bf16', 'tf32=false', 'compile=none'."""
    option = next((knob.option for knob in knobs() if knob.parameter == parameter), parameter.removeprefix(OWN))
    return f"{option}={str(value).lower() if isinstance(value, bool) else 'none' if value is None else value}"


def refused(error: ValidationError) -> InputError:
    """Return the error of an invalid configuration as one line about the value of `--fix`."""
    first = error.errors()[0]
    if not first["loc"]:  # about several options together
        return InputError(complaint(first))
    field = str(first["loc"][0])
    names = (field, f"adapter.{field}", f"parallelism.{field}")
    knob = next((knob for knob in knobs() if knob.parameter in names), KnobOption(field, field))
    none = ", or none" * (knob.may_be_none and first["type"] == "literal_error")
    return InputError(f"--fix {knob.option}={first['input']}: {complaint(first)}{none}")


# TrainingArguments that stand for values of a knob: its option, the value if the argument is true, and if it is false.
_SWITCHES = {
    "bf16": ("precision", "bf16", "fp32"),
    "fp16": ("precision", "fp16", "fp32"),
    "gradient_checkpointing": ("checkpointing", "full", "none"),
    "torch_compile": ("compile", "inductor", "none"),
}
# Names that people try in place of a knob's, with advice.
_MEANT = {
    "gradient-accumulation-steps": "follows from micro-batch and --global-batch; name micro-batch",
    "batch-size": "name micro-batch, the samples of a device at once, or give --global-batch, those of a step",
    **dict.fromkeys(("lora-r", "lora-rank", "adapter-r"), "name adapter-rank"),
    "lora-alpha": "name adapter-alpha",
}
_TRUTHS = {**dict.fromkeys(("true", "yes", "on", "1"), True), **dict.fromkeys(("false", "no", "off", "0"), False)}


def knob_named(name: str, option: str, own: Iterable[str] = ()) -> KnobOption:
    """Return the knob of a name: 'micro-batch', 'per_device_train_batch_size', 'bf16', or one of a loop's `own`."""
    if (declared := next((one for one in own if _hyphened(one) == _hyphened(name)), None)) is not None:
        return KnobOption(f"{OWN}{declared}", declared)
    names = ((knob, (knob.parameter, knob.parameter.removeprefix(_PARALLEL), knob.option)) for knob in knobs())
    known, plain = {_hyphened(one): knob for knob, words in names for one in words}, name.strip().lower()
    if (found := known.get(_hyphened(_SWITCHES.get(plain, (plain,))[0]))) is not None:
        return found
    if (meant := _MEANT.get(_hyphened(name))) is not None:
        raise InputError(f"{option} {name}: {meant}")
    near = suggestion(name, (*own, *known, *(knob.parameter for knob in knobs()), *_SWITCHES))
    others = ", ".join((*own, *(knob.option for knob in knobs())))
    raise InputError(f"{option} {name}: no such knob{near or f'; there are {others}'}")


def fixed_words(written: Sequence[str], own: OwnKnobs = MappingProxyType({})) -> tuple[str, ...]:
    """Return values of `--fix` by the options of the knobs: 'micro-batch=8' for 'per_device_train_batch_size=8'."""
    values = fixed_values(written, own)
    return tuple(in_words(knob.parameter, values[knob.parameter]) for knob in _fixed(written, own))


def fixed_values(written: Sequence[str], own: OwnKnobs = MappingProxyType({})) -> dict[str, Scalar]:
    """Return values of `--fix`, such as 'precision=bf16', by parameter of a search space; `own`: a loop's knobs."""
    given, point = _fixed(written, own), dict[str, Scalar]()
    kind = next((value for knob, value in given.items() if knob.parameter == "adapter"), "lora")
    for knob, value in given.items():
        said = f"--fix {knob.option}={value}"
        if knob.parameter.startswith(OWN):
            choices = {f"--fix {in_words(knob.parameter, choice)}": choice for choice in own[knob.option].choices}
            if said not in choices:
                raise InputError(f"{said}: expected {_either(tuple(choices))}")
            point[knob.parameter] = choices[said]
            continue
        if (reason := why_not(knob.parameter, value)) is not None:
            raise InputError(f"{said}: {reason}")
        if knob.parameter == "adapter" and value not in (*ADAPTERS, "none"):
            raise InputError(f"{said}: expected {_either((*ADAPTERS, 'none'))}{suggestion(value, ADAPTERS)}")
        point[knob.parameter] = None if knob.may_be_none and value == "none" else value
        if knob.parameter.startswith("adapter."):
            having = kinds_with(knob.parameter.removeprefix("adapter."))
            if kind == "none":
                raise InputError(f"{said}: there is no adapter (--fix adapter=none)")
            if kind not in having:
                raise InputError(f"{said}: {kind} has none (--fix adapter={_either(having)} has)")
            point.setdefault("adapter", kind)
    try:
        valid = make_point(make_config({"per_device_train_batch_size": 1, **point}))
    except ValidationError as error:
        raise refused(error) from None
    for knob in given:
        if (reason := problem(knob.parameter, valid[knob.parameter])) is not None:
            raise InputError(f"--fix {knob.option}: {reason}")
    return {name: valid[name] for name in point}


def _fixed(written: Sequence[str], own: OwnKnobs) -> dict[KnobOption, str]:
    found: dict[KnobOption, str] = {}
    for word in written:
        name, _, text = (part.strip() for part in word.partition("="))
        if not text:
            raise InputError(f"--fix {word}: expected a knob and its value, such as precision=bf16")
        knob = knob_named(name, "--fix", own)
        is_known = not knob.parameter.startswith(OWN)
        if is_known and knob.option == "devices":
            raise InputError(f"--fix {word}: say --devices {text}")
        if is_known and (switch := _SWITCHES.get(name.lower())) is not None:
            if text.lower() not in _TRUTHS:
                raise InputError(f"--fix {word}: expected true or false")
            text = switch[1 if _TRUTHS[text.lower()] else 2]
        if found.setdefault(knob, text) != text:
            raise InputError(f"--fix {word}: {knob.option} is fixed at {found[knob]} too; drop one of the two")
    return found


def _hyphened(name: str) -> str:
    return name.strip().lower().replace("_", "-").replace(".", "-")


def _either(words: tuple[str, ...]) -> str:
    return f"{', '.join(words[:-1])} or {words[-1]}" if len(words) > 1 else words[0]


def put_back(config: TrainConfig, baseline: TrainConfig, knobs: Sequence[str]) -> TrainConfig:
    """Return `config` with the baseline's values for `knobs`, named as in `Change`; ValueError: it can't be."""
    document = config.model_dump()
    for knob in knobs:
        parent, dot, field = knob.partition(".")
        value = getattr(baseline, parent)
        document[parent] = {**document[parent], field: getattr(value, field)} if dot else value
    return TrainConfig.model_validate(document)
