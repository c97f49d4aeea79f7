"""Runs configurations as trials, each by the real runner, and checks how each came out."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from autotune.execution.runner import LocalRunner
from autotune.space.rules import refusals
from autotune.values.config import TrainConfig
from autotune.values.hardware import Hardware
from autotune.values.trial import Failure, Limits, Purpose, TrialRequest, TrialResult, TrialStatus
from autotune.values.workload import Workload
from pack.check import Check
from pack.configurations import BASE, Configuration
from pack.models import workload
from pack.session import Session

TIMEOUT_S = 300.0  # a part's own time ends it before


def run_configurations(session: Session, configurations: Iterable[Configuration]) -> None:
    """Run what the device and its libraries can do; the rest is noted with the reason."""
    refused: dict[str, str] = {}
    for row in configurations:
        task = workload(row.model, session.hardware, session.scratch)
        config = config_of(row.config, session.hardware)
        reasons = [f"needs {need.name}" for need in row.needs if not need.is_there(session.hardware)]
        reasons += refusals(config, task, session.facts(task), session.hardware)
        if reasons:
            refused[row.name] = reason = reasons[0]
            session.report.note(not_run=refused)
            print(f"  {row.name}: not run here: {reason}", flush=True)
            continue
        result = session.run(request_of(session.number(), config, task, session.hardware), row.name)
        session.report.check(judged(row, result)._replace(name=f"{session.part}: {row.name}"))


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


def config_of(fields: Any, hardware: Hardware) -> TrainConfig:
    """Return a configuration of the table for a device."""
    pinned = {"dataloader_pin_memory": not hardware.is_cpu}
    return TrainConfig(**{**BASE, **pinned, **fields})


def request_of(
    number: int, config: TrainConfig, task: Workload, hardware: Hardware, *, memory_bytes: int | None = None
) -> TrialRequest:
    """Return the request for a trial of a few steps, within `memory_bytes` if not in what is free."""
    return TrialRequest(
        number=number,
        purpose=Purpose.SEARCH,
        config=config,
        workload=task,
        device=hardware.device,
        accumulation_steps=min(2, task.accumulation_steps(config)),
        limits=Limits(
            memory_bytes=memory_bytes or hardware.default_budget_bytes,
            timeout_s=TIMEOUT_S,
            discarded_steps=2,
            measure_steps=4,
            measure_time_s=5,
            relative_interval=0.5,
        ),
    )


def private_runner(session: Session, hardware: Hardware) -> LocalRunner:
    """Return a runner whose launcher starts in the present environment; to be entered."""
    folder: Path = session.scratch / session.part
    folder.mkdir(exist_ok=True)
    return LocalRunner(folder, hardware)
