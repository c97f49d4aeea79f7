"""The CUDA devices that are visible to this process, by NVML: their handles and their memory.

CUDA_VISIBLE_DEVICES is read as CUDA reads it: a list of indices or UUIDs of devices or MIG instances, where a UUID may
be shortened to a unique prefix. Entries after an invalid one are ignored. The index of a GPU in MIG mode means its
first instance.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import NamedTuple

import psutil
import pynvml

from autotune.errors import MachineError


class DeviceMemory(NamedTuple):
    """The memory of one device in bytes."""

    total: int
    free: int
    used: int | None  # None: the device shares the host's memory, so its own use is unknown


def visible_indices() -> list[str | int]:
    """Return the NVML index or UUID of each device that CUDA_VISIBLE_DEVICES leaves visible.

    Raises:
        pynvml.NVMLError: The driver doesn't answer.
    """
    pynvml.nvmlInit()
    count = pynvml.nvmlDeviceGetCount()
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return list(range(count))
    found: list[str | int] = []
    for entry in (e.strip() for e in visible.split(",") if e.strip()):
        known = _known(entry, count)
        if known is None:  # CUDA ignores the entries after it
            break
        found.append(known)
    return found


def _known(entry: str, count: int) -> str | int | None:
    """Return the index or full UUID for an entry of CUDA_VISIBLE_DEVICES, None if there is no such device."""
    if entry.isdigit():
        return int(entry) if int(entry) < count else None
    if not entry.startswith(("GPU-", "MIG-")):
        return None
    with contextlib.suppress(pynvml.NVMLError):
        pynvml.nvmlDeviceGetHandleByUUID(entry)
        return entry
    fitting = [uuid for uuid in _uuids(count) if uuid.startswith(entry)]
    return fitting[0] if len(fitting) == 1 else None


def _uuids(count: int) -> Iterator[str]:
    for index in range(count):
        with contextlib.suppress(pynvml.NVMLError):
            handle = pynvml.nvmlDeviceGetHandleByIndex(index)
            yield pynvml.nvmlDeviceGetUUID(handle)
            for instance in _instances(handle):
                yield pynvml.nvmlDeviceGetUUID(instance)


def _instances(handle: object) -> Iterator[object]:
    with contextlib.suppress(pynvml.NVMLError):
        if pynvml.nvmlDeviceGetMigMode(handle)[0] != pynvml.NVML_DEVICE_MIG_ENABLE:
            return
        for number in range(pynvml.nvmlDeviceGetMaxMigDeviceCount(handle)):
            with contextlib.suppress(pynvml.NVMLError):
                yield pynvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, number)


def nvml_handle(device: str) -> object:
    """Return NVML's handle of a torch device ('cuda:2'), whose number counts the devices in CUDA_VISIBLE_DEVICES.

    Raises:
        pynvml.NVMLError: The driver doesn't answer.
        IndexError: There is no such device.
    """
    entry = visible_indices()[int(device.partition(":")[2] or 0)]
    if isinstance(entry, str):
        return pynvml.nvmlDeviceGetHandleByUUID(entry)
    handle = pynvml.nvmlDeviceGetHandleByIndex(entry)
    return next(_instances(handle), handle)


def capability_of(handle: object) -> tuple[int, int]:
    """Return a device's compute capability; a MIG instance has that of its device.

    Raises:
        pynvml.NVMLError: The driver doesn't report it.
    """
    try:
        major, minor = pynvml.nvmlDeviceGetCudaComputeCapability(handle)
    except pynvml.NVMLError:
        whole = pynvml.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(handle)
        major, minor = pynvml.nvmlDeviceGetCudaComputeCapability(whole)
    return major, minor


def memory_of(handle: object) -> DeviceMemory:
    """Return a device's memory; for one that shares the host's (GB10, Jetson), which NVML doesn't report, the host's.

    Raises:
        pynvml.NVMLError: The driver doesn't report it for another reason.
    """
    try:
        memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
    except pynvml.NVMLError as error:
        if error.value != pynvml.NVML_ERROR_NOT_SUPPORTED:
            raise
        host = psutil.virtual_memory()
        return DeviceMemory(host.total, host.available, None)
    return DeviceMemory(int(memory.total), int(memory.free), int(memory.used))


@contextlib.contextmanager
def driver_errors(device: str) -> Iterator[None]:
    """Turn errors of NVML within the block into a `MachineError` about `device`.

    Raises:
        MachineError: NVML doesn't answer, or there is no such device.
    """
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
