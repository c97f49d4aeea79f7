"""CUDA_VISIBLE_DEVICES in each form that CUDA takes: autotune and its trials have to see the device that it means.

CUDA_VISIBLE_DEVICES=GPU-5f2e python -m pack.visible        # one look, as JSON, with benchmarks/ in PYTHONPATH
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pynvml

from autotune.errors import MachineError
from autotune.execution.environment import launcher_environment
from autotune.values.hardware import detect, nvml_handle
from pack.check import Check
from pack.session import Session, modules_path

LOOK_S = 120.0
STALE = 99  # no machine has so many

_TORCH = """
import json, torch
print(json.dumps([str(torch.cuda.get_device_properties(i).uuid) for i in range(torch.cuda.device_count())]))
"""


def check_forms(session: Session) -> None:
    """Look under each form, all at once."""
    uuid = uuid_of(session.hardware.device)
    index = pynvml.nvmlDeviceGetIndex(nvml_handle(session.hardware.device))
    forms: dict[str, tuple[str, str | None]] = {
        "index": (str(index), uuid),
        "UUID": (uuid, uuid),
        "UUID prefix": (prefix_of(uuid, _every_uuid()), uuid),
        "stale index behind it": (f"{index},{STALE}", uuid),
        "stale index": (str(STALE), None),
        "empty": ("", None),
    }
    looks = {name: _begin(value) for name, (value, _) in forms.items()}
    for name, process in looks.items():
        out, errors = process.communicate(timeout=LOOK_S)
        told = errors.strip().splitlines()
        found = json.loads(out) if process.returncode == 0 else {"error": told[-1] if told else "no answer"}
        session.report.check(judged(name, found, forms[name][1]))


def judged(name: str, found: dict[str, Any], uuid: str | None) -> Check:
    """Return whether a look has found the device `uuid`, or None and the reason."""
    title = f"CUDA_VISIBLE_DEVICES, {name}"
    if uuid is None:
        seen_none = bool(found.get("refused")) and found.get("auto") == "cpu"
        return Check(title, seen_none, str(found.get("refused") or found))
    bare = uuid.removeprefix("GPU-")
    passed = found.get("described") == uuid and found.get("in_trials") == [bare]
    return Check(
        title, passed, f"{found.get('described')}, in trials {found.get('in_trials')}" if passed else str(found)
    )


def uuid_of(device: str) -> str:
    """Return the UUID of a torch device ('cuda:0')."""
    return str(pynvml.nvmlDeviceGetUUID(nvml_handle(device)))


def prefix_of(uuid: str, every: list[str]) -> str:
    """Return the beginning of a UUID that no other one has, 12 characters at the least; all of it if there is none."""
    others = [other for other in every if other != uuid]
    prefixes = (uuid[:length] for length in range(12, len(uuid)))
    return next((p for p in prefixes if not any(other.startswith(p) for other in others)), uuid)


def _every_uuid() -> list[str]:
    handles = map(pynvml.nvmlDeviceGetHandleByIndex, range(pynvml.nvmlDeviceGetCount()))
    return [str(pynvml.nvmlDeviceGetUUID(handle)) for handle in handles]


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
    return {**found, "described": uuid_of("cuda:0"), "in_trials": seen}


def _begin(value: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "pack.visible"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": modules_path(), "CUDA_VISIBLE_DEVICES": value},
    )


if __name__ == "__main__":
    print(json.dumps(look()))
