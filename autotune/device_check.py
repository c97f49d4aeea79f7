"""Tries whether torch can compute on a CUDA device: a product, in a process of its own. Called by the doctor.

That a driver shows a device says little: a driver that is too old for torch's CUDA, or an architecture that this build
has no kernels for, shows when something is computed. Nothing here is asked of NVML alone, as trials' launchers do.
"""

from __future__ import annotations

import os
import subprocess
import sys

TIME_LIMIT_S = 180

_PROBE = """
import sys, torch
torch.cuda.init()
a = torch.randn(64, 64, device=sys.argv[1])
float((a @ a).sum())
torch.cuda.synchronize(sys.argv[1])
"""

# What torch adds to an error of CUDA, of which the first line tells enough.
_ADVICE = ("CUDA kernel errors might", "For debugging", "Compile with", "Search for", "Device-side assertion")


def why_unusable(device: str) -> str | None:
    """Return why torch can't compute on `device` ('cuda:N', as NVML counts), in a line; None: it can."""
    environment = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", **os.environ}
    environment.pop("PYTORCH_NVML_BASED_CUDA_CHECK", None)
    try:
        probe = subprocess.run(
            [sys.executable, "-c", _PROBE, device],
            capture_output=True,
            text=True,
            timeout=TIME_LIMIT_S,
            env=environment,
        )
    except subprocess.TimeoutExpired:
        return f"a product on it took more than {TIME_LIMIT_S} s"
    if not probe.returncode:
        return None
    told = [line for line in probe.stderr.strip().splitlines() if line and not line.startswith((*_ADVICE, " "))]
    return told[-1] if told else f"a product on it ended with exit code {probe.returncode}"
