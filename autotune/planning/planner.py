"""Makes the plan of a search from the user's options: device, memory, limits, workload, search space and baseline.

A `Subject` is tuned: a model that the user names, or the user's own Trainer, script or loop (`user_code`);
`Subject.plan` is the one way from options to a plan. An option that can't be used is refused by an InputError before
the first trial. Notes tell the user every default that was chosen.
"""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

from autotune.errors import InputError, MachineError
from autotune.execution.places import numbers_of, spread
from autotune.planning import workload as workloads
from autotune.planning.options import SearchOptions
from autotune.planning.plan import SearchPlan
from autotune.space.file import Parameter, SpaceFile, load_space
from autotune.space.knobs import fitting, fixed_values, knob_named, knobs, make_config, make_point
from autotune.space.rules import refusals
from autotune.training.baseline import NOTHING_GIVEN, UserArguments, baseline_config, read_arguments
from autotune.training.texts import checked_path
from autotune.units import show_memory, show_time
from autotune.value import write_bytes
from autotune.values.budget import Budget, Effort
from autotune.values.config import TrainConfig
from autotune.values.hardware import Hardware, why_untuned
from autotune.values.model import ModelFacts, ModelSpec, Task
from autotune.values.problem import Allotment, Objective
from autotune.values.trial import DescribeRequest, Description, Inquiry
from autotune.values.workload import Workload

Describe = Callable[[Inquiry], Description]  # has a child process answer


