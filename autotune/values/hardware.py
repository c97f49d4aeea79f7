"""The hardware: device, host, memory and installed versions, read by NVML and psutil without importing torch."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib.metadata
import os
import platform
import re
import shutil
from pathlib import Path
from typing import Literal

import psutil
import pynvml
from pydantic import Field, PositiveInt, field_validator

from autotune.errors import InputError, MachineError
from autotune.value import Value
from autotune.values.nvml import capability_of, driver_errors, memory_of, nvml_handle, visible_indices
from autotune.values.techniques import PACKAGES as OPTIMIZER_PACKAGES

# Share of the free memory that the default budget leaves out: memory use of other processes varies, and the allocator
# fragments more in a training run of hours than in a trial of seconds.
_MARGIN = 0.08

# Environment variable with settings of torch's allocator, and its older name.
ALLOCATOR_VARIABLE, _OLD_ALLOCATOR_VARIABLE = "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"

# glibc's malloc hands out larger blocks by mmap, and takes them back at once. The value with which processes of trials
# on a CPU start: see `keep_freed_blocks`, which undoes it before anything is timed.
MMAP_THRESHOLD, OWN_MMAP_THRESHOLD = "MALLOC_MMAP_THRESHOLD_", str(16 << 10)
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # malloc.h

# Environment variable that switches TF32 on when torch starts; vendors' images set it, and no argument of the Trainer
# switches it off again.
TF32_VARIABLE = "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE"

PACKAGES = (
    "torch", "transformers", "accelerate", "peft", "bitsandbytes", "optuna", "datasets", "triton", "flash-attn",
    "flash-attn-3", "liger-kernel", "kernels", "torchao", "transformer-engine", "deepspeed",
    *(package for package in OPTIMIZER_PACKAGES if package not in ("bitsandbytes", "torchao")),
)  # fmt: skip

# Valid names and versions of packages, which become requirements of an exported image. Python and transformers need a
# major and a minor version, which decide what arguments exist.
_PACKAGE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_VERSION = re.compile(r"[A-Za-z0-9][A-Za-z0-9.+!_-]*")
_PARTED = re.compile(r"[0-9]+\.[0-9]+[A-Za-z0-9.+!_-]*")
_COMPARED = ("python", "transformers")


class Hardware(Value):
    """One device and the host around it."""

    kind: Literal["cpu", "cuda"]
    device: str = Field(pattern=r"^(cpu|cuda(:[0-9]+)?)$", description="torch device, e.g. 'cpu' or 'cuda:0'")
    name: str
    memory_bytes: int = Field(description="memory of the device; CPU: of the host")
    free_bytes: int = Field(description="free memory when detected")
    cores: int = Field(description="logical cores of the host that this process may use")
    host_memory_bytes: int
    capability: tuple[int, int] | None = Field(default=None, description="CUDA compute capability")
    arithmetic: tuple[str, ...] | None = Field(
        default=None, description="dtypes of a GPU without CUDA capability (AMD); None: by capability"
    )
    driver: str | None = None
    features: tuple[str, ...] = Field(default=(), description="CPU: vector extensions that matter to training")
    cxx: str | None = Field(default=None, description="C++ compiler that torch's inductor would use")
    has_cc: bool = Field(default=True, description="CUDA: whether Triton finds a C compiler for its launchers")
    starts_with_tf32: bool = Field(
        default=False, description=f"whether {TF32_VARIABLE} switches TF32 on in every process"
    )
    versions: dict[str, str] = Field(default_factory=dict)
    count: PositiveInt | None = Field(
        default=None, description="equal devices that trials may use, this one included; None: as many as asked for"
    )

    @field_validator("versions")
    @classmethod
    def _versions_of_packages(cls, versions: dict[str, str]) -> dict[str, str]:
        for package, version in versions.items():
            pattern = _PARTED if package in _COMPARED else _VERSION
            if not (_PACKAGE.fullmatch(package) and pattern.fullmatch(version)):
                raise ValueError(f"{package!r} can't have version {version!r}")
        return versions

    @property
    def fingerprint(self) -> str:
        """Short hash of what decides speed and memory: device, driver, cores, versions.

        It leaves out the free memory and the number of devices, which is part of a configuration.
        """
        usual = set() if self.starts_with_tf32 else {"starts_with_tf32"}
        return self.model_copy(update={"free_bytes": 0}).digest(leave_out=frozenset({"count", "has_cc", *usual}))

    @property
    def default_budget_bytes(self) -> int:
        """The default memory budget: the free memory less a margin."""
        return int(self.free_bytes * (1 - _MARGIN))

    @property
    def is_cpu(self) -> bool:
        """Whether training runs on the host's processor."""
        return self.kind == "cpu"

    def _computes_in(self, dtype: str) -> bool:
        if self.arithmetic is not None:
            return dtype in self.arithmetic
        return self.capability is not None and self.capability >= (8, 0)

    @property
    def has_tf32(self) -> bool:
        """Whether it computes in TensorFloat-32: Ampere (compute capability 8.0) or newer."""
        return self._computes_in("tf32")

    @property
    def has_bf16(self) -> bool:
        """Whether it computes in bf16: Ampere or newer, and every CPU."""
        return self.is_cpu or self._computes_in("bf16")


