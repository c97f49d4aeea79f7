"""Looks at the machine: what the doctor finds, how trials are started, and what calibration keeps."""

from __future__ import annotations

import json
import time
from typing import Any

from autotune.cost.rates import rates_by_table
from autotune.doctor import examine
from autotune.errors import InfrastructureError
from pack.check import Check, Ground, Kind
from pack.session import Session

RATES_WITHIN = 2.0  # measured rates are not further from what the table says is attainable


def look_at_machine(session: Session) -> None:
    """Ask the doctor; a device that torch can't use ends all hope."""
    diagnosis = examine(session.hardware.device)
    session.report.note(doctor=diagnosis.model_dump(mode="json", include={"machine", "findings"}))
    if not session.hardware.is_cpu:
        finding = next(f for f in diagnosis.findings if f.name in ("CUDA device", "torch"))
        session.report.check(Check("torch can use the device", finding.available, finding.detail))


def start_launcher(session: Session) -> None:
    """Start the process that trials come from and ask whether it may fork them."""
    began = time.monotonic()
    try:
        forkable = bool(session.runner.start().forkable)
    except InfrastructureError as error:
        forkable, detail = False, str(error)
    else:
        detail = f"ready after {time.monotonic() - began:.1f} s"
    session.report.note(launcher={"forkable": forkable, "start_s": time.monotonic() - began})
    session.report.check(Check("trials are forked from one process", forkable, detail))


def calibrate(session: Session) -> None:
    """Measure the device's rates into a home of the pack's own; those of a stand-in are impossible and not kept."""
    home = session.scratch / "home"
    home.mkdir()
    done = session.autotune(
        "doctor", "--device", session.hardware.device, "--calibrate", "--json", AUTOTUNE_HOME=str(home)
    )
    kept = list((home / "rates").glob("*.json"))
    told = (done.stderr.strip().splitlines() or [""])[-1]
    if session.ground is Ground.STAND_IN:
        refused = done.returncode == 4 and not kept
        session.report.check(Check("impossible rates are refused", refused, told or f"exit code {done.returncode}"))
        return
    answer: dict[str, Any] = json.loads(done.stdout) if done.returncode == 0 else {}
    rates = answer.get("rates")
    session.report.note(rates=rates, table_rates=answer.get("table_rates"))
    session.report.check(Check("rates are measured and kept", rates is not None and len(kept) == 1, told or "kept"))
    if rates is not None:
        session.report.check(_plausible(rates, session))


def _plausible(rates: dict[str, Any], session: Session) -> Check:
    table = rates_by_table(session.hardware)
    expected = {**table.matmul_flops, "bandwidth": table.bandwidth}
    measured = {**rates["matmul_flops"], "bandwidth": rates["bandwidth"]}
    shares = {what: rate / expected[what] for what, rate in measured.items() if what in expected}
    passed = all(1 / RATES_WITHIN <= share <= RATES_WITHIN for share in shares.values())
    shown = ", ".join(f"{what} {share:.2f}" for what, share in shares.items())
    return Check("rates are near those of the table", passed, f"measured over attainable: {shown}", Kind.VALUES_OR_TIME)
