"""What the machine does beside training: its doctor and launcher, hidden and shared devices, TF32 from outside.

CUDA_VISIBLE_DEVICES=GPU-5f2e python -m pack.machine        # one look, as JSON, with benchmarks/ in PYTHONPATH
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pynvml

from autotune.doctor import examine
from autotune.errors import InfrastructureError, MachineError
from autotune.execution.environment import launcher_environment
from autotune.units import GIB, show_memory
from autotune.value import read_value
from autotune.values.conditions import computing_on
from autotune.values.hardware import Hardware, detect, nvml_handle
from autotune.values.trial import TrialResult, TrialStatus
from pack.configurations import MODELS, Configuration, workload
from pack.report import story_of
from pack.session import Session, modules_path
from pack.trials import config_of, judged, request_of


def look_at_machine(session: Session) -> None:
    """Ask the doctor; a device that torch can't use ends all hope."""
    diagnosis = examine(session.hardware.device)
    session.report.note(doctor=diagnosis.model_dump(mode="json", include={"machine", "findings"}))
    if not session.hardware.is_cpu:
        finding = next(f for f in diagnosis.findings if f.name in ("CUDA device", "torch"))
        session.report.check("torch can use the device", finding.available, finding.detail)


def start_launcher(session: Session) -> None:
    """Start the process that trials come from and ask whether it may fork them."""
    began, refused = time.monotonic(), ""
    try:
        forkable = bool(session.runner.start().forkable)
    except InfrastructureError as error:
        forkable, refused = False, str(error)
    start_s = time.monotonic() - began
    session.report.note(launcher={"forkable": forkable, "start_s": start_s})
    session.report.check("trials are forked from one process", forkable, refused or f"ready after {start_s:.1f} s")


def _last_line(text: str) -> str:
    return (text.strip().splitlines() or [""])[-1]


# CUDA_VISIBLE_DEVICES in each form that CUDA takes: autotune and its trials have to see the device that it means.

LOOK_S = 120.0
STALE = 99  # no machine has so many

_TORCH = """
import json, torch
print(json.dumps([str(torch.cuda.get_device_properties(i).uuid) for i in range(torch.cuda.device_count())]))
"""


def check_visible(session: Session) -> None:
    """Look under each form, all at once."""
    uuid = _uuid_of(session.hardware.device)
    index = pynvml.nvmlDeviceGetIndex(nvml_handle(session.hardware.device))
    forms: dict[str, tuple[str, str | None]] = {
        "index": (str(index), uuid),
        "UUID": (uuid, uuid),
        "UUID prefix": (_prefix_of(uuid), uuid),
        "stale index behind it": (f"{index},{STALE}", uuid),
        "stale index": (str(STALE), None),
        "empty": ("", None),
    }
    looks = {}
    for name, (value, _) in forms.items():
        environment = {**os.environ, "PYTHONPATH": modules_path(), "CUDA_VISIBLE_DEVICES": value}
        command, pipes = [sys.executable, "-m", "pack.machine"], dict.fromkeys(("stdout", "stderr"), subprocess.PIPE)
        looks[name] = subprocess.Popen(command, **pipes, text=True, env=environment)
    for name, process in looks.items():
        out, errors = process.communicate(timeout=LOOK_S)
        found = json.loads(out) if process.returncode == 0 else {"error": _last_line(errors) or "no answer"}
        wanted = forms[name][1]
        if wanted is None:
            passed, shown = bool(found.get("refused")) and found.get("auto") == "cpu", found.get("refused")
        else:
            described, seen = found.get("described"), found.get("in_trials")
            passed = described == wanted and seen == [wanted.removeprefix("GPU-")]
            shown = f"{described}, in trials {seen}" if passed else None
        session.report.check(f"CUDA_VISIBLE_DEVICES, {name}", passed, str(shown or found))


def look() -> dict[str, Any]:
    """Return which device autotune describes here, and which ones its trials see."""
    found: dict[str, Any] = {"auto": detect("auto").kind}
    try:
        device = detect("cuda").device
    except MachineError as error:
        return {**found, "refused": str(error)}
    environment = launcher_environment(device, {})
    done = subprocess.run([sys.executable, "-c", _TORCH], capture_output=True, text=True, env=environment)
    seen = json.loads(done.stdout) if done.returncode == 0 else done.stderr.strip()[-300:]
    return {**found, "described": _uuid_of("cuda:0"), "in_trials": seen}


def _uuid_of(device: str) -> str:
    return str(pynvml.nvmlDeviceGetUUID(nvml_handle(device)))


def _prefix_of(uuid: str) -> str:
    """Return the beginning of a UUID that no other one has, 12 characters at the least; all of it if there is none."""
    handles = map(pynvml.nvmlDeviceGetHandleByIndex, range(pynvml.nvmlDeviceGetCount()))
    others = [other for handle in handles if (other := str(pynvml.nvmlDeviceGetUUID(handle))) != uuid]
    prefixes = (uuid[:length] for length in range(12, len(uuid)))
    return next((p for p in prefixes if not any(other.startswith(p) for other in others)), uuid)