def detect(device: str = "auto") -> Hardware:
    """Return the device that `device` names: 'auto', 'cpu', 'cuda' or 'cuda:N'.

    Raises:
        InputError: `device` is none of these.
        MachineError: The device isn't there.
    """
    if device == "cpu":
        return _cpu()
    if device == "auto":
        return _cuda(0) if cuda_count() else _cpu()
    match = re.fullmatch(r"cuda(?::(\d+))?", device)
    if not match:
        raise InputError(f"--device {device}: expected auto, cpu, cuda or cuda:N")
    index, count = int(match[1] or 0), cuda_count()
    if index >= count:
        there = f"{count} CUDA device(s)" if count else "no CUDA device"
        raise MachineError(f"--device {device}: this machine has {there} that the NVIDIA driver can see")
    return _cuda(index)


def cuda_count() -> int:
    """Return the number of visible NVIDIA devices, 0 without a driver."""
    try:
        return len(visible_indices())
    except pynvml.NVMLError:
        return 0


def why_untuned() -> str | None:
    """Return a line on why the GPUs that torch is built for can't be tuned; None if they can."""
    version = installed_versions().get("torch", "")
    if "+rocm" not in version:
        return None
    return (
        f"torch {version} is built for AMD GPUs (ROCm), which autotune doesn't tune: --device cpu tunes the processor, "
        "and autotune estimate --gpu NAME predicts for a GPU"
    )


def like_devices(device: str) -> tuple[str, ...]:
    """Return the visible devices with the name and memory of `device` ('cuda:N'), which comes first.

    Raises:
        MachineError: The driver doesn't answer.
    """

    def looks(device: str) -> tuple[str, int]:
        handle = nvml_handle(device)
        return pynvml.nvmlDeviceGetName(handle), memory_of(handle).total

    with driver_errors(device):
        there = [f"cuda:{index}" for index in range(cuda_count())]
        return device, *(other for other in there if other != device and looks(other) == looks(device))


def used_bytes(hardware: Hardware) -> int:
    """Return the bytes of memory that all processes use now, on the device or (CPU, shared memory) on the host."""
    used = None if hardware.is_cpu else cuda_used_bytes(hardware.device)
    host = psutil.virtual_memory()
    return int(host.total - host.available) if used is None else used


def cuda_used_bytes(device: str) -> int | None:
    """Return the bytes that all processes use on a CUDA device ('cuda:N'); None: it shares the host's memory.

    Raises:
        MachineError: The driver doesn't answer.
    """
    with driver_errors(device):
        return memory_of(nvml_handle(device)).used


def cuda_free_bytes(device: str) -> int | None:
    """Return the bytes of a CUDA device that nobody uses; None, and raises, as `cuda_used_bytes` does."""
    with driver_errors(device):
        memory = memory_of(nvml_handle(device))
    return None if memory.used is None else memory.free


