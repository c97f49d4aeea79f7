"""The hardware: device, host, memory and installed versions, read by NVML and psutil without importing torch.

CUDA_VISIBLE_DEVICES is read as CUDA reads it: a list of indices or whole UUIDs of devices or MIG instances. Entries
after an invalid one are ignored. The index of a GPU in MIG mode means its first instance.
"""

import contextlib
import ctypes
import functools
import importlib.metadata
import os
import platform
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, NamedTuple

import psutil
import pynvml
from pydantic import Field, PositiveInt, field_validator

from autotune.errors import InputError, MachineError
from autotune.value import Value
from autotune.values.techniques import OPTIMIZERS

ALLOCATOR_VARIABLE = "PYTORCH_ALLOC_CONF"  # environment variable with settings of torch's allocator

# glibc's malloc maps blocks above this threshold, and gives them back to the system when they are freed. Processes of
# trials on a CPU start with our value, which `keep_freed_blocks` undoes before anything is timed.
MMAP_THRESHOLD, OWN_MMAP_THRESHOLD = "MALLOC_MMAP_THRESHOLD_", str(16 << 10)

# Variable that switches TF32 on when torch starts; vendors' images set it, and no argument of the Trainer undoes it.
TF32_VARIABLE = "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE"

_PACKAGES = dict.fromkeys((
    "torch", "transformers", "accelerate", "peft", "bitsandbytes", "optuna", "datasets", "triton", "flash-attn",
    "flash-attn-3", "liger-kernel", "kernels", "torchao", "transformer-engine", "deepspeed",
    *sorted({row.package for row in OPTIMIZERS.values() if row.package is not None}),
))  # fmt: skip

_VERSION = re.compile(r"[A-Za-z0-9][A-Za-z0-9.+!_-]*")