# A device that is shared with a process that holds most of its memory: budgets and peaks leave its share alone.

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
    check, device = session.report.check, session.hardware.device
    held = detect(device).free_bytes - LEFT_BYTES
    if held < LEFT_BYTES:
        check("another process holds memory", False, f"only {show_memory(held)} to hold")
        return
    with _held(device, held):
        beside = detect(device)
        budget = beside.default_budget_bytes
        shown = f"{show_memory(held)} held, {show_memory(budget)} of {show_memory(beside.memory_bytes)} to train in; "
        shown += f"{len(computing_on(device))} processes on it seen"
        check("a budget leaves the memory of others alone", budget < LEFT_BYTES, shown)
        _train_beside(session, beside, held)


def _train_beside(session: Session, beside: Hardware, held: int) -> None:
    check = session.report.check
    task = workload("llama", beside, session.scratch, global_batch_size=LARGE_BATCH)
    with session.private_runner(session.part, beside) as runner:
        small = config_of({"per_device_train_batch_size": 4}, beside)
        fits = session.run(request_of(session.number(), small, task, beside), "beside another process", runner=runner)
        peak = fits.measurement.memory.peak_bytes if fits.measurement else 0
        check("a trial runs beside another process", bool(peak), str(fits.status))
        if peak:
            shown = f"{show_memory(peak)} beside {show_memory(held)}"
            check("its peak is its own", peak < min(held, LEFT_BYTES), shown)
        # The whole device as its budget: it is the device that has no more.
        large = config_of({"per_device_train_batch_size": LARGE_BATCH}, beside)
        request = request_of(session.number(), large, task, beside, memory_bytes=beside.memory_bytes)
        short = session.run(request, "more than is left", runner=runner)
        out = short.status is TrialStatus.OUT_OF_MEMORY
        check("more than others leave is out of memory", out, str(short.status))


@contextlib.contextmanager
def _held(device: str, size: int) -> Iterator[None]:
    command, environment = [sys.executable, "-c", _HOLD, device, str(size)], {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    pipes = dict.fromkeys(("stdin", "stdout"), subprocess.PIPE)
    holder = subprocess.Popen(command, **pipes, text=True, env={**os.environ, **environment})
    try:
        assert holder.stdout is not None
        if not holder.stdout.readline():
            raise RuntimeError(f"no process could hold {show_memory(size)}")
        yield
    finally:
        holder.kill()
        holder.communicate()


# TF32 that is switched on from outside: by torch's variable in the environment, and by a user's own script.

VARIABLE = "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE"
SCRIPT = Path(__file__).with_name("tf32_script.py")
LEAST_SEARCH_S = 20.0

PRESET = (
    Configuration("fp32", {"precision": "fp32"}, seen={"tf32": "^tf32$"}),
    Configuration("tf32", {"precision": "fp32", "tf32": True}, seen={"tf32": "^tf32$"}),
    Configuration("bf16", {"precision": "bf16"}),
)


def preset_tf32(session: Session) -> None:
    """Run trials with TF32 on from the start, and tune a script that switches it on itself."""
    with mock.patch.dict(os.environ, {VARIABLE: "1"}):
        hardware = detect(session.hardware.device)
        task = workload("llama", hardware, session.scratch)
        with session.private_runner(session.part, hardware) as runner:
            for row in PRESET:
                request = request_of(session.number(), config_of(row.config, hardware), task, hardware)
                found = judged(row, session.run(request, f"{row.name} under {VARIABLE}=1", runner=runner))
                session.report.check(*found._replace(name=f"{VARIABLE}=1: {row.name}"))
    config, folder = session.scratch / "script-config.json", session.scratch / "script"
    config.write_text(json.dumps(MODELS["tiny-llama"][session.hardware.kind]))
    done = session.autotune(
        "script", "--device", session.hardware.device, "--effort", "quick", "--max-trials", "1",
        "--max-time", f"{max(LEAST_SEARCH_S, session.seconds / 2):.0f}", "--run-dir", str(folder), "--json",
        "--", sys.executable, str(SCRIPT), str(config), str(session.scratch / "script-out"),
        AUTOTUNE_RECORD="off", AUTOTUNE_HOME=session.scratch / "script-home",
    )  # fmt: skip
    results = [read_value(TrialResult, path) for path in sorted(folder.glob("trials/*/result.json"))]
    for result in results:
        session.report.trial(story_of(session.part, result, observed_bytes=None, named="script"), result)
    bad = sum(r.measurement is None for r in results)
    passed = done.returncode == 0 and bool(results) and not bad
    detail = f"{len(results)} trials, {bad} not completed" + (f": {_last_line(done.stderr)}" if not passed else "")
    session.report.check("a script that sets allow_tf32 is tuned", passed, detail)


if __name__ == "__main__":
    print(json.dumps(look()))
