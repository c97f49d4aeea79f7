"""A device that is shared with a process that holds most of its memory: budgets and peaks leave its share alone."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator

from autotune.units import GIB, show_memory
from autotune.values.conditions import other_processes
from autotune.values.hardware import Hardware, detect
from autotune.values.trial import TrialStatus
from pack.check import Check
from pack.models import workload
from pack.session import Session
from pack.trials import config_of, private_runner, request_of

LEFT_BYTES = 3 * GIB  # for the trial beside it
LARGE_BATCH = 1024  # samples at once, which take more than that

_HOLD = """
import sys, torch
held = torch.empty(int(sys.argv[2]), dtype=torch.uint8, device=sys.argv[1])
torch.cuda.synchronize()
print("held", flush=True)
sys.stdin.read()
"""


def share_device(session: Session) -> None:
    """Run a trial that fits beside the other process, and one that doesn't."""
    session.end_runner()  # nothing but the holder is on the device
    held = detect(session.hardware.device).free_bytes - LEFT_BYTES
    if held < LEFT_BYTES:
        session.report.check(Check("another process holds memory", False, f"only {show_memory(held)} to hold"))
        return
    with _held(session.hardware, held):
        beside = detect(session.hardware.device)
        others = len(other_processes(beside))
        session.report.check(
            Check(
                "a budget leaves the memory of others alone",
                beside.default_budget_bytes < LEFT_BYTES,
                f"{show_memory(held)} held, {show_memory(beside.default_budget_bytes)} of "
                f"{show_memory(beside.memory_bytes)} to train in; {others} other processes seen",
            )
        )
        _run(session, beside, held)


def _run(session: Session, beside: Hardware, held: int) -> None:
    task = workload("llama", beside, session.scratch, global_batch_size=LARGE_BATCH)
    small = config_of({"per_device_train_batch_size": 4}, beside)
    large = config_of({"per_device_train_batch_size": LARGE_BATCH}, beside)
    with private_runner(session, beside) as runner:
        request = request_of(session.number(), small, task, beside)
        fits = session.run(request, "beside another process", runner=runner)
        peak = fits.measurement.memory.peak_bytes if fits.measurement else 0
        session.report.check(Check("a trial runs beside another process", bool(peak), str(fits.status)))
        if peak:
            own = peak < min(held, LEFT_BYTES)
            session.report.check(Check("its peak is its own", own, f"{show_memory(peak)} beside {show_memory(held)}"))
        # The whole device as its budget: it is the device that has no more.
        request = request_of(session.number(), large, task, beside, memory_bytes=beside.memory_bytes)
        short = session.run(request, "more than is left", runner=runner)
        passed = short.status is TrialStatus.OUT_OF_MEMORY
        session.report.check(Check("more than others leave is out of memory", passed, str(short.status)))


@contextlib.contextmanager
def _held(hardware: Hardware, size: int) -> Iterator[None]:
    holder = subprocess.Popen(
        [sys.executable, "-c", _HOLD, hardware.device, str(size)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "CUDA_DEVICE_ORDER": "PCI_BUS_ID"},
    )
    try:
        assert holder.stdout is not None
        if not holder.stdout.readline():
            raise RuntimeError(f"no process could hold {show_memory(size)}")
        yield
    finally:
        holder.kill()
        holder.communicate()