class Hardware(Value):
    """One device and the host around it."""

    kind: Literal["cpu", "cuda"]
    device: str = Field(pattern=r"^(cpu|cuda(:[0-9]+)?)$")  # torch device, e.g. 'cpu' or 'cuda:0'
    name: str
    memory_bytes: int  # memory of the device; CPU: of the host
    free_bytes: int  # free memory when detected
    cores: int  # logical cores of the host that this process may use
    host_memory_bytes: int
    capability: tuple[int, int] | None = None  # CUDA compute capability
    arithmetic: tuple[str, ...] | None = None  # dtypes of a GPU without CUDA capability (AMD); None: by capability
    driver: str | None = None
    features: tuple[str, ...] = ()  # CPU: vector extensions that matter to training
    cxx: str | None = None  # C++ compiler that torch's inductor would use
    has_cc: bool = True  # CUDA: whether Triton finds a C compiler for its launchers
    starts_with_tf32: bool = False  # whether `TF32_VARIABLE` switches TF32 on in every process
    versions: dict[str, str] = Field(default_factory=dict)
    count: PositiveInt | None = None  # equal devices that trials may use, this one included; None: as many as asked for
    peers: tuple[str, ...] | None = None  # the other visible ones like it; None: all are, and it is the first
    visible: tuple[str, ...] | None = None  # the entries of CUDA_VISIBLE_DEVICES; None: it isn't set
    nodes: PositiveInt = 1  # machines that share these equally
    # GB/s between two of them, of all devices of each together, one way; None: it wasn't measured, or there is one.
    network_gb_s: float | None = Field(default=None, gt=0)

    @field_validator("versions")
    @classmethod
    def _versions_of_packages(cls, versions: dict[str, str]) -> dict[str, str]:
        for package, version in versions.items():
            # Major and minor of these decide which arguments exist.
            parted = r"[0-9]+\.[0-9]+.*" if package in ("python", "transformers") else ".*"
            is_valid = _VERSION.fullmatch(version) and re.fullmatch(parted, version)
            if not (re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", package) and is_valid):
                raise ValueError(f"{package!r} can't have version {version!r}")
        return versions

    @property
    def fingerprint(self) -> str:
        """Short hash of what decides speed and memory: device, driver, cores, versions; free memory and count don't."""
        usual = set() if self.starts_with_tf32 else {"starts_with_tf32"}
        left_out = frozenset({"count", "peers", "visible", "network_gb_s", "has_cc", *usual})
        return self.model_copy(update={"free_bytes": 0}).digest(leave_out=left_out)

    def nodes_of(self, world_size: int) -> tuple[int, int]:
        """Return on how many machines a training of `world_size` is, which it fills, and its devices on each."""
        each = world_size if self.nodes == 1 else min(world_size, (self.count or world_size) // self.nodes)
        return world_size // each, each

    @property
    def default_budget_bytes(self) -> int:
        # Memory use of other processes varies, and the allocator fragments more in hours than in a trial of seconds.
        return int(self.free_bytes * (1 - 0.08))

    @property
    def is_cpu(self) -> bool:
        return self.kind == "cpu"

    def _computes_in(self, dtype: str) -> bool:
        if self.arithmetic is not None:
            return dtype in self.arithmetic
        least = (8, 9) if dtype == "fp8" else (8, 0)  # Ada and Hopper; Ampere
        return self.capability is not None and self.capability >= least

    @property
    def has_tf32(self) -> bool:
        return self._computes_in("tf32")

    @property
    def has_bf16(self) -> bool:
        return self.is_cpu or self._computes_in("bf16")

    @property
    def has_fp8(self) -> bool:
        return self._computes_in("fp8")


def detect(device: str = "auto") -> Hardware:
    """Return the device that `device` names: 'auto', 'cpu', 'cuda' or 'cuda:N'."""
    if device == "auto":
        device = "cuda:0" if cuda_count() else "cpu"
    memory = psutil.virtual_memory()
    known: dict[str, Any] = {
        "cores": len(os.sched_getaffinity(0)),
        "host_memory_bytes": memory.total,
        # As torch's inductor looks for it.
        "cxx": next(filter(shutil.which, (os.environ.get("CXX", ""), "g++", "clang++")), None),
        "versions": installed_versions(),
    }
    if device == "cpu":
        flags = _cpuinfo("flags").split()
        useful = ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_bf16", "amx_int8")
        name = _cpuinfo("model name") or platform.processor() or platform.machine()
        known |= {"features": tuple(feature for feature in useful if feature in flags), "count": 1}
        known |= {"memory_bytes": memory.total, "free_bytes": memory.available}
        return Hardware(kind="cpu", device="cpu", name=name, **known)
    match = re.fullmatch(r"cuda(?::(\d+))?", device)
    if not match:
        raise InputError(f"--device {device}: expected auto, cpu, cuda or cuda:N")
    index, count = int(match[1] or 0), cuda_count()
    if index >= count:
        there = f"{count} CUDA device(s)" if count else "no CUDA device"
        raise MachineError(f"--device {device}: this machine has {there} that the NVIDIA driver can see")
    device = f"cuda:{index}"
    with driver_errors(device):
        handle = nvml_handle(device)
        of_device, driver = memory_of(handle), pynvml.nvmlSystemGetDriverVersion()
        known |= {"name": pynvml.nvmlDeviceGetName(handle), "capability": capability_of(handle), "driver": driver}
    known |= {"memory_bytes": of_device.total, "free_bytes": of_device.free}
    compilers = ("gcc", "clang") if (named := os.environ.get("CC")) is None else (named,)  # as Triton
    known |= {"has_cc": any(map(shutil.which, compilers)), "starts_with_tf32": os.environ.get(TF32_VARIABLE) == "1"}
    alike = like_devices(device)
    peers = None if alike == tuple(f"cuda:{number}" for number in range(count)) else alike[1:]
    visible = tuple(map(str, visible_indices())) if "CUDA_VISIBLE_DEVICES" in os.environ else None
    return Hardware(kind="cuda", device=device, count=len(alike), peers=peers, visible=visible, **known)


def cuda_count() -> int:
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
    """Return the visible devices with the name and memory of `device` ('cuda:N'), which comes first."""

    def looks(device: str) -> tuple[str, int]:
        handle = nvml_handle(device)
        return pynvml.nvmlDeviceGetName(handle), memory_of(handle).total

    with driver_errors(device):
        there = [f"cuda:{index}" for index in range(cuda_count())]
        return device, *(other for other in there if other != device and looks(other) == looks(device))


def cuda_used_bytes(device: str) -> int | None:
    """Return the bytes that all processes use on a CUDA device ('cuda:N'); None: it shares the host's memory."""
    with driver_errors(device):
        return memory_of(nvml_handle(device)).used


def allocator_settings() -> str | None:
    return os.environ.get(ALLOCATOR_VARIABLE, os.environ.get("PYTORCH_CUDA_ALLOC_CONF"))  # the older name


def gives_blocks_back() -> bool:
    """Return whether malloc gives back the blocks that this process frees, by our threshold and not the user's own."""
    return os.environ.get(MMAP_THRESHOLD) == OWN_MMAP_THRESHOLD


def keep_freed_blocks() -> None:
    """Let malloc keep the blocks that this process frees, as it usually does, unless the user has set its threshold."""
    if not gives_blocks_back():
        return
    # The thresholds that glibc's malloc sets itself when blocks of up to 32 MiB are freed (mallopt(3)).
    libc = ctypes.CDLL(None)
    for parameter, value in ((-3, 32 << 20), (-1, 64 << 20)):  # M_MMAP_THRESHOLD and M_TRIM_THRESHOLD of malloc.h
        with contextlib.suppress(AttributeError):  # another C library, which has no such thresholds
            libc.mallopt(parameter, value)


@functools.cache  # a look-up takes milliseconds
def installed_versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for package in _PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            if (version := importlib.metadata.version(package)) and _VERSION.fullmatch(version):
                found[package] = version
    return found


def _cpuinfo(key: str) -> str:
    with contextlib.suppress(OSError):
        if match := re.search(rf"^{key}\s*:\s*(.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE):
            return match[1].strip()
    return ""


class DeviceMemory(NamedTuple):
    """The memory of one device in bytes."""

    total: int
    free: int
    used: int | None  # None: the device shares the host's memory, so its own use is unknown


def visible_indices() -> list[str | int]:
    pynvml.nvmlInit()
    count = pynvml.nvmlDeviceGetCount()
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return list(range(count))
    found: list[str | int] = []
    for entry in (e.strip() for e in visible.split(",") if e.strip()):
        try:
            if entry.isdigit() and int(entry) < count:
                found.append(int(entry))
            elif entry.startswith(("GPU-", "MIG-")):
                pynvml.nvmlDeviceGetHandleByUUID(entry)
                found.append(entry)
            else:
                break  # CUDA ignores the entries after it
        except pynvml.NVMLError:
            break
    return found


def nvml_handle(device: str) -> object:
    """Return NVML's handle of a torch device ('cuda:2'), whose number counts the devices in CUDA_VISIBLE_DEVICES."""
    entry = visible_indices()[int(device.partition(":")[2] or 0)]
    if isinstance(entry, str):
        return pynvml.nvmlDeviceGetHandleByUUID(entry)
    handle: object = pynvml.nvmlDeviceGetHandleByIndex(entry)
    with contextlib.suppress(pynvml.NVMLError):
        if pynvml.nvmlDeviceGetMigMode(handle)[0] == pynvml.NVML_DEVICE_MIG_ENABLE:
            for number in range(pynvml.nvmlDeviceGetMaxMigDeviceCount(handle)):
                with contextlib.suppress(pynvml.NVMLError):
                    return pynvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, number)
    return handle


def capability_of(handle: object) -> tuple[int, int]:
    major, minor = pynvml.nvmlDeviceGetCudaComputeCapability(whole_device(handle))  # a MIG instance has none of its own
    return major, minor


def whole_device(handle: object) -> object:
    """Return the handle of the whole device: of a MIG instance its device, of any other device its own."""
    with contextlib.suppress(pynvml.NVMLError):
        handle = pynvml.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(handle)
    return handle


def sharing_of(device: str) -> frozenset[str]:
    """Return how processes share a GPU: 'nobody' may use it, 'one' at a time, by 'MPS', as instances of 'MIG'."""
    found = set()
    with contextlib.suppress(pynvml.NVMLError, IndexError):
        handle = whole_device(nvml_handle(device))
        of_mode = {pynvml.NVML_COMPUTEMODE_PROHIBITED: "nobody", pynvml.NVML_COMPUTEMODE_EXCLUSIVE_PROCESS: "one"}
        found |= {of_mode.get(pynvml.nvmlDeviceGetComputeMode(handle), "all")} - {"all"}
        found |= {"MIG"} if pynvml.nvmlDeviceGetMigMode(handle)[0] == pynvml.NVML_DEVICE_MIG_ENABLE else set()
    # Where this file exists, every process that starts to use CUDA becomes a client of the MPS server.
    if Path(os.environ.get("CUDA_MPS_PIPE_DIRECTORY", "/tmp/nvidia-mps"), "control").exists():
        found.add("MPS")
    return frozenset(found)


def memory_of(handle: object) -> DeviceMemory:
    """Return a device's memory; that of the host if they share it (GB10, Jetson), which NVML doesn't report."""
    try:
        memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
    except pynvml.NVMLError_NotSupported:
        host = psutil.virtual_memory()
        return DeviceMemory(host.total, host.available, None)
    return DeviceMemory(int(memory.total), int(memory.free), int(memory.used))


@contextlib.contextmanager
def driver_errors(device: str) -> Iterator[None]:
    try:
        yield
    except pynvml.NVMLError as error:
        raise MachineError(
            f"{device}: the NVIDIA driver doesn't report it: {error}; `nvidia-smi` shows what is wrong, --device cpu "
            "needs no driver"
        ) from None
    except IndexError:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        raise MachineError(f"{device}: no such device is visible (CUDA_VISIBLE_DEVICES={visible})") from None
