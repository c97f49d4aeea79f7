"""Makes the plan of a search from the user's options: device, workload, memory, baseline, limits and search space.

Options that can't be used are refused by an InputError, before the first trial. Notes tell the user every default that
was chosen.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from autotune.errors import InputError, MachineError
from autotune.execution.places import spread
from autotune.planning.options import SearchOptions
from autotune.planning.plan import SearchPlan, least_states, restricted
from autotune.planning.recipe import RecipeSubject, check_recipe
from autotune.planning.user_loop import Knobs, UserLoop
from autotune.planning.user_trainer import UserTrainer
from autotune.planning.workload import Outline, Subject, objective_of
from autotune.training.baseline import baseline_config, read_arguments
from autotune.units import GIB, show_memory, show_time
from autotune.values import hardware as machine
from autotune.values.budget import DEFAULT_LOSS_STEPS, LEAST_LOSS_STEPS, Budget
from autotune.values.hardware import Hardware
from autotune.values.model import ModelFacts
from autotune.values.problem import Allotment
from autotune.values.workload import Workload

LOW_DISK_BYTES = 1 << 30  # less free disk than this is noted


def subject_of(
    options: SearchOptions,
    *,
    step: Callable[..., Any] | None = None,
    knobs: Knobs | None = None,
    trainer: Any = None,
    make_trainer: Callable[[], Any] | None = None,
    script: Sequence[str] | None = None,
) -> Subject:
    """Return what is tuned: the user's own loop, Trainer or script if one is given, otherwise the model.

    The arguments are those of `autotune.find`.
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
    return RecipeSubject(options) if options.recipe is not None else Subject(options)


def outline(options: SearchOptions, allotment: Allotment | None = None, subject: Subject | None = None) -> Outline:
    """Return the part of the plan that can be settled before the model is looked at in a child process.

    By default each trial has the whole device, and the model is tuned, that `options` name.

    Raises:
        InputError: An option can't be used.
        MachineError: The device isn't present.
    """
    if options.train_steps and options.train_tokens:
        raise InputError("--train-steps and --train-tokens both say how long the run is; drop one of the two")
    if options.train_steps and options.global_batch == "any":
        raise InputError("--train-steps: with a free global batch steps differ in size; use --train-tokens")
    for word in options.fix:
        if (name := word.partition("=")[0]) in options.only:
            raise InputError(f"--only {name}: --fix {word} leaves nothing to search of it; drop one of the two")
    loss_steps_of(options)
    check_recipe(options)
    subject = subject or subject_of(options)
    if allotment is None:
        allotment = Allotment(hardware=machine.detect(options.device))
        if allotment.hardware.is_cpu and options.device != "cpu" and (why := machine.why_untuned()):
            raise MachineError(why)
    hardware, spreading = spread(allotment.hardware, options.devices, is_single=options.fleet.is_single)
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
    """Return the plan of an outline, whose workload has the lengths of the data, with further notes for the user."""
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
        objective=objective_of(options, workload),
        soak=True,
        loss_steps=0 if workload.recipe is not None and workload.recipe.kind.generates else loss_steps_of(options),
        loss_insisted=bool(options.check_loss),
        record=options.record and not outline.is_shared,
        report_to=options.report_to,
        fleet=options.fleet,
        is_shared=outline.is_shared,
        options=options,
        output=options.output,
        notes=(*outline.notes, *notes),
    )
    plan = restricted(subject.planned(plan), options)
    return plan.model_copy(update={"notes": plan.notes + _states_note(plan)})


def check_lengths(workload: Workload, facts: ModelFacts) -> None:
    """Refuse samples that are longer than the model takes."""
    both = "--seq-len" if workload.recipe is None else "--prompt-len and --completion-len, together"
    for option, length, longest in (
        (both, workload.sequence_length, facts.max_sequence_length),
        ("--target-len", workload.target_length, facts.max_target_length or facts.max_sequence_length),
    ):
        if longest is not None and (length or 0) > longest:
            raise InputError(f"{option} {length}: {workload.model.name} has {longest} positions; use at most that")


def disk_notes(run_directory: Path) -> list[str]:
    """Return a line on low disk space where there is little."""
    free = shutil.disk_usage(run_directory).free
    if free >= LOW_DISK_BYTES:
        return []
    return [f"only {show_memory(free)} of disk are free where {run_directory} lies"]


def loss_steps_of(options: SearchOptions) -> int:
    """Return the optimizer steps over which the winner's losses are compared with the baseline's; 0: no comparison.

    If the user asked for none, it is the default of the effort.

    Raises:
        InputError: The user asked for a comparison that isn't possible.
    """
    asked, hindrance = options.check_loss, None
    if options.global_batch == "any":
        hindrance = "with --global-batch any no two configurations take the same steps; name a global batch"
    elif asked and asked < LEAST_LOSS_STEPS:
        hindrance = f"fewer than {LEAST_LOSS_STEPS} steps tell nothing"
    if asked and hindrance:
        raise InputError(f"--check-loss {asked}: {hindrance}")
    if hindrance:
        return 0
    return DEFAULT_LOSS_STEPS[options.effort] if asked is None else asked


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
        memory = hardware.default_budget_bytes
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


def _states_note(plan: SearchPlan) -> tuple[str, ...]:
    """Return notes on the memory that the baseline needs at least, and on the extent of the search."""
    parameters = plan.facts.parameters
    if not parameters:  # the model isn't known
        return (_extent(plan),)
    states = least_states(plan, plan.baseline)
    size = f"{parameters / 1e6:,.1f}M" if parameters >= 10**6 else f"{parameters:,}"
    text = (
        f"{plan.workload.model.name}: {size} parameters; the baseline needs "
        f"{show_memory(states)} for weights, gradients and optimizer states alone, activations not counted"
    )
    if states > plan.memory_bytes:
        text += f": more than the budget of {show_memory(plan.memory_bytes)}"
    host = plan.hardware.host_memory_bytes
    lines: tuple[str, ...] = (text, _extent(plan))
    if not plan.hardware.is_cpu and host < 8 * GIB:
        lines += (f"the host has {show_memory(host)} of memory: a trial's process takes some 4 GiB of it",)
    return lines


def _extent(plan: SearchPlan) -> str:
    """Return the limits of time and trials, each with the option that it comes from."""
    budget, given = plan.budget, plan.options
    trials = "1 trial" if budget.max_trials == 1 else f"{budget.max_trials} trials"
    sources = (
        "--max-time" if given is not None and given.max_time_s is not None else "--effort",
        "--max-trials" if given is not None and given.max_trials is not None else "--effort",
    )
    time_from = "" if sources[0] == sources[1] else f" ({sources[0]})"
    return f"at most {show_time(budget.max_time_s)}{time_from} and {trials} ({sources[1]})"
