"""`autotune doctor`: finds what this machine and installation can do, what they can't and why, and what to install."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from pydantic import Field

from autotune.cost.rates import calibrate, known_rates
from autotune.execution.environment import ENVIRONMENT
from autotune.storage.home import rates_path, read_rates, writable, write_rates
from autotune.units import show_memory
from autotune.value import Value
from autotune.values.conditions import OtherProcess, other_processes
from autotune.values.estimate import Rates
from autotune.values.hardware import Hardware, cuda_count, detect, why_untuned

_PROBE_TIMEOUT_S = 180

_PRODUCT = """
import sys, torch
torch.cuda.init()
a = torch.randn(64, 64, device=sys.argv[1])
float((a @ a).sum())
torch.cuda.synchronize(sys.argv[1])
"""

# Beginnings of lines that torch appends to an error of CUDA, whose first line says enough.
_ADVICE = ("CUDA kernel errors might", "For debugging", "Compile with", "Search for", "Device-side assertion")


def why_unusable(device: str) -> str | None:
    """Return a line on why torch can't compute on `device` ('cuda:N', as NVML counts); None if it can.

    A matrix product is computed in a child process. Only that shows a driver too old for the CUDA of torch, or an
    architecture for which this build of torch has no kernels.
    """
    environment = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", **os.environ}
    environment.pop("PYTORCH_NVML_BASED_CUDA_CHECK", None)
    try:
        probe = _run(_PRODUCT, device, environment=environment)
    except subprocess.TimeoutExpired:
        return f"a product on it took more than {_PROBE_TIMEOUT_S} s"
    if not probe.returncode:
        return None
    told = [line for line in probe.stderr.strip().splitlines() if line and not line.startswith((*_ADVICE, " "))]
    return told[-1] if told else f"a product on it ended with exit code {probe.returncode}"


def _run(code: str, *arguments: str, environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    """Run Python code in a child process; raise `subprocess.TimeoutExpired` after `_PROBE_TIMEOUT_S`."""
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=_PROBE_TIMEOUT_S, env=environment)


# Run in a child process, as importing a broken library may end the process.
_PROBE = """
import json, torch
answer = {"cuda_build": torch.version.cuda}
for name in ("bitsandbytes", "peft", "datasets", "flash_attn", "liger_kernel", "triton"):
    try:
        __import__(name)
        answer[name] = ""
    except Exception as error:
        answer[name] = f"{type(error).__name__}: {error}".splitlines()[0]
print("\\n" + json.dumps(answer))
"""


class Finding(Value):
    """Something that the machine can or can't do, with details or the reason."""

    name: str
    available: bool
    detail: str


class Report(Value):
    """All findings about a machine and installation."""

    machine: str
    hardware: Hardware
    findings: tuple[Finding, ...]
    versions: dict[str, str] = Field(description="versions of installed packages")
    rates: Rates | None = Field(default=None, description="measured rates, if any are stored")
    rates_file: str | None = Field(default=None, description="file of the measured rates")
    table_rates: Rates | None = Field(default=None, description="rates of data sheets, used if none were measured")


def examine(device: str = "auto", *, measure: bool = False) -> Report:
    """Return what `device` and this installation can do.

    Args:
        device: 'auto', 'cpu', 'cuda' or 'cuda:N'.
        measure: Measure the device's rates and store them, which takes seconds.

    Raises:
        InputError, MachineError: As :func:`autotune.values.hardware.detect`; or the rates can't be stored.
        MachineError, InfrastructureError: As :func:`autotune.cost.rates.calibrate`.
    """
    hardware = detect(device)
    busy: list[OtherProcess] = []
    if measure:
        writable("rates")  # fails before the measurement rather than after it
        busy = other_processes(hardware)
        write_rates(calibrate(hardware), hardware)
    rates = read_rates(hardware)
    libraries = _libraries()
    findings = (
        *_device(hardware, libraries),
        *_precisions(hardware),
        _memory_guard(hardware),
        _library("8-bit optimizers", "bitsandbytes", libraries, "AdamW states of 2 instead of 8 bytes a parameter"),
        _without_cuda(hardware, "paged optimizers", "on the CPU nothing is paged")
        or _library("paged optimizers", "bitsandbytes", libraries, "optimizer states spill to host memory"),
        _library("LoRA", "peft", libraries, "adapters beside frozen weights (--allow method)"),
        _library("real data", "datasets", libraries, "--data FILE"),
        _without_cuda(hardware, "flash attention", "sdpa is used")
        or _library("flash attention", "flash_attn", libraries, "sdpa has a flash kernel of its own"),
        _of_triton("Liger kernels", "liger_kernel", hardware, libraries, "fused losses and norms"),
        _compiler(hardware, libraries),
        _rates(hardware, rates, busy),
    )
    machine = f"{hardware.name}, {show_memory(hardware.memory_bytes)}, {hardware.cores} cores"
    return Report(
        machine=machine,
        hardware=hardware,
        findings=findings,
        versions=hardware.versions,
        rates=rates,
        rates_file=str(rates_path(hardware)) if rates else None,
        table_rates=known_rates(hardware),
    )


