"""The CUDA devices that this process may see, by NVML: which they are, and their memory.

CUDA_VISIBLE_DEVICES is read as CUDA reads it: indices or UUIDs, which may be shortened as long as they fit one device,
MIG instances among them; what stands behind an entry that fits none is not seen. A GPU in MIG mode that is named by its
index is its first instance.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import NamedTuple

import psutil

from autotune.errors import MachineError


class DeviceMemory(NamedTuple):
    """The memory of one device in bytes."""

    total: int
    free: int
    used: int | None  # None: it shares the host's memory, and what is the device's can't be told


def visible_indices() -> list[str | int]:
    """Return the NVML index or UUID of each device that CUDA_VISIBLE_DEVICES leaves visible.

    Raises:
        pynvml.NVMLError: The driver doesn't answer.
    """
    import pynvml

    pynvml.nvmlInit()
    count = pynvml.nvmlDeviceGetCount()
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return list(range(count))
    found: list[str | int] = []
    for entry in (e.strip() for e in visible.split(",") if e.strip()):
        known = _known(entry, count)
        if known is None:  # CUDA sees what stands before it
            break
        found.append(known)
    return found


def _known(entry: str, count: int) -> str | int | None:
    """Return the index or full UUID that an entry of CUDA_VISIBLE_DEVICES means, None if there is no such device."""
    import pynvml

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
    """Yield the UUIDs of all devices and of their MIG instances."""
    import pynvml

    for index in range(count):
        with contextlib.suppress(pynvml.NVMLError):
            handle = pynvml.nvmlDeviceGetHandleByIndex(index)
            yield pynvml.nvmlDeviceGetUUID(handle)
            for instance in _instances(handle):
                yield pynvml.nvmlDeviceGetUUID(instance)


def _instances(handle: object) -> Iterator[object]:
    """Yield the MIG instances of a device; most have none."""
    import pynvml

    with contextlib.suppress(pynvml.NVMLError):
        if pynvml.nvmlDeviceGetMigMode(handle)[0] != pynvml.NVML_DEVICE_MIG_ENABLE:
            return
        for number in range(pynvml.nvmlDeviceGetMaxMigDeviceCount(handle)):
            with contextlib.suppress(pynvml.NVMLError):
                yield pynvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, number)


def index_of(device: str) -> int:
    """Return the number of a torch device: 2 of 'cuda:2', 0 of 'cuda'."""
    return int(device.partition(":")[2] or 0)


def nvml_handle(index: int) -> object:
    """Return NVML's handle of the CUDA device `index`, as CUDA counts under CUDA_VISIBLE_DEVICES.

    Raises:
        pynvml.NVMLError: The driver doesn't answer.
        IndexError: There is no such device.
    """
    import pynvml

    entry = visible_indices()[index]
    if isinstance(entry, str):
        return pynvml.nvmlDeviceGetHandleByUUID(entry)
    handle = pynvml.nvmlDeviceGetHandleByIndex(entry)
    return next(_instances(handle), handle)


def capability_of(handle: object) -> tuple[int, int]:
    """Return a device's compute capability; a MIG instance has that of its device.

    Raises:
        pynvml.NVMLError: The driver doesn't tell.
    """
    import pynvml

    try:
        major, minor = pynvml.nvmlDeviceGetCudaComputeCapability(handle)
    except pynvml.NVMLError:
        whole = pynvml.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(handle)
        major, minor = pynvml.nvmlDeviceGetCudaComputeCapability(whole)
    return major, minor


def memory_of(handle: object) -> DeviceMemory:
    """Return a device's memory; the host's for one that shares it (GB10, Jetson), of which NVML has no figure.

    Raises:
        pynvml.NVMLError: The driver doesn't tell for another reason.
    """
    import pynvml

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
    """Turn errors of NVML within the block into one line about the device.

    Raises:
        MachineError: NVML doesn't answer, or there is no such device.
    """
    import pynvml

    try:
        yield
    except pynvml.NVMLError as error:
        raise MachineError(
            f"{device}: the NVIDIA driver doesn't tell of it: {error}; `nvidia-smi` shows what is wrong, --device cpu "
            "does without"
        ) from None
    except IndexError:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        raise MachineError(f"{device}: no such device is visible (CUDA_VISIBLE_DEVICES={visible})") from None
