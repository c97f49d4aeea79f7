"""From the user's words to a search plan: model, device, workload, baseline, limits, space; every default is said.

Everything that can be refused is refused here, before the first trial.
"""

from __future__ import annotations

from pathlib import Path

from autotune.errors import InputError
from autotune.planning import devices, user_loop, user_trainer
from autotune.planning.options import SearchOptions
from autotune.planning.plan import Outline, SearchPlan
from autotune.planning.workload import objective_of, task_of, workload_of
from autotune.space.file import load_space
from autotune.training.baseline import UserArguments, baseline_config, read_arguments
from autotune.training.resolve import resolve
from autotune.units import GIB, show_memory, show_time
from autotune.values import hardware as machine
from autotune.values.budget import Budget, Effort
from autotune.values.checks import planned_loss_steps
from autotune.values.conditions import other_processes
from autotune.values.config import Workload
from autotune.values.hardware import Hardware
from autotune.values.model import ModelFacts, Task
from autotune.values.placement import Allotment
from autotune.values.user_code import OwnCode, OwnStep

DEFAULT_SPACE = {"cuda": "default", "cpu": "cpu"}
SPACE_OF_SEVERAL = "parallel"  # devices
LOW_DISK_BYTES = 1 << 30

# What a trial takes beside its own time limit at the very most: to be ended, and to give its memory back.
TRIAL_OVERHEAD_S = 60.0

# For a first guess at what a recording takes: seconds of a trial that are not measuring.
USUAL_START_S = 3.0


def outline(
    options: SearchOptions, allotment: Allotment | None = None, own: OwnStep | None = None, code: OwnCode | None = None
) -> Outline:
    """Return what can be settled without a child process.

    Args:
        options: What the user asked for.
        allotment: What each trial has to itself; by default all of the device that was asked for.
        own: A loop of the user's own, whose model may not be named.
        code: Around a Trainer of the user's own, of which nothing is known yet.

    Raises:
        InputError: Something in `options` can't be used.
        MachineError: The device isn't there.
    """
    if options.repeat > 1 and not options.exhaustive:
        raise InputError(f"--repeat {options.repeat}: needs --exhaustive")
    if options.train_steps and options.train_tokens:
        raise InputError("--train-steps and --train-tokens both say how long the run is; drop one of the two")
    if options.train_steps and options.global_batch == "any":
        raise InputError("--train-steps: with a free global batch steps differ in size; use --train-tokens")
    loss_steps_of(options)
    allotment = allotment or Allotment(hardware=machine.detect(options.device))
    hardware, spreading = devices.spread(options, allotment.hardware)
    allotment = allotment.model_copy(update={"hardware": hardware})
    if own is not None and not options.model:
        spec, task = user_loop.spec_of(own), Task.OWN
    elif code is None:
        spec = resolve(options.model, revision=options.revision, trust_remote_code=options.trust_remote_code)
        task = task_of(options, spec)
    arguments = read_arguments(Path(options.baseline)) if options.baseline else None
    notes = [*_device_notes(options, hardware), *allotment.notes, *spreading]
    if code is not None:
        workload = user_trainer.provisional(code, options.seed)
    else:
        workload = workload_of(options, hardware, spec, task, arguments, notes)
    return Outline(
        options=options,
        hardware=hardware,
        workload=workload.model_copy(update={"own_step": own}),
        memory_bytes=_memory(options, allotment, notes),
        budget=budget_of(options.effort, max_trials=options.max_trials, max_time_s=options.max_time_s),
        space=user_loop.space_of(own, default_space(hardware))
        if own is not None and own.knobs
        else load_space(options.space or default_space(hardware)),
        searched_arguments=arguments.searched if arguments else None,
        notes=tuple(notes),
        is_shared=allotment.is_shared,
    )


def complete(outline: Outline, facts: ModelFacts, workload: Workload, notes: tuple[str, ...]) -> SearchPlan:
    """Return the plan, now that the model's facts and the data's lengths (in `workload`) are known.

    Raises:
        InputError: The workload doesn't fit the model.
    """
    for option, length, longest in (
        ("--seq-len", workload.sequence_length, facts.max_sequence_length),
        ("--target-len", workload.target_length, facts.max_target_length or facts.max_sequence_length),
    ):
        if longest is not None and (length or 0) > longest:
            raise InputError(f"{option} {length}: {workload.model.name} has {longest} positions; use at most that")
    given = UserArguments(outline.searched_arguments, {}) if outline.searched_arguments is not None else None
    is_own = workload.own_step is not None  # it can be timed, and nothing else
    is_recorded = not (outline.is_shared or is_own or workload.own_code is not None)  # code may change, and not say so
    plan = SearchPlan(
        workload=workload,
        facts=facts,
        hardware=outline.hardware,
        memory_bytes=outline.memory_bytes,
        budget=outline.budget,
        allowance=outline.options.allow,
        space=outline.space,
        baseline=baseline_config(
            given, workload.global_batch_size, facts, outline.hardware, devices=outline.hardware.count or 1
        ),
        exhaustive=outline.options.exhaustive,
        repeats=outline.options.repeat,
        objective=objective_of(outline.options, workload),
        soak=not (outline.options.exhaustive or is_own),
        skewed_routing=facts.experts > 0 and not (outline.options.exhaustive or is_own),
        loss_steps=0 if is_own else loss_steps_of(outline.options),
        loss_insisted=bool(outline.options.check_loss),
        record=outline.options.record and is_recorded,
        report_to=outline.options.report_to,
        fleet=outline.options.fleet,
        is_shared=outline.is_shared,
        options=None if is_own else outline.options,
        output=outline.options.output,
        notes=(*outline.notes, *notes, *(user_loop.notes_of(outline.space) if is_own else ())),
    )
    plan = user_trainer.with_baseline(plan)
    if plan.exhaustive:
        plan = plan.model_copy(update={"budget": _budget_of_all(plan, outline.options)})
    return plan.model_copy(update={"notes": plan.notes + _states_note(plan)})


