"""From the user's words to a search plan: model, device, workload, baseline, limits, space; every default is said.

Everything that can be refused is refused here, before the first trial.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from autotune.errors import InputError
from autotune.planning import devices
from autotune.planning.options import SearchOptions
from autotune.planning.plan import SearchPlan
from autotune.planning.user_loop import Knobs, UserLoop
from autotune.planning.user_trainer import UserTrainer
from autotune.planning.workload import Outline, Subject, objective_of
from autotune.training.baseline import baseline_config, read_arguments
from autotune.units import GIB, show_memory, show_time
from autotune.values import hardware as machine
from autotune.values.budget import Budget
from autotune.values.checks import planned_loss_steps
from autotune.values.conditions import other_processes
from autotune.values.hardware import Hardware
from autotune.values.model import ModelFacts
from autotune.values.placement import Allotment
from autotune.values.workload import Workload

LOW_DISK_BYTES = 1 << 30

# What a trial takes beside its own time limit at the very most: to be ended, and to give its memory back.
TRIAL_OVERHEAD_S = 60.0

# For a first guess at what a recording takes: seconds of a trial that are not measuring.
USUAL_START_S = 3.0


def subject_of(
    options: SearchOptions,
    *,
    step: Callable[..., Any] | None = None,
    knobs: Knobs | None = None,
    trainer: Any = None,
    make_trainer: Callable[[], Any] | None = None,
    script: Sequence[str] | None = None,
) -> Subject:
    """Return what is tuned: the user's own loop, Trainer or script, if one was given, otherwise the model.

    Raises:
        InputError: Nothing or more than one was given, it can't be used, or an option doesn't go with it.
    """
    named = {"trainer": trainer, "make_trainer": make_trainer, "script": script, "step": step}
    given = [name for name, value in named.items() if value is not None]
    if len(given) > 1:
        raise InputError(f"{' and '.join(given)} are each a training of its own; give one of them")
    if step is not None:
        return UserLoop(options, step, knobs)
    if given:
        return UserTrainer.of(options, trainer=trainer, make_trainer=make_trainer, script=script)
    if not options.model:
        raise InputError("nothing to tune: give a model, or a trainer, make_trainer, script or step of your own")
    return Subject(options)


def outline(options: SearchOptions, allotment: Allotment | None = None, subject: Subject | None = None) -> Outline:
    """Return what can be settled without a child process.

    Args:
        options: What the user asked for.
        allotment: What each trial has to itself; by default all of the device that was asked for.
        subject: What is tuned; by default the model that `options` name.

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
    subject = subject or Subject(options)
    allotment = allotment or Allotment(hardware=machine.detect(options.device))
    hardware, spreading = devices.spread(options, allotment.hardware)
    allotment = allotment.model_copy(update={"hardware": hardware})
    arguments = read_arguments(Path(options.baseline)) if options.baseline else None
    notes = [*_device_notes(options, hardware), *allotment.notes, *spreading]
    return Outline(
        subject=subject,
        hardware=hardware,
        workload=subject.workload(hardware, arguments, notes),
        memory_bytes=_memory(options, allotment, notes),
        budget=Budget.of(options.effort).limited(max_trials=options.max_trials, max_time_s=options.max_time_s),
        space=subject.space(hardware),
        arguments=arguments,
        notes=tuple(notes),
        is_shared=allotment.is_shared,
    )


def complete(outline: Outline, facts: ModelFacts, notes: tuple[str, ...] = ()) -> SearchPlan:
    """Return the plan, now that the model's facts and the data's lengths (in the outline's workload) are known.

    Raises:
        InputError: The workload doesn't fit the model.
    """
    subject, workload, hardware = outline.subject, outline.workload, outline.hardware
    options = subject.options
    check_lengths(workload, facts)
    plan = SearchPlan(
        workload=workload,
        facts=facts,
        hardware=hardware,
        memory_bytes=outline.memory_bytes,
        budget=outline.budget,
        allowance=options.allow,
        space=outline.space,
        baseline=baseline_config(
            outline.arguments, workload.global_batch_size, facts, hardware, devices=hardware.count or 1
        ),
        exhaustive=options.exhaustive,
        repeats=options.repeat,
        objective=objective_of(options, workload),
        soak=not options.exhaustive,
        skewed_routing=facts.experts > 0 and not options.exhaustive,
        loss_steps=loss_steps_of(options),
        loss_insisted=bool(options.check_loss),
        record=options.record and not outline.is_shared,
        report_to=options.report_to,
        fleet=options.fleet,
        is_shared=outline.is_shared,
        options=options,
        output=options.output,
        notes=(*outline.notes, *notes),
    )
    plan = subject.planned(plan)
    if plan.exhaustive:
        plan = plan.model_copy(update={"budget": _budget_of_all(plan, options)})
    return plan.model_copy(update={"notes": plan.notes + _states_note(plan)})


def check_lengths(workload: Workload, facts: ModelFacts) -> None:
    """Refuse samples that are longer than the model takes.

    Raises:
        InputError: They are.
    """
    for option, length, longest in (
        ("--seq-len", workload.sequence_length, facts.max_sequence_length),
        ("--target-len", workload.target_length, facts.max_target_length or facts.max_sequence_length),
    ):
        if longest is not None and (length or 0) > longest:
            raise InputError(f"{option} {length}: {workload.model.name} has {longest} positions; use at most that")


def machine_notes(hardware: Hardware, run_directory: Path) -> list[str]:
    """Return a line for each condition of the machine that a search should know: disk, other processes."""
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
    if not plan.facts.parameters:  # nothing is known of the model
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
