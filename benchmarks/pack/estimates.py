"""What `autotune estimate` says of this device, beside what trials of the same trainings measure."""

from __future__ import annotations

import autotune
from autotune.units import show_memory, show_rate
from autotune.values.estimate import CostEstimate
from autotune.values.trial import Measurement
from pack.check import Check, Kind
from pack.models import workload
from pack.session import Session
from pack.trials import config_of, request_of

MODEL = {"cuda": "gpt2", "cpu": "llama"}  # on a GPU one whose tensors outweigh the context
LENGTH = {"cuda": 512, "cpu": 16}
ROWS = {"bf16": {}, "checkpointing": {"checkpointing": "full"}, "LoRA": {"adapter": {"kind": "lora", "rank": 8}}}

ALLOCATED_WITHIN = 0.05  # the caching allocator does the same anywhere
DEVICE_WITHIN = 0.15  # contexts differ by driver
SPEED_WITHIN = 2.0


def compare(session: Session) -> None:
    """Estimate and measure each."""
    kind = session.hardware.kind
    task = workload(MODEL[kind], session.hardware, session.scratch, sequence_length=LENGTH[kind])
    for name, fields in ROWS.items():
        config = config_of(fields, session.hardware)
        estimate = autotune.estimate(config=config, workload=task, device=session.hardware.device)
        session.report.note(**{name: estimate.model_dump(mode="json", exclude={"notes"})})
        measured = session.run(request_of(session.number(), config, task, session.hardware), name).measurement
        if measured is None:
            session.report.check(Check(f"estimate beside a trial: {name}", False, "the trial did not complete"))
            continue
        for check in judged(name, estimate, measured):
            session.report.check(check)


def judged(name: str, estimate: CostEstimate, measured: Measurement) -> list[Check]:
    """Return how near an estimate is: memory of the allocator, memory of the device, speed."""
    memory, peaks = estimate.memory, measured.memory
    rate = measured.samples_per_second
    checks = [
        _near(f"{name}: device memory as estimated", memory.device_peak_bytes, peaks.peak_bytes),
        Check(
            f"{name}: speed as estimated",
            1 / SPEED_WITHIN <= rate / estimate.samples_per_second <= SPEED_WITHIN,
            f"{show_rate(estimate.samples_per_second)} samples/s estimated, {show_rate(rate)} measured",
            Kind.VALUES_OR_TIME,
        ),
    ]
    if peaks.allocated_bytes is not None:
        near = _near(f"{name}: allocated as estimated", memory.allocated_peak_bytes, peaks.allocated_bytes)
        error = abs(memory.allocated_peak_bytes / peaks.allocated_bytes - 1)
        checks.insert(0, near._replace(passed=error <= ALLOCATED_WITHIN, kind=Kind.ANYWHERE))
    return checks


def _near(name: str, estimated: int, measured: int) -> Check:
    error = estimated / measured - 1
    detail = f"{show_memory(estimated)} estimated, {show_memory(measured)} measured ({error:+.1%})"
    return Check(name, abs(error) <= DEVICE_WITHIN, detail, Kind.VALUES_OR_TIME)
