"""Runs configurations as trials in the real runner: how each came out, its losses, and what was estimated of it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

import autotune
from autotune.space.rules import refusals
from autotune.units import show_memory, show_rate
from autotune.values.budget import PASSES, LossCurve, LossTask
from autotune.values.config import Allowance, TrainConfig
from autotune.values.hardware import Hardware
from autotune.values.problem import Change
from autotune.values.trial import Failure, Limits, Purpose, TrialRequest, TrialResult, TrialStatus
from autotune.values.workload import Workload
from autotune.verification.loss_check import compare
from pack.configurations import BASE, GLOBAL_BATCH, Configuration, workload
from pack.report import Check, Kind
from pack.session import Session

TIMEOUT_S = 300.0  # a part's own time ends it before

# Estimates: on a GPU of a model whose tensors outweigh the context.
ESTIMATED = {"cuda": ("gpt2", 512), "cpu": ("llama", 16)}
ESTIMATED_ROWS = {
    "bf16": {},
    "checkpointing": {"checkpointing": "full"},
    "LoRA": {"adapter": {"kind": "lora", "rank": 8}},
}
ALLOCATED_WITHIN = 0.05  # the caching allocator does the same anywhere
DEVICE_WITHIN = 0.15  # contexts differ by driver
SPEED_WITHIN = 2.0

LOSS_STEPS = 20
_REFERENCE: dict[str, Any] = {"precision": "fp32", "per_device_train_batch_size": GLOBAL_BATCH}


def config_of(fields: Mapping[str, Any], hardware: Hardware) -> TrainConfig:
    return TrainConfig(**{**BASE, "dataloader_pin_memory": not hardware.is_cpu, **fields})


def request_of(
    number: int, config: TrainConfig, task: Workload, hardware: Hardware, fields: Mapping[str, Any] = {}, **limits: Any
) -> TrialRequest:
    """Return the request for a trial of a few steps in the memory that is free; `fields` and limits differ from it."""
    usual = {"purpose": Purpose.SEARCH, "accumulation_steps": min(2, task.accumulation_steps(config)), **fields}
    few = {"timeout_s": TIMEOUT_S, "discarded_steps": 2, "measure_steps": 4, "measure_time_s": 5.0}
    few |= {"memory_bytes": hardware.default_budget_bytes, "relative_interval": 0.5}
    what = {"number": number, "config": config, "workload": task, "device": hardware.device}
    return TrialRequest(**what, **usual, limits=Limits(**{**few, **limits}))


def run_configurations(session: Session, configurations: Iterable[Configuration]) -> None:
    """Run what the device and its libraries can do; the rest is noted with the reason."""
    refused: dict[str, str] = {}
    for row in configurations:
        task = workload(row.model, session.hardware, session.scratch)
        config = config_of(row.config, session.hardware)
        reasons = [f"needs {need.name}" for need in row.needs if not need.is_there(session.hardware)]
        reasons += refusals(config, task, session.facts(task), session.hardware)
        if reasons:
            refused[row.name] = reasons[0]
            session.report.note(not_run=refused)
            print(f"  {row.name}: not run here: {reasons[0]}", flush=True)
            continue
        result = session.run(request_of(session.number(), config, task, session.hardware), row.name)
        session.report.check(*judged(row, result)._replace(name=f"{session.part}: {row.name}"))


def judged(row: Configuration, result: TrialResult) -> Check:
    """Return whether a trial came out as its row says."""
    outcome = result.outcome
    if isinstance(outcome, Failure):
        expected = row.fails and outcome.status is not TrialStatus.CRASHED
        return Check(row.name, expected, f"{outcome.status}: {outcome.cause}", row.kind)
    if row.fails:
        return Check(row.name, False, f"{result.status}, which it must not", row.kind)
    unseen = [k for k, pattern in row.seen.items() if not re.search(pattern, outcome.effects.get(k, ""))]
    shown = ", ".join(f"{k} {outcome.effects.get(k, 'unknown')}" for k in row.seen)
    return Check(row.name, not unseen, shown or str(result.status), row.kind)


def check_estimates(session: Session) -> None:
    """Hold what `autotune estimate` says of this device against what trials of the same trainings measure."""
    check = session.report.check
    model, length = ESTIMATED[session.hardware.kind]
    task = workload(model, session.hardware, session.scratch, sequence_length=length)
    for name, fields in ESTIMATED_ROWS.items():
        config = config_of(fields, session.hardware)
        estimate = autotune.estimate(config=config, workload=task, device=session.hardware.device)
        session.report.note(**{name: estimate.model_dump(mode="json", exclude={"notes"})})
        measured = session.run(request_of(session.number(), config, task, session.hardware), name).measurement
        if measured is None:
            check(f"estimate beside a trial: {name}", False, "the trial did not complete")
            continue
        memory, peaks = estimate.memory, measured.memory
        if peaks.allocated_bytes is not None:
            near = _near(memory.allocated_peak_bytes, peaks.allocated_bytes, ALLOCATED_WITHIN)
            check(f"{name}: allocated as estimated", *near)
        near = _near(memory.device_peak_bytes, peaks.peak_bytes, DEVICE_WITHIN)
        check(f"{name}: device memory as estimated", *near, Kind.VALUES_OR_TIME)
        expected, rate = estimate.samples_per_second, measured.samples_per_second
        shown = f"{show_rate(expected)} samples/s estimated, {show_rate(rate)} measured"
        passed = 1 / SPEED_WITHIN <= rate / expected <= SPEED_WITHIN
        check(f"{name}: speed as estimated", passed, shown, Kind.VALUES_OR_TIME)


def _near(estimated: int, measured: int, within: float) -> tuple[bool, str]:
    error = estimated / measured - 1
    return (
        abs(error) <= within,
        f"{show_memory(estimated)} estimated, {show_memory(measured)} measured ({error:+.1%})",
    )


def check_losses(session: Session) -> None:
    """Hold losses against those of a reference, run and judged as `--check-loss` does with a winner.

    A search compares nothing where its winner is the baseline; here it is settled which are compared. The reference
    runs twice, with other seeds.
    """
    reference = _curve(session, "reference", {}, seed=0)
    again = _curve(session, "reference, another seed", {}, seed=1)
    facts = session.facts(workload("llama", session.hardware, session.scratch))
    for knob, before, after, allowance in (
        ("per_device_train_batch_size", GLOBAL_BATCH, 2, Allowance.EXACT),
        ("checkpointing", "none", "full", Allowance.EXACT),
        ("precision", "fp32", "bf16", Allowance.NUMERICS),
    ):
        name = f"{knob} {after}"
        curve = _curve(session, name, {knob: after}, seed=0)
        whole = all(c is not None and len(c.losses) == LOSS_STEPS for c in (reference, again, curve))
        session.report.check(f"losses of {name} are kept of each step", whole, f"{LOSS_STEPS} steps")
        if reference is not None and again is not None and curve is not None:
            change = Change(knob=knob, before=str(before), after=str(after), allowance=allowance)
            verdict = compare(reference, again, curve, (change,), facts, LOSS_STEPS // PASSES)
            title = f"losses of {name} are the reference's"
            session.report.check(title, verdict.passed, verdict.statement, Kind.VALUES_OR_TIME)


def _curve(session: Session, name: str, fields: Mapping[str, Any], *, seed: int) -> LossCurve | None:
    task = workload("llama", session.hardware, session.scratch)
    config = config_of({**_REFERENCE, **fields}, session.hardware)
    run = LossTask.of(LOSS_STEPS, task.seed + seed)
    fields = {"purpose": Purpose.LOSS_CHECK, "accumulation_steps": task.accumulation_steps(config), "task": run}
    steps = {"discarded_steps": 1, "measure_steps": LOSS_STEPS, "measure_time_s": 1e9, "relative_interval": 1e-12}
    request = request_of(session.number(), config, task, session.hardware, fields, **steps)
    measured = session.run(request, name).measurement
    return None if measured is None else measured.curve