def _rates(hardware: Hardware, kept: Rates | None, busy: list[OtherProcess]) -> Finding:
    if kept is None:
        detail = "none kept for this device; autotune doctor --calibrate measures them in seconds"
        return Finding(name="measured rates", available=False, detail=detail)
    beside = f"; measured beside {len(busy)} busy process(es), which makes them low" if busy else ""
    return Finding(name="measured rates", available=True, detail=f"kept in {rates_path(hardware)}{beside}")


def _libraries() -> dict[str, Any]:
    """Return the CUDA version of torch, and for each library an empty text if it can be imported, else the reason."""
    try:
        probe = _run(_PROBE, environment={**os.environ, **ENVIRONMENT})
        answer: dict[str, Any] = json.loads(probe.stdout.strip().splitlines()[-1])
        return answer
    except subprocess.TimeoutExpired:
        return {"torch": f"importing the libraries took more than {_PROBE_TIMEOUT_S} s"}
    except (ValueError, IndexError):
        lines = probe.stderr.strip().splitlines()
        return {"torch": lines[-1] if lines else "importing torch failed"}


def _device(hardware: Hardware, libraries: dict[str, Any]) -> list[Finding]:
    if "torch" in libraries:
        return [Finding(name="torch", available=False, detail=str(libraries["torch"]))]
    count = cuda_count()
    if not count:
        detail = why_untuned() or "the NVIDIA driver shows none: the CPU is tuned"
        return [Finding(name="CUDA device", available=False, detail=detail)]
    build = libraries["cuda_build"]
    if build is None:
        detail = "the driver shows one, but this torch is a CPU build: install a CUDA build"
        return [Finding(name="CUDA device", available=False, detail=detail)]
    why = why_unusable("cuda:0" if hardware.is_cpu else hardware.device)
    if why is None:
        detail = f"{count} visible to the driver, a product was computed; torch is built for CUDA {build}"
    else:
        detail = f"torch (CUDA {build}) can't compute on it with driver {hardware.driver}: {why}"
    return [Finding(name="CUDA device", available=why is None, detail=detail)]


def _precisions(hardware: Hardware) -> list[Finding]:
    cpu_bf16 = "amx_bf16" in hardware.features or "avx512_bf16" in hardware.features
    if hardware.is_cpu:
        speed = "in hardware" if cpu_bf16 else "emulated, slower than fp32: this CPU has neither AMX nor AVX512-BF16"
        bf16 = Finding(name="bf16", available=True, detail=speed)
        fp16 = Finding(name="fp16", available=False, detail="the Trainer silently stays in fp32 on a CPU")
    else:
        detail = "halves activations" if hardware.has_bf16 else "needs compute capability 8.0 (Ampere) or newer"
        bf16 = Finding(name="bf16", available=hardware.has_bf16, detail=detail)
        fp16 = Finding(name="fp16", available=True, detail="with loss scaling; some models overflow (T5)")
    tf32 = "fp32 products at up to 8 times the rate" if hardware.has_tf32 else "needs an Ampere or newer GPU"
    return [bf16, fp16, Finding(name="tf32", available=hardware.has_tf32, detail=tf32)]


def _memory_guard(hardware: Hardware) -> Finding:
    if not hardware.is_cpu:
        return Finding(name="memory budget", available=True, detail="the caching allocator is capped")
    writable = os.access("/proc/self/clear_refs", os.W_OK) and Path("/proc/self/status").exists()
    detail = "enforced by RLIMIT_DATA" if writable else "needs Linux's /proc to enforce and read memory"
    return Finding(name="memory budget", available=writable, detail=detail)


def _library(name: str, module: str, libraries: dict[str, Any], brings: str) -> Finding:
    problem = libraries.get(module, "not probed")
    return Finding(name=name, available=problem == "", detail=f"{problem}: {brings}" if problem else brings)


def _without_cuda(hardware: Hardware, name: str, instead: str) -> Finding | None:
    return Finding(name=name, available=False, detail=f"needs CUDA; {instead}") if hardware.is_cpu else None


def _compiler(hardware: Hardware, libraries: dict[str, Any]) -> Finding:
    if hardware.is_cpu:
        detail = f"inductor with {hardware.cxx}" if hardware.cxx else "inductor needs a C++ compiler (g++)"
        return Finding(name="torch.compile", available=hardware.cxx is not None, detail=detail)
    return _of_triton("torch.compile", "triton", hardware, libraries, "inductor generates Triton kernels")


def _of_triton(name: str, module: str, hardware: Hardware, libraries: dict[str, Any], brings: str) -> Finding:
    if not hardware.is_cpu and not hardware.has_cc:
        return Finding(name=name, available=False, detail="Triton finds no C compiler: install gcc, or name it in CC")
    return _library(name, module, libraries, brings)