def own_used_bytes(device: str) -> int | None:
    """Return the bytes that this process and those below it use on a CUDA device; None: the driver doesn't tell.

    It doesn't in most containers, where processes have other numbers than the driver knows.
    """
    with contextlib.suppress(pynvml.NVMLError, IndexError, psutil.Error):
        own = {os.getpid(), *(child.pid for child in psutil.Process().children(recursive=True))}
        running = pynvml.nvmlDeviceGetComputeRunningProcesses(nvml_handle(device))
        used = {process.pid: process.usedGpuMemory for process in running if process.pid in own}
        if os.getpid() in used and None not in used.values():
            return sum(map(int, used.values()))
    return None


def _cpu() -> Hardware:
    memory, flags = psutil.virtual_memory(), _cpuinfo("flags").split()
    useful = ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_bf16", "amx_int8")
    return Hardware(
        kind="cpu",
        device="cpu",
        name=_cpuinfo("model name") or platform.processor() or platform.machine(),
        memory_bytes=memory.total,
        free_bytes=memory.available,
        cores=len(os.sched_getaffinity(0)),
        host_memory_bytes=memory.total,
        features=tuple(feature for feature in useful if feature in flags),
        cxx=_cxx(),
        versions=installed_versions(),
        count=1,
    )


def _cuda(index: int) -> Hardware:
    device = f"cuda:{index}"
    with driver_errors(device):
        handle = nvml_handle(device)
        memory = memory_of(handle)
        name, capability = pynvml.nvmlDeviceGetName(handle), capability_of(handle)
        driver = pynvml.nvmlSystemGetDriverVersion()
    return Hardware(
        kind="cuda",
        device=device,
        name=name,
        memory_bytes=memory.total,
        free_bytes=memory.free,
        cores=len(os.sched_getaffinity(0)),
        host_memory_bytes=psutil.virtual_memory().total,
        capability=capability,
        driver=driver,
        cxx=_cxx(),
        has_cc=_has_cc(),
        starts_with_tf32=os.environ.get(TF32_VARIABLE) == "1",
        versions=installed_versions(),
        count=len(like_devices(device)),
    )


def allocator_settings() -> str | None:
    """Return the settings that the user's environment has for torch's allocator."""
    return os.environ.get(ALLOCATOR_VARIABLE, os.environ.get(_OLD_ALLOCATOR_VARIABLE))


def keep_freed_blocks() -> None:
    """Let malloc keep what this process frees, as it usually does; not if the user's environment says otherwise.

    Mapping each block of more than `OWN_MMAP_THRESHOLD` bytes anew lets memory be measured, and costs time that a
    user's own training doesn't take.
    """
    if os.environ.get(MMAP_THRESHOLD) != OWN_MMAP_THRESHOLD:
        return
    # What glibc's malloc comes to by itself when blocks of up to 32 MiB are freed (mallopt(3)).
    libc = ctypes.CDLL(None)
    for parameter, value in ((_M_MMAP_THRESHOLD, 32 << 20), (_M_TRIM_THRESHOLD, 64 << 20)):
        with contextlib.suppress(AttributeError):  # another C library, which has no such thresholds
            libc.mallopt(parameter, value)


def installed_versions() -> dict[str, str]:
    """Return the versions of Python and of the installed packages in `PACKAGES`."""
    found = {package: version for package in PACKAGES if (version := _version(package)) is not None}
    return {"python": platform.python_version(), **found}


@functools.cache  # a look-up takes milliseconds
def _version(package: str) -> str | None:
    try:
        found = importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
    return found if found and _VERSION.fullmatch(found) else None


def _cxx() -> str | None:
    # $CXX, g++ or clang++, as torch's inductor looks for it
    return next((name for name in (os.environ.get("CXX"), "g++", "clang++") if name and shutil.which(name)), None)


def _has_cc() -> bool:
    # $CC if set, otherwise gcc or clang, as Triton looks for it (its `runtime/build.py`)
    named = os.environ.get("CC")
    return any(shutil.which(name) for name in ((named,) if named is not None else ("gcc", "clang")) if name)


def _cpuinfo(key: str) -> str:
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return ""
    match = re.search(rf"^{key}\s*:\s*(.*)$", text, re.MULTILINE)
    return match[1].strip() if match else ""
