"""Tunes the user's own code: a Trainer, a function that makes one, a script that trains with one, or a loop.

A Trainer or a script is first run up to the beginning of its training (`execution.describe`). Its own arguments are the
baseline; knobs that the code itself decides stay. A loop (`find(step=...)`) is tuned by the knobs that it is said to
honour, and by those that it declares; a step is run at two micro-batches before, to check that it consumes the global
batch, and whether its gradient depends on the split (`execution.gradients`).
"""

import inspect
import shlex
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from autotune.errors import CodeError, InputError, LoopError, suggestion
from autotune.planning.launchers import code_of, without_launcher
from autotune.planning.options import SearchOptions, WorkloadOptions
from autotune.planning.plan import SearchPlan
from autotune.planning.planner import Describe, Start, Subject, baseline_of, default_space
from autotune.planning.workload import check_batch
from autotune.space.file import Parameter, SpaceFile, load_space
from autotune.space.knobs import MICRO_BATCH, OWN, PARAMETERS, make_config, make_point, problem
from autotune.stand_in.device import is_rehearsal
from autotune.training.baseline import UserArguments, baseline_config
from autotune.training.trainer_pickle import maker_of, pickled
from autotune.value import sha256_of
from autotune.values.config import OwnValues, Parallelism, Precision, Scalar, TrainConfig
from autotune.values.hardware import cuda_count
from autotune.values.model import ModelFacts, ModelSpec, Task
from autotune.values.trial import DescribeRequest, Description, ExamineRequest
from autotune.values.workload import ACCUMULATION, CODE_FILE, STEP_FILE, OwnCode, OwnKnob, OwnStep, Traits, Workload

# Options that contradict the user's code, with the reason of the refusal.
_OF_MODEL_AND_DATA = (*WorkloadOptions.model_fields, "data", "text_field", "reward")
DECIDED_BY_CODE: dict[str, str] = {
    **{name: "your code decides it" for name in _OF_MODEL_AND_DATA if name not in ("device", "memory_bytes")},
    "global_batch": "it is that of your own TrainingArguments",
    "baseline": "your own TrainingArguments are the baseline",
    "workers": "a {given} is tuned one trial at a time",
}