@dataclasses.dataclass(frozen=True)
class Start:
    """The beginning of a plan, settled before a process looks at the model or the user's code."""

    options: SearchOptions
    hardware: Hardware
    memory_bytes: int
    budget: Budget
    arguments: UserArguments  # the user's own, which are the baseline
    notes: list[str]  # what the user should know; planning adds to it

    @property
    def devices(self) -> tuple[int, ...]:
        """The numbers of devices that trainings are to have, that of the baseline first."""
        return numbers_of(self.hardware, self.options.devices)

    @property
    def of_baseline(self) -> Hardware:
        """The hardware of a trial of the baseline, whose `count` of devices may be less than the most."""
        return self.hardware.model_copy(update={"count": self.devices[0]})

    def space(self, given: SpaceFile | None = None) -> SpaceFile:
        """Return the search space, with the numbers of devices if they are several, and a replica for each machine."""
        found = given or load_space(self.options.space or default_space(self.hardware))
        own: dict[str, Parameter] = {}
        if len(self.devices) > 1:
            own["parallelism.world_size"] = Parameter(choices=self.devices)
        if (nodes := self.hardware.nodes) > 1 and "parallelism.sharding" in found.parameters:
            when = {"parallelism.sharding": ("fsdp_full", "fsdp_grad_op")}
            own["parallelism.replicas"] = Parameter(choices=(1, nodes), when=when)
        return found.model_copy(update={"parameters": {**found.parameters, **own}})

    def workload(self, hardware: Hardware, model: tuple[ModelSpec, Task] | None = None) -> Workload:
        """Return the workload of a search's trials, of the options' model or of `model`, with its global batch."""
        options, arguments, notes = self.options, self.arguments, self.notes
        if options.text_field and not options.data:
            raise InputError("--text-field: needs --data FILE")
        options = workloads.with_arguments_of_trl(options, hardware.kind, arguments)
        workload, ranks = workloads.workload_of(options, hardware.kind, notes, model), hardware.count or 1
        steps, source = arguments.searched.get("gradient_accumulation_steps", 1), arguments.source
        if options.global_batch == "any" and steps > 1:
            both = f"gradient_accumulation_steps {steps} and --global-batch any"
            raise InputError(f"{source}: {both}: drop one of the two")
        if options.baseline and options.global_batch != "any":
            own, asked = arguments.global_batch_size * ranks, options.global_batch
            if asked is not None and asked != own:
                how = f"per_device_train_batch_size x gradient_accumulation_steps{f' x {ranks} devices' * (ranks > 1)}"
                raise InputError(f"--global-batch {asked}: the baseline's is {own} ({how}); drop one of the two")
            batch: int | None = workloads.check_batch(own, f"{source}: the global batch")
        else:
            usual = -(-workloads.DEFAULT_GLOBAL_BATCH[hardware.kind] // ranks) * ranks  # which they can share evenly
            batch = workloads.global_batch_of(options, usual, notes, together=ranks > 1)
            if batch is not None and batch % ranks:
                below, above = batch // ranks * ranks, -(-batch // ranks) * ranks
                nearest = f"{below} and {above} do" if below else f"{above} does"
                raise InputError(f"--global-batch {batch}: {ranks} devices can't share it evenly; {nearest}")
        data = {"dataset": str(checked_path(options.data)) if options.data else None, "text_field": options.text_field}
        workload = workloads.with_batch(workload.model_copy(update=data), batch, notes)
        return workload.model_copy(update={"seed": options.seed, "fixed_arguments": arguments.fixed})

    def inquiry(self, workload: Workload) -> DescribeRequest:
        searched, fixed, source = self.arguments
        return DescribeRequest(workload=workload, arguments={**searched, **fixed}, source=source)

    def plan_from(self, workload: Workload, found: Description, space: SpaceFile, **changes: Any) -> SearchPlan:
        """Return the plan; `changes` are fields that the options don't decide.

        The values of `--fix` are in every configuration, the baseline too. Knobs of `--only` that the space lacks have
        the choices of 'default' and 'full', at every effort. The last notes are on the baseline's needs and the limits.
        """
        options, hardware, facts = self.options, self.hardware, found.facts
        workload = workload.model_copy(update={"lengths": found.lengths})
        if found.lengths is not None and workload.recipe is not None and workload.recipe.kind.generates:
            workload = workload.model_copy(update={"sequence_length": found.lengths.maximum})  # TRL cuts no prompts
        self.notes.extend(found.notes)
        for n in self.devices:
            if (workload.global_batch_size or 0) % n and workload.own_step is None:
                batch = f"the global batch of {workload.global_batch_size}"
                raise InputError(f"--devices {n}: they can't share {batch} evenly; leave it out, or use another batch")
        objective = Objective()
        if options.train_steps is not None:
            objective = Objective(run_samples=options.train_steps * (workload.global_batch_size or 1))
        elif options.train_tokens is not None:
            if workload.tokens_per_sample is None:
                why = "samples have no known number of tokens" if workload.recipe else f"{workload.task} has no tokens"
                raise InputError(f"--train-tokens: {why}; use --train-steps")
            objective = Objective(run_samples=options.train_tokens / workload.tokens_per_sample)
        plan = SearchPlan(
            workload=workload,
            facts=facts,
            hardware=hardware,
            memory_bytes=self.memory_bytes,
            budget=self.budget,
            allowance=options.allow,
            space=space,
            baseline=changes.pop("baseline", None) or baseline_of(workload, facts, self.of_baseline, self.arguments),
            objective=objective,
            soak=True,
            loss_steps=0 if workload.generates else options.loss_steps(),
            loss_insisted=bool(options.check_loss),
            record=options.record,
            report_to=options.report_to,
            fleet=options.fleet,
            options=options,
            output=options.output,
            notes=tuple(self.notes),
        ).model_copy(update=changes)
        notes = []
        if options.fix or options.only:
            plan = _restricted(plan, options)
            if options.fix:
                notes.append(f"in every configuration, the baseline too: {', '.join(options.fix)} (--fix)")
            if options.only:
                notes.append(f"only {', '.join(options.only)} searched (--only)")
        if parameters := facts.parameters:  # the model is known
            states = plan.least_states(plan.baseline)
            size = f"{parameters / 1e6:,.1f}M" if parameters >= 10**6 else f"{parameters:,}"
            excess = f": more than the budget of {show_memory(plan.memory_bytes)}" * (states > plan.memory_bytes)
            needs = f"the baseline needs {show_memory(states)} for weights, gradients and optimizer states alone"
            if workload.own_code is not None and "optim" in workload.own_code.held:  # whose states are unknown
                needs = f"weights alone take {show_memory(states)}"
            notes.append(f"{workload.model.name}: {size} parameters; {needs}, activations not counted{excess}")
        time_from = "--effort" if options.max_time_s is None else "--max-time"
        trials_from = "--effort" if options.max_trials is None else "--max-trials"
        time_said = show_time(plan.budget.max_time_s) + f" ({time_from})" * (time_from != trials_from)
        trials = f"{plan.budget.max_trials} trial{'s' * (plan.budget.max_trials != 1)}"
        notes.append(f"at most {time_said} and {trials} ({trials_from})")
        return plan.model_copy(update={"notes": (*plan.notes, *notes)})


class Subject:
    """A model that the user names, tuned with the Trainer. Subclasses tune the user's own code."""

    def __init__(self, options: SearchOptions, name: str, pickled: dict[str, bytes] | None = None) -> None:
        self.options = options
        self.name = name  # of the default run directory
        self.pickled = pickled or {}  # the user's code, by the name of its file

    def keep(self, run_directory: Path) -> None:
        """Write the user's pickled code to `data/` in the run directory, from where trials load it."""
        for name, content in self.pickled.items():
            (run_directory / "data").mkdir(exist_ok=True)
            write_bytes(content, run_directory / "data" / name)

    def plan(self, start: Start, describe: Describe) -> SearchPlan:
        """Return the plan, after a child process has looked at the model or the code."""
        workload = start.workload(start.of_baseline)
        space = start.space()
        return start.plan_from(workload, describe(start.inquiry(workload)), space)


def start_of(options: SearchOptions, allotment: Allotment) -> Start:
    """Return the beginning of a plan; MachineError: the machine's GPUs can't be tuned, or are fewer than asked for."""
    if options.train_steps and options.train_tokens:
        raise InputError("--train-steps and --train-tokens both say how long the run is; drop one of the two")
    if options.train_steps and options.global_batch == "any":
        raise InputError("--train-steps: with a free global batch steps differ in size; use --train-tokens")
    for word in options.fix:
        if (name := word.partition("=")[0]) in options.only:
            raise InputError(f"--only {name}: --fix {word} leaves nothing to search of it; drop one of the two")
    options.loss_steps()
    workloads.check_recipe(options)
    if allotment.hardware.is_cpu and options.device != "cpu" and (why := why_untuned()):
        raise MachineError(why)
    hardware, spreading = spread(allotment.hardware, options.devices, is_single=options.fleet.is_single)
    arguments = read_arguments(Path(options.baseline)) if options.baseline else NOTHING_GIVEN
    device = f"tuning for {hardware.name} ({show_memory(hardware.memory_bytes)})"
    if hardware.is_cpu:
        why = "" if options.device == "cpu" else "no accelerator found: "
        device = f"{why}tuning for the CPU ({hardware.name}, {hardware.cores} cores)"
        device += "; the answer holds for this machine, not for a GPU"
    notes = [device, *allotment.notes, *spreading]
    return Start(
        options=options,
        hardware=hardware,
        memory_bytes=_memory(options, hardware, notes),
        budget=Budget.of(options.effort).limited(max_trials=options.max_trials, max_time_s=options.max_time_s),
        arguments=arguments,
        notes=notes,
    )


def _memory(options: SearchOptions, hardware: Hardware, notes: list[str]) -> int:
    asked, free = options.memory_bytes, show_memory(hardware.free_bytes)
    if asked is None:
        memory = hardware.default_budget_bytes
        notes.append(f"memory budget {show_memory(memory)}: the memory that is free, less a margin (--memory)")
        return memory
    processes = hardware.nodes_of(hardware.count or 1)[1] if hardware.is_cpu else 1
    if asked * processes > hardware.memory_bytes:
        there = show_memory(hardware.memory_bytes) + f" for {processes} processes" * (processes > 1)
        raise InputError(f"--memory {show_memory(asked)}: {hardware.name} has {there}")
    if asked > hardware.free_bytes:
        notes.append(f"--memory asks for more than the {free} that are free now")
    return asked


def default_space(hardware: Hardware) -> str:
    return "parallel" if (hardware.count or 1) > 1 else "cpu" if hardware.is_cpu else "default"


def baseline_of(
    workload: Workload, facts: ModelFacts, hardware: Hardware, arguments: UserArguments = NOTHING_GIVEN
) -> TrainConfig:
    """Return the baseline: the user's `arguments`, and defaults of TRL or the Trainer, for samples that fit in."""
    both = "--seq-len" if workload.recipe is None else "--prompt-len and --completion-len, together"
    for option, length, longest in (
        (both, workload.sequence_length, facts.max_sequence_length),
        ("--target-len", workload.target_length, facts.max_target_length or facts.max_sequence_length),
    ):
        if longest is not None and (length or 0) > longest:
            raise InputError(f"{option} {length}: {workload.model.name} has {longest} positions; use at most that")
    is_kto = workload.recipe is not None and workload.recipe.name == "kto"  # which compares samples of a micro-batch
    if workload.recipe is not None:
        usual = {"bf16": hardware.has_bf16 and not arguments.searched.get("fp16")}
        if not {"activation_checkpointing", "gradient_checkpointing"} & arguments.searched.keys():
            usual["gradient_checkpointing"] = facts.supports_checkpointing
        arguments = arguments._replace(searched={**usual, **arguments.searched})
    return baseline_config(arguments, workload.global_batch_size, facts, hardware, least=2 if is_kto else 1)


def _restricted(plan: SearchPlan, options: SearchOptions) -> SearchPlan:
    own = plan.workload.own_step.own if plan.workload.own_step is not None else {}
    fixed, about = fixed_values(options.fix, own), (plan.workload, plan.facts, plan.hardware)
    baseline = make_config(fitting(fixed, make_point(plan.baseline)))
    before = list(refusals(plan.baseline, *about))
    for reason in refusals(baseline, *about):
        if reason not in before:
            raise InputError(f"--fix {','.join(options.fix)}: {reason}")
    origin = make_point(baseline)
    only = {knob.parameter: knob.option for knob in (knob_named(name, "--only", own) for name in options.only)}

    def is_searched(name: str) -> bool:  # 'adapter' stands for its fields as well
        return name in only or (name.startswith("adapter.") and "adapter" in only)

    named = dict(plan.space.parameters)
    if plan.workload.own_step is not None:
        for name in (*fixed, *only):
            if name not in named:
                option = "--fix" if name in fixed else "--only"
                raise InputError(f"{option} {name}: your function isn't said to honour it")
    else:
        for further in ("default", "full") if only else ():
            named |= {n: p for n, p in load_space(further).parameters.items() if n not in named and is_searched(n)}
    parameters = {}
    for name, parameter in named.items():
        if name not in fixed and (not only or is_searched(name)):
            when = {n: v for n, v in parameter.when.items() if n in named or origin.get(n) not in v}
            effort = Effort.QUICK if only else parameter.from_effort
            parameters[name] = parameter.model_copy(update={"when": when, "from_effort": effort})
        elif name in origin:
            parameters[name] = Parameter(choices=(origin[name],))
    space = plan.space.model_copy(update={"parameters": parameters})
    plan = plan.model_copy(update={"baseline": baseline, "space": space})
    options_of = {knob.parameter: knob.option for knob in knobs()}
    for name, option in only.items():  # which may have no other value than the baseline's, or none that is legal
        named_one, said = parameters.get(name), f"--only {option}"
        if named_one is None:
            raise InputError(f"{said}: the search space has no values of it: --fix one, or name another --space")
        if not any(d.name == name and len(d.choices) > 1 for d in plan.search_space.dimensions):
            why = (reason for choice, reason in plan.search_space.left_out.items() if choice[0] == name)
            raise InputError(f"{said}: nothing to search: {next(why, 'there is one value')}")
        other = next((n for n, v in named_one.when.items() if not is_searched(n) and origin.get(n) not in v), None)
        if other is not None:
            how = "--fix holds that" if other in fixed else "name that as well"
            raise InputError(f"{said}: nothing to search: it exists only with {options_of[other]}; {how}")
    return plan
