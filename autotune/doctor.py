"""`autotune doctor`: finds what this machine and installation can do, what they can't and why, and what to install."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from autotune.cost.rates import rates_by_table
from autotune.execution.environment import ENVIRONMENT
from autotune.storage.home import read_timings
from autotune.units import show_memory
from autotune.value import Value
from autotune.values.estimate import Rates
from autotune.values.hardware import Hardware, cuda_count, detect, why_untuned

_PROBE_TIMEOUT_S = 180

# Only a product shows a driver too old for torch, or a GPU that it has no kernels for.
_PRODUCT = """
import sys, torch
torch.cuda.init()
a = torch.randn(64, 64, device=sys.argv[1])
float((a @ a).sum())
torch.cuda.synchronize(sys.argv[1])
"""


def why_unusable(device: str) -> str | None:
    """Return a line on why torch can't compute on `device` ('cuda:N', as NVML counts); None if it can."""
    environment = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", **os.environ}
    environment.pop("PYTORCH_NVML_BASED_CUDA_CHECK", None)
    try:
        probe = _run(_PRODUCT, device, environment=environment)
    except subprocess.TimeoutExpired:
        return f"a product on it took more than {_PROBE_TIMEOUT_S} s"
    if not probe.returncode:
        return None
    # torch appends advice to an error of CUDA, whose first line says enough.
    advice = ("CUDA kernel errors might", "For debugging", "Compile with", "Search for", "Device-side assertion", " ")
    told = [line for line in probe.stderr.strip().splitlines() if line and not line.startswith(advice)]
    return told[-1] if told else f"a product on it ended with exit code {probe.returncode}"


def _run(code: str, *arguments: str, environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=_PROBE_TIMEOUT_S, env=environment)


# Run in a child process, as importing a broken library may end the process.
_PROBE = """
import json, torch
answer = {"cuda_build": torch.version.cuda}
for name in ("bitsandbytes", "peft", "datasets", "flash_attn", "liger_kernel", "torchao", "triton"):
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
    versions: dict[str, str]  # of installed packages
    rates: Rates  # by which times are predicted where no operator was measured


def examine(device: str = "auto") -> Report:
    """Return what `device` ('auto', 'cpu', 'cuda', 'cuda:N') and this installation can do; raises as `detect`."""
    hardware = detect(device)
    rates, is_measured = rates_by_table(hardware), read_timings(hardware) is not None
    kept = "of this device are kept" if is_measured else f"none yet, a search measures them; until then {rates.source}"
    measured = Finding(name="measured operators", available=is_measured, detail=kept)
    return Report(
        machine=f"{hardware.name}, {show_memory(hardware.memory_bytes)}, {hardware.cores} cores",
        hardware=hardware,
        findings=(*_findings(hardware, _libraries()), measured),
        versions=hardware.versions,
        rates=rates,
    )


def _findings(hardware: Hardware, libraries: dict[str, Any]) -> list[Finding]:
    on_cpu = hardware.is_cpu

    def library(name: str, brings: str, instead: str = "", least: Any = (), triton: bool = False) -> tuple[bool, str]:
        problem = libraries.get(name, "not probed")
        if on_cpu and instead:
            return False, f"needs CUDA; {instead}"
        if hardware.capability is not None and hardware.capability < least:
            return False, f"needs compute capability {least[0]}.{least[1]} or newer"
        if triton and not on_cpu and not hardware.has_cc:
            return False, "Triton finds no C compiler: install gcc, or name it in CC"
        return problem == "", f"{problem}: {brings}" if problem else brings

    tf32 = "fp32 products at up to 8 times the rate" if hardware.has_tf32 else "needs an Ampere or newer GPU"
    if on_cpu:
        in_hardware = {"amx_bf16", "avx512_bf16"} & set(hardware.features)
        emulated = "emulated, slower than fp32: this CPU has neither AMX nor AVX512-BF16"
        bf16 = True, "in hardware" if in_hardware else emulated
        fp16 = False, "the Trainer silently stays in fp32 on a CPU"
        can_limit = os.access("/proc/self/clear_refs", os.W_OK) and Path("/proc/self/status").exists()
        needs = "needs Linux's /proc to enforce and read memory"
        budget = can_limit, "enforced by RLIMIT_DATA" if can_limit else needs
        compiler = f"inductor with {hardware.cxx}" if hardware.cxx else "inductor needs a C++ compiler (g++)"
        compiled = hardware.cxx is not None, compiler
    else:
        needs = "needs compute capability 8.0 (Ampere) or newer"
        bf16 = hardware.has_bf16, "halves activations" if hardware.has_bf16 else needs
        fp16 = True, "with loss scaling; some models overflow (T5)"
        budget = True, "the caching allocator is capped"
        compiled = library("triton", "inductor generates Triton kernels", least=(7, 0), triton=True)
    device, *found = _device(hardware, libraries)
    spill, flash = "optimizer states spill to host memory", "sdpa has a flash kernel of its own"
    answers = {
        device: found,
        "bf16": bf16,
        "fp16": fp16,
        "tf32": (hardware.has_tf32, tf32),
        "fp8": library("torchao", "linear layers of compiled models", instead="bf16 is the nearest", least=(8, 9)),
        "memory budget": budget,
        "8-bit optimizers": library("bitsandbytes", "AdamW states of 2 instead of 8 bytes a parameter"),
        "paged optimizers": library("bitsandbytes", spill, instead="on the CPU nothing is paged"),
        "LoRA": library("peft", "adapters beside frozen weights (--allow method)"),
        "real data": library("datasets", "--data FILE"),
        "flash attention": library("flash_attn", flash, instead="sdpa is used", least=(8, 0)),
        "Liger kernels": library("liger_kernel", "fused losses and norms", instead="the model's own", triton=True),
        "torch.compile": compiled,
    }
    return [Finding(name=name, available=bool(yes), detail=str(detail)) for name, (yes, detail) in answers.items()]


def _libraries() -> dict[str, Any]:
    """Return the CUDA version of torch, and for each library an empty text, or why it can't be imported."""
    try:
        probe = _run(_PROBE, environment={**os.environ, **ENVIRONMENT})
        answer: dict[str, Any] = json.loads(probe.stdout.strip().splitlines()[-1])
        return answer
    except subprocess.TimeoutExpired:
        return {"torch": f"importing the libraries took more than {_PROBE_TIMEOUT_S} s"}
    except (ValueError, IndexError):
        lines = probe.stderr.strip().splitlines()
        return {"torch": lines[-1] if lines else "importing torch failed"}


def _device(hardware: Hardware, libraries: dict[str, Any]) -> tuple[str, bool, str]:
    name, count = "CUDA device", cuda_count()
    if "torch" in libraries:
        return "torch", False, str(libraries["torch"])
    if not count:
        return name, False, why_untuned() or "the NVIDIA driver shows none: the CPU is tuned"
    build = libraries["cuda_build"]
    if build is None:
        return name, False, "the driver shows one, but this torch is a CPU build: install a CUDA build"
    why = why_unusable("cuda:0" if hardware.is_cpu else hardware.device)
    if why is not None:
        return name, False, f"torch (CUDA {build}) can't compute on it with driver {hardware.driver}: {why}"
    return name, True, f"{count} visible to the driver, a product was computed; torch is built for CUDA {build}"