class UserTrainer(Subject):
    """The user's own Trainer, the function that makes it, which is pickled, or the command line of its script."""

    def __init__(
        self,
        options: SearchOptions,
        *,
        trainer: Any = None,
        make_trainer: Callable[[], Any] | None = None,
        script: Sequence[str] | None = None,
    ) -> None:
        if script is not None:
            script = shlex.split(script) if isinstance(script, str) else [str(word) for word in script]
        given = "script" if script is not None else "trainer" if trainer is not None else "make_trainer"
        for name, reason in DECIDED_BY_CODE.items():
            value = getattr(options, name)
            if value not in (None, "", False) and (name, value) != ("workers", 1):
                raise InputError(f"{name}: can't be used with {given}: {reason.format(given=given)}; leave it out")
        options = options.model_copy(update={"workers": 1})
        if script is not None:
            _, processes, nodes, *_ = without_launcher(script)
            if processes is not None:
                if options.devices not in ((), (processes,)):
                    raise InputError(f"--devices: your launcher starts {processes} processes; leave one of them out")
                devices = (processes, processes)  # "all", and no fewer
                options = options.model_copy(update={"devices": devices, "nodes": max(nodes, options.nodes or 1)})
            self.code = code_of(script)
            super().__init__(options, self.code.name)
            return
        make = maker_of(trainer) if trainer is not None else make_trainer
        if not callable(make):
            raise InputError(f"make_trainer: expected a function that returns a Trainer, not {type(make).__name__}")
        called = type(trainer).__name__ if trainer is not None else getattr(make, "__qualname__", type(make).__name__)
        content = pickled(make, f"{given}: {called}")
        shown, here = f"{given} {called}", str(Path.cwd())
        self.code = OwnCode(kind="pickle", shown=shown, directory=here, sha256=sha256_of(content))
        super().__init__(options, self.code.name, {CODE_FILE: content})

    def plan(self, start: Start, describe: Describe) -> SearchPlan:
        """Return the plan of the workload found in the code; its trials aren't recorded, since the code may change."""
        shown, options = self.code.shown, self.options
        spec = ModelSpec(reference=shown, name=shown, source="own", model_type="your own code", kind="own", config={})
        workload = Workload(
            model=spec, task=Task.OWN, sequence_length=1, global_batch_size=None, seed=options.seed, own_code=self.code
        )
        space = start.space()
        try:
            about = describe(DescribeRequest(workload=workload))
        except CodeError as error:  # it may end at once where it is alone, without the other processes
            if not is_rehearsal() or not (isinstance(error, LoopError) or start.devices[0] > 1):
                raise
            if "deepspeed" in (self.code.launched or {}):
                raise InputError(f"{shown}: a loop of its own under DeepSpeed can't be rehearsed") from None
            workload = workload.model_copy(update={"own_code": self.code.model_copy(update={"is_loop": True})})
            alone = TrainConfig(per_device_train_batch_size=1, parallelism=Parallelism(world_size=start.devices[0]))
            return start.plan_from(workload, Description(facts=space.facts), space, baseline=alone, record=False)
        found = about.own
        assert found is not None
        arguments = UserArguments(found.arguments, found.fixed, "your TrainingArguments")
        devices, hardware = start.devices[0], start.of_baseline
        batch = check_batch(arguments.global_batch_size * devices, "your TrainingArguments: the global batch")
        baseline = baseline_config(arguments, batch, about.facts, hardware)
        baseline = baseline.model_copy(update={"packing": found.packs})
        if found.weights == "bfloat16" and baseline.precision is Precision.FP32:
            baseline = baseline.model_copy(update={"precision": Precision.PURE_BF16})
        held = {knob: {"value": getattr(baseline, knob), "reason": reason} for knob, reason in found.held.items()}
        traits = {name: getattr(found, name) for name in Traits.model_fields}
        code = OwnCode.model_validate({**dict(self.code), **traits, "held": held})
        seen = {name: getattr(found, name) for name in ("task", "sequence_length", "target_length")}
        seen |= {"model": found.spec, "global_batch_size": batch, "fixed_arguments": found.fixed}
        workload = workload.model_copy(update={**seen, "own_code": code})
        on = f" on {devices} devices" if devices > 1 else ""
        start.notes.append(f"global batch {batch} samples, that of your own arguments{on}, which are the baseline")
        if self.options.devices in ((), (1,)) and hardware.kind == "cuda" and (there := cuda_count()) > 1:
            start.notes.append(
                f"tuned for one of {there} GPUs; without a launcher and autotune your Trainer copies the model to all "
                f"of them (DataParallel), for steps of {there * batch} samples; --devices {there} tunes for all"
            )
        start.notes.extend(too_long(workload, about.facts))
        return start.plan_from(workload, about, space, baseline=baseline, record=False)


def too_long(workload: Workload, facts: ModelFacts) -> list[str]:
    """Return a note if samples are longer than the model's positions, which only positions that are computed allow."""
    longest, length = facts.max_sequence_length, workload.sequence_length
    if longest is None or length <= longest:
        return []
    ends = f"a model that looks its positions up, as GPT-2 does, fails beyond the {longest} that it has"
    return [f"samples have up to {length} tokens: {ends}"]


Knobs = Sequence[str] | Mapping[str, Sequence[Any] | OwnKnob | None]

# The one knob of `Parallelism` that a loop can honour, by its last name.
_SHARED = "parallelism.model_parallel"

_NOT_HONOURED = {
    "parallelism": "--devices has the numbers of devices, and model_parallel how many share a sample",
    **dict.fromkeys(("packing", "pad_to_multiple_of", "train_sampling_strategy"), "your function makes the batches"),
    **dict.fromkeys(
        ("experts_implementation", "experts_per_token", "expert_capacity"),
        "nothing is known of the experts of a model that your function makes",
    ),
}

# Options that apply only to trainings that autotune sets up itself, with the reason of the refusal.
_NOT_WITH_STEP: dict[str, str] = {
    **dict.fromkeys(("data", "text_field", "target_len"), "your function reads its own data"),
    **dict.fromkeys(("images", "image_size", "freeze_vision"), "your function makes the model and its samples"),
    "recipe": "your function trains in its own way",
    "check_loss": "the losses of your function can't be compared: whether its data come in the same order isn't known",
}


