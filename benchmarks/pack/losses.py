"""The losses of trainings beside those of the reference, run and judged as `--check-loss` does with a winner.

A search compares nothing where its winner is the baseline; here it is settled which are compared.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from autotune.values.budget import PASSES, LossCurve, LossTask
from autotune.values.config import Allowance
from autotune.values.problem import Change
from autotune.values.trial import Purpose
from autotune.verification.loss_check import compare
from pack.check import Check, Kind
from pack.models import GLOBAL_BATCH, workload
from pack.session import Session
from pack.trials import config_of, request_of

STEPS = 20
_REFERENCE: dict[str, Any] = {"precision": "fp32", "per_device_train_batch_size": GLOBAL_BATCH}


class Compared(NamedTuple):
    """A configuration whose losses have to be the reference's, as far as its change promises."""

    change: Change
    config: Mapping[str, Any]


def _compared(knob: str, before: str, after: str, allowance: Allowance, value: Any) -> Compared:
    change = Change(knob=knob, before=before, after=after, allowance=allowance)
    return Compared(change, {**_REFERENCE, knob: value})


ROWS = (
    _compared("per_device_train_batch_size", str(GLOBAL_BATCH), "2", Allowance.EXACT, 2),
    _compared("checkpointing", "none", "full", Allowance.EXACT, "full"),
    _compared("precision", "fp32", "bf16", Allowance.NUMERICS, "bf16"),
)


def check_losses(session: Session) -> None:
    """Run the reference twice, with other seeds, and each of the others once."""
    reference = _curve(session, "reference", _REFERENCE, seed=0)
    again = _curve(session, "reference, another seed", _REFERENCE, seed=1)
    facts = session.facts(workload("llama", session.hardware, session.scratch))
    for row in ROWS:
        name = f"{row.change.knob} {row.change.after}"
        curve = _curve(session, name, row.config, seed=0)
        whole = all(c is not None and len(c.losses) == STEPS for c in (reference, again, curve))
        session.report.check(Check(f"losses of {name} are kept of each step", whole, f"{STEPS} steps"))
        if reference is not None and again is not None and curve is not None:
            verdict = compare(reference, again, curve, (row.change,), facts, STEPS // PASSES)
            title = f"losses of {name} are the reference's"
            session.report.check(Check(title, verdict.passed, verdict.statement, Kind.VALUES_OR_TIME))


def _curve(session: Session, name: str, fields: Mapping[str, Any], *, seed: int) -> LossCurve | None:
    task = workload("llama", session.hardware, session.scratch)
    config = config_of(fields, session.hardware)
    usual = request_of(session.number(), config, task, session.hardware)
    steps = {"discarded_steps": 1, "measure_steps": STEPS, "measure_time_s": 1e9, "relative_interval": 1e-12}
    request = usual.model_copy(
        update={
            "purpose": Purpose.LOSS_CHECK,
            "accumulation_steps": task.accumulation_steps(config),
            "limits": usual.limits.model_copy(update=steps),
            "task": LossTask(steps=STEPS, pass_steps=STEPS // PASSES, seed=task.seed + seed),
        }
    )
    measured = session.run(request, name).measurement
    return None if measured is None else measured.curve