def default_space(hardware: Hardware) -> str:
    """Return the built-in space that is searched unless another is named."""
    return SPACE_OF_SEVERAL if (hardware.count or 1) > 1 else DEFAULT_SPACE[hardware.kind]


def machine_notes(hardware: Hardware, run_directory: Path) -> list[str]:
    """Return a line for each condition of the machine that a search should know: disk, other processes."""
    import shutil

    lines = []
    free = shutil.disk_usage(run_directory).free
    if free < LOW_DISK_BYTES:
        lines.append(f"only {show_memory(free)} of disk are free where {run_directory} lies")
    for other in other_processes(hardware):
        used = f", {show_memory(other.used_bytes)}" if other.used_bytes else ""
        lines.append(
            f"another process is busy on the device: {other.name} (pid {other.pid}{used}); timings will suffer"
        )
    return lines


def budget_of(effort: Effort, *, max_trials: int | None = None, max_time_s: float | None = None) -> Budget:
    """Return the limits that `effort` stands for, with those that are given instead."""
    return Budget.of(effort).limited(max_trials=max_trials, max_time_s=max_time_s)


def loss_steps_of(options: SearchOptions) -> int:
    """Return over how many steps losses are compared.

    Raises:
        InputError: They can't be, and were asked for.
    """
    free = options.global_batch == "any"
    return planned_loss_steps(options.check_loss, options.effort, free_batch=free, exhaustive=options.exhaustive)


def _device_notes(options: SearchOptions, hardware: Hardware) -> list[str]:
    if not hardware.is_cpu:
        return [f"tuning for {hardware.name} ({show_memory(hardware.memory_bytes)})"]
    why = "" if options.device == "cpu" else "no accelerator found: "
    return [
        f"{why}tuning for the CPU ({hardware.name}, {hardware.cores} cores); "
        "the answer holds for this machine, not for a GPU"
    ]


def _memory(options: SearchOptions, allotment: Allotment, notes: list[str]) -> int:
    hardware = allotment.hardware
    if options.memory_bytes is None:
        memory = machine.default_budget_bytes(hardware)
        notes.append(f"memory budget {show_memory(memory)}: what is free now less a margin (--memory)")
        return memory
    processes = (hardware.count or 1) if hardware.is_cpu else 1
    if options.memory_bytes * processes > hardware.memory_bytes:
        each = f" for {processes} processes" if processes > 1 else ""
        there = show_memory(hardware.memory_bytes)
        raise InputError(f"--memory {show_memory(options.memory_bytes)}: {hardware.name} has {there}{each}")
    if allotment.is_shared and options.memory_bytes > hardware.free_bytes:
        raise InputError(
            f"--memory {show_memory(options.memory_bytes)}: each of {options.workers} trials at a time can have "
            f"{show_memory(hardware.free_bytes)} of what is free; use fewer --workers"
        )
    if options.memory_bytes > hardware.free_bytes:
        notes.append(f"--memory asks for more than the {show_memory(hardware.free_bytes)} that are free now")
    return options.memory_bytes


def _budget_of_all(plan: SearchPlan, options: SearchOptions) -> Budget:
    """Return the budget in which every trial of an exhaustive plan fits, but for the limits that the user gave."""
    trials = len(plan.every_config()) * plan.repeats
    changes: dict[str, float] = {}
    if options.max_trials is None:
        changes["max_trials"] = trials
    if options.max_time_s is None:
        changes["max_time_s"] = trials * (plan.budget.trial_timeout_s + TRIAL_OVERHEAD_S)
    return plan.budget.model_copy(update=changes)


def _states_note(plan: SearchPlan) -> tuple[str, ...]:
    """Say what the baseline needs at the very least: weights and gradients, and AdamW's two states, fp32 each."""
    if plan.workload.task is Task.OWN:
        return (_extent(plan),)
    adamw = plan.baseline.optim in ("adamw_torch", "adamw_torch_fused")
    states = plan.facts.parameters * (16 if adamw else 8)
    what = "weights, gradients and AdamW states" if adamw else "weights and gradients"
    text = (
        f"{plan.workload.model.name}: {plan.facts.parameters / 1e6:,.1f}M parameters; the baseline needs "
        f"{show_memory(states)} for {what} alone, activations not counted"
    )
    if states > plan.memory_bytes:
        text += f": more than the budget of {show_memory(plan.memory_bytes)}"
    host = plan.hardware.host_memory_bytes
    lines: tuple[str, ...] = (text, _extent(plan))
    if not plan.hardware.is_cpu and host < 8 * GIB:
        lines += (f"the host has {show_memory(host)} of memory: a trial's process takes some 4 GiB of it",)
    return lines


def _extent(plan: SearchPlan) -> str:
    """Say how long a search may take; of a recording how much there is to measure, and roughly what that takes."""
    budget = plan.budget
    if not plan.exhaustive:
        trials = "1 trial" if budget.max_trials == 1 else f"{budget.max_trials} trials"
        return f"at most {show_time(budget.max_time_s)} and {trials} (--effort)"
    points = len(plan.every_config())
    trial_s = USUAL_START_S + budget.discarded_s + budget.measure_time_s
    times = f", each {plan.repeats} times" if plan.repeats > 1 else ""
    return (
        f"{points} points to measure{times}: roughly {show_time(points * plan.repeats * trial_s)} at {trial_s:.0f} s "
        "a trial, less where steps are short; it can be stopped and gone on with at any time"
    )