class UserLoop(Subject):
    """The user's own training loop: a function that sets it up for a configuration and returns its step.

    `step` takes a configuration, `accumulation_steps` if it has an argument of that name, and the value of each knob of
    its own; `knobs` names the fields of TrainConfig that it honours, or maps them to choices, others to an `OwnKnob`.
    """

    def __init__(self, options: SearchOptions, step: Callable[..., Any], knobs: Knobs | None) -> None:
        if not callable(step):
            raise InputError(f"step: expected a function that takes a TrainConfig, not {type(step).__name__}")
        if not knobs and options.space is None:
            example = "knobs=['per_device_train_batch_size', 'precision'], or a search space"
            raise InputError(f"step: say what your function honours, such as {example}")
        if knobs and options.space is not None:
            raise InputError("knobs and space both say what is varied; drop one of the two")
        for option, reason in _NOT_WITH_STEP.items():
            if getattr(options, option):
                raise InputError(f"{option} can't be used with a step of your own: {reason}")
        for option in ("task", "seq_len"):
            if getattr(options, option) and not options.model:
                raise InputError(f"{option} can't be used with a step of your own, unless its model is named too")
        if options.fleet.engine != "local":
            raise InputError("engine: a step of your own runs on this machine; leave engine and nodes out")
        name = getattr(step, "__qualname__", type(step).__name__)
        content, (honoured, own) = pickled(step, f"step: {name}"), _checked(knobs or {})
        if options.model and (own or options.devices not in ((), (1,))):
            raise InputError("model: steps on several devices, or by knobs of your own, aren't predicted; leave it out")
        self.own = OwnStep(
            name=name,
            takes_accumulation=_takes_accumulation(step, name, own),
            knobs=honoured,
            own=own,
            directory=str(Path.cwd()),
            search_path=tuple(str(Path(entry).absolute()) for entry in sys.path),
            sha256=sha256_of(content),
        )
        super().__init__(options, options.model or name, {STEP_FILE: content})

    def plan(self, start: Start, describe: Describe) -> SearchPlan:
        """Return the plan, without checks and without the record, since a loop can only be timed.

        If the user names no model, facts that allow all knobs of the space stand for its own. A step of the baseline
        and one with another micro-batch are run, which tell the last facts.
        """
        options, name, kind = self.options, self.own.name, "your own loop"
        unknown = ModelSpec(reference=name, name=name, source="own", model_type=kind, kind="own", config={})
        model = None if options.model else (unknown, Task.OWN)
        usual = default_space(start.hardware.model_copy(update={"count": 1}))
        space = start.space(load_space(options.space) if options.space else space_of(self.own, usual))
        first = {n: p.choices[0] for n, p in space.parameters.items() if n == _SHARED or n.startswith(OWN)}
        devices, shared = start.devices[0], int(first.get(_SHARED) or 1)
        groups, rest = divmod(devices, shared)  # groups that read samples of their own
        if rest:
            raise InputError(f"knobs: model_parallel {shared} does not divide the {devices} devices (devices=N)")
        first["parallelism.world_size"] = devices
        readers = start.hardware.model_copy(update={"count": groups})
        workload = start.workload(readers, model)
        workload = workload.model_copy(update={"own_step": self.own})
        found = describe(start.inquiry(workload)) if options.model else Description(facts=space.facts)
        honoured = ", ".join(name.removeprefix(OWN) for name in space.parameters)
        trusted = f"that your function honours {honoured} is taken on trust; other fields of a configuration stay as "
        trusted += "they are and mean nothing to it"
        timed = "it is timed; it isn't evaluated or saved, and its trials aren't kept for later searches"
        start.notes.extend(f"your own loop: {note}" for note in (trusted, timed))
        baseline = make_point(baseline_of(workload, found.facts, readers, start.arguments))
        for knob, choices in self.own.knobs.items():
            if choices is not None and (options.baseline is None or baseline.get(knob) not in choices):
                batch, dividing = workload.global_batch_size, list(choices)
                if knob == MICRO_BATCH and batch is not None:
                    dividing = [size for size in choices if isinstance(size, int) and not batch % (size * groups)]
                if not dividing:
                    raise InputError(f"knobs: {knob}: none of {choices} divides the global batch of {batch}")
                first.setdefault(knob, dividing[0])
        config = make_config({**baseline, **first})
        plan = start.plan_from(
            workload, found, space, baseline=config, soak=False, loss_steps=0, record=False, options=None
        )
        # The largest smaller micro-batch fits where the baseline fits; without one the smallest larger one runs. With a
        # free global batch each micro-batch is another batch, and gradients can't be compared.
        mine, free = plan.baseline.per_device_train_batch_size, plan.workload.global_batch_size is None
        sizes = [] if free else [s for d in plan.search_space.dimensions if d.name == MICRO_BATCH for s in d.choices]
        others = [size for size in sizes if isinstance(size, int) and size != mine]
        other = max((size for size in others if size < mine), default=min(others, default=None))
        seen = describe(ExamineRequest(workload=plan.workload, facts=plan.facts, config=plan.baseline, other=other))
        return plan.model_copy(update={"facts": seen.facts, "notes": (*plan.notes, *seen.notes)})


