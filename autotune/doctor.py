"""Tells what this machine and installation can and cannot do, why, and what a missing part would bring."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from pydantic import Field

from autotune.cost.calibrate import calibrate, rates_by_table
from autotune.errors import MachineError
from autotune.execution.environment import ENVIRONMENT
from autotune.storage.home import rates_path, read_rates, writable, write_rates
from autotune.units import show_memory
from autotune.value import Value
from autotune.values.conditions import OtherProcess, other_processes
from autotune.values.estimate import Rates
from autotune.values.hardware import Hardware, cuda_count, detect

_PROBE_TIMEOUT_S = 180

_PRODUCT = """
import sys, torch
torch.cuda.init()
a = torch.randn(64, 64, device=sys.argv[1])
float((a @ a).sum())
torch.cuda.synchronize(sys.argv[1])
"""

# What torch adds to an error of CUDA, of which the first line tells enough.
_ADVICE = ("CUDA kernel errors might", "For debugging", "Compile with", "Search for", "Device-side assertion")


def why_unusable(device: str) -> str | None:
    """Return why torch can't compute on `device` ('cuda:N', as NVML counts), in a line; None: it can.

    A product is computed in a process of its own: that a driver shows a device says little. A driver that is too old
    for torch's CUDA, or an architecture that this build has no kernels for, shows when something is computed.
    """
    environment = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", **os.environ}
    environment.pop("PYTORCH_NVML_BASED_CUDA_CHECK", None)
    try:
        probe = subprocess.run(
            [sys.executable, "-c", _PRODUCT, device],
            capture_output=True,
            text=True,
            timeout=_PROBE_TIMEOUT_S,
            env=environment,
        )
    except subprocess.TimeoutExpired:
        return f"a product on it took more than {_PROBE_TIMEOUT_S} s"
    if not probe.returncode:
        return None
    told = [line for line in probe.stderr.strip().splitlines() if line and not line.startswith((*_ADVICE, " "))]
    return told[-1] if told else f"a product on it ended with exit code {probe.returncode}"


# Asked in a process of its own: importing a broken library must not end the doctor.
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
    """One thing that the machine can or cannot do."""

    name: str
    available: bool
    detail: str


class Report(Value):
    """What the doctor found."""

    machine: str
    hardware: Hardware
    findings: tuple[Finding, ...]
    versions: dict[str, str] = Field(description="of what is installed")
    rates: Rates | None = Field(default=None, description="measured ones, if any are kept")
    rates_file: str | None = Field(default=None, description="where they are kept")
    table_rates: Rates | None = Field(default=None, description="by data sheets, which serve where none are kept")


def examine(device: str = "auto", *, measure: bool = False) -> Report:
    """Return what `device` and this installation can do.

    Args:
        device: As :func:`autotune.values.hardware.detect` takes it.
        measure: Measure the device's rates and keep them, which takes seconds.

    Raises:
        InputError, MachineError: As :func:`autotune.values.hardware.detect`; the measured rates can't be kept.
        MachineError, InfrastructureError: As :func:`autotune.cost.calibrate.calibrate`.
    """
    hardware = detect(device)
    busy = _measure(hardware) if measure else []
    rates = read_rates(hardware)
    libraries = _libraries()
    findings = (
        *_device(hardware, libraries),
        *_precisions(hardware),
        _memory_guard(hardware),
        _library("8-bit optimizers", "bitsandbytes", libraries, "AdamW states of 2 instead of 8 bytes a parameter"),
        _paged(hardware, libraries),
        _library("LoRA", "peft", libraries, "adapters beside frozen weights (--allow method)"),
        _library("real data", "datasets", libraries, "--data FILE"),
        _flash_attention(hardware, libraries),
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
        table_rates=_table_rates(hardware),
    )


def _measure(hardware: Hardware) -> list[OtherProcess]:
    """Measure and keep the rates; return who else was computing when it began."""
    writable("rates")  # fails at once rather than when all is measured
    busy = other_processes(hardware)
    write_rates(calibrate(hardware), hardware)
    return busy


def _rates(hardware: Hardware, kept: Rates | None, busy: list[OtherProcess]) -> Finding:
    if kept is None:
        detail = "none kept for this device; autotune doctor --calibrate measures them in seconds"
        return Finding(name="measured rates", available=False, detail=detail)
    beside = f"; measured beside {len(busy)} busy process(es), which makes them low" if busy else ""
    return Finding(name="measured rates", available=True, detail=f"kept in {rates_path(hardware)}{beside}")


def _table_rates(hardware: Hardware) -> Rates | None:
    try:
        return rates_by_table(hardware)
    except MachineError:
        return None


def _libraries() -> dict[str, Any]:
    """Return what importing the libraries gives: an empty text for each that works, otherwise the reason."""
    environment = {**os.environ, **ENVIRONMENT}
    try:
        probe = subprocess.run(
            [sys.executable, "-c", _PROBE],
            capture_output=True,
            text=True,
            timeout=_PROBE_TIMEOUT_S,
            env=environment,
        )
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
        return [Finding(name="CUDA device", available=False, detail="the NVIDIA driver shows none: the CPU is tuned")]
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


def _paged(hardware: Hardware, libraries: dict[str, Any]) -> Finding:
    if hardware.is_cpu:
        return Finding(name="paged optimizers", available=False, detail="needs CUDA; on the CPU nothing is paged")
    return _library("paged optimizers", "bitsandbytes", libraries, "optimizer states spill to host memory")


def _flash_attention(hardware: Hardware, libraries: dict[str, Any]) -> Finding:
    if hardware.is_cpu:
        return Finding(name="flash attention", available=False, detail="needs CUDA; sdpa is used")
    return _library("flash attention", "flash_attn", libraries, "sdpa has a flash kernel of its own")


def _compiler(hardware: Hardware, libraries: dict[str, Any]) -> Finding:
    if hardware.is_cpu:
        detail = f"inductor with {hardware.cxx}" if hardware.cxx else "inductor needs a C++ compiler (g++)"
        return Finding(name="torch.compile", available=hardware.cxx is not None, detail=detail)
    return _of_triton("torch.compile", "triton", hardware, libraries, "inductor generates Triton kernels")


def _of_triton(name: str, module: str, hardware: Hardware, libraries: dict[str, Any], brings: str) -> Finding:
    if not hardware.is_cpu and not hardware.has_cc:
        return Finding(name=name, available=False, detail="Triton finds no C compiler: install gcc, or name it in CC")
    return _library(name, module, libraries, brings)