def space_of(own: OwnStep, usual: str) -> SpaceFile:
    """Return the space of a user's knobs, in the built-in order; those without choices have the `usual` space's."""
    known: dict[str, Parameter] = {}
    for space in dict.fromkeys((usual, "default", "full")):
        known |= {name: p for name, p in load_space(space).parameters.items() if name not in known}
    named = {**own.knobs, **{f"{OWN}{name}": tuple(dict.fromkeys(knob.choices)) for name, knob in own.own.items()}}
    if "adapter" in named:  # who honours adapters honours their fields
        named = {**{n: None for n in known if n.startswith("adapter.")}, **named}
    parameters = {}
    for name in (*(n for n in known if n in named), *(n for n in named if n not in known)):
        choices = named[name]
        if choices is None and name not in known:
            raise InputError(f"knobs: {name} has no usual values; name them: knobs={{{name!r}: [...]}}")
        when = {} if choices is not None else known[name].when
        parameters[name] = Parameter(choices=known[name].choices if choices is None else choices, when=when)
    for name, parameter in parameters.items():
        missing = next((other for other in parameter.when if other not in parameters), None)
        if missing is not None:
            raise InputError(f"knobs: {name} exists only beside {missing}; name that as well")
    return SpaceFile(name="knobs", description=f"what {own.name} honours", parameters=parameters)


def _takes_accumulation(step: Callable[..., Any], name: str, own: Mapping[str, OwnKnob]) -> bool:
    try:
        signature = inspect.signature(step)
    except (TypeError, ValueError):
        return False
    takes = ACCUMULATION in signature.parameters
    try:
        signature.bind(None, **({ACCUMULATION: 1} if takes else {}), **own)
    except TypeError as error:
        call = f"{name}{signature} can't be called with a configuration ({', '.join((ACCUMULATION, *own))})"
        raise InputError(f"step: {call}: {error}") from None
    return takes


def own_knobs(knobs: Knobs | None) -> dict[str, OwnKnob]:
    """Return the knobs of the function's own by their names."""
    named = knobs if isinstance(knobs, Mapping) else {}
    return {str(name): knob for name, knob in named.items() if isinstance(knob, OwnKnob)}


def _checked(knobs: Knobs) -> tuple[dict[str, tuple[Scalar, ...] | None], dict[str, OwnKnob]]:
    """Return the fields of TrainConfig with their choices, and the knobs of the function's own."""
    if isinstance(knobs, str):
        raise InputError(f"knobs: expected a list of names, such as [{knobs!r}]")
    named = dict(knobs) if isinstance(knobs, Mapping) else dict.fromkeys(knobs)
    own = own_knobs(knobs)
    for name in own:
        if name in TrainConfig.model_fields or hasattr(OwnValues, name):
            raise InputError(f"knobs: {name} means something else already; give your own knob another name")
    given = {name: choices for name, choices in named.items() if not isinstance(choices, OwnKnob)}
    honoured = {_SHARED if name == _SHARED.partition(".")[2] else name: values for name, values in given.items()}
    for name, choices in honoured.items():
        if name not in (*TrainConfig.model_fields, *PARAMETERS):
            near = suggestion(str(name), TrainConfig.model_fields) or "; declare one of your own by OwnKnob"
            raise InputError(f"knobs: {name!r} is no field of TrainConfig{near}")
        if name in _NOT_HONOURED:
            raise InputError(f"knobs: {name}: {_NOT_HONOURED[name]}")
        if choices is not None and (isinstance(choices, str) or not isinstance(choices, Collection) or not choices):
            raise InputError(f"knobs: {name}: expected a list of values, not {choices!r}")
        for value in choices or ():
            if not isinstance(value, Scalar):
                raise InputError(f"knobs: {name}: {value!r} is no value for it")
            if (found := problem(name, value)) is not None:
                raise InputError(f"knobs: {name}: {found}")
    return {n: None if choices is None else tuple(dict.fromkeys(choices)) for n, choices in honoured.items()}, own
