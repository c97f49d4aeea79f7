"""Places: devices of a kind, or sets of as many, which run a trial each at the same time. The CPU is one place.

`spread` settles over how many devices, or processes of a CPU, each training is spread.
"""

import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from pydantic import Field

from autotune.errors import InfrastructureError, InputError, MachineError, resuming
from autotune.units import GIB
from autotune.value import Value
from autotune.values.conditions import computing_on
from autotune.values.hardware import Hardware, cuda_count, cuda_used_bytes, detect, like_devices, sharing_of


class Place(Value):
    """Where one trial at a time runs."""

    shown: str = Field(default="", description="in words; empty: there is no other place")
    devices: tuple[str, ...] = Field(description="torch devices, as the parent counts, one for each rank")

    def used_bytes(self) -> list[int]:
        """Return the memory in use on each GPU; empty for a CPU, whose memory is the host's."""
        return [used for gpu in self.devices if gpu != "cpu" and (used := cuda_used_bytes(gpu)) is not None]


def kind_of(hardware: Hardware) -> str:
    """Return the digest of all that makes trials on two devices comparable."""
    # The systems of two equal machines may keep some MiB more or less of the host's memory.
    host = round(hardware.host_memory_bytes / GIB) if hardware.is_cpu else 0
    memory = {"memory_bytes": host or hardware.memory_bytes, "host_memory_bytes": host, "free_bytes": 0}
    which = frozenset({"count", "peers", "visible", "nodes", "network_gb_s"})
    return hardware.model_copy(update={**memory, "device": hardware.kind}).digest(leave_out=which)


def whole(hardware: Hardware) -> Place:
    """Return the one place that is all of `hardware`: its device, and as many like it as there are in `count`."""
    others = () if hardware.is_cpu else like_devices(hardware.device)[1 : hardware.count]
    return Place(devices=(hardware.device, *others))


def places_of(hardware: Hardware, count: int, *, each: int = 1) -> tuple[Place, ...]:
    """Return `count` places of `each` of these GPUs, the freest; InputError: it is a CPU, MachineError: too few."""
    if hardware.is_cpu:
        raise InputError(f"--workers {count}: the CPU runs one trial at a time; each worker needs a GPU of its own")
    seen = [detect(f"cuda:{index}") for index in range(cuda_count())]
    alike = [device for device in seen if kind_of(device) == kind_of(hardware)]
    if len(alike) < count * each:
        others = "" if len(alike) == len(seen) else f" and {len(seen) - len(alike)} of another kind"
        wanted = f"--workers {count}{f' --devices {each}' * (each > 1)}"
        raise MachineError(f"{wanted}: this machine has {len(alike)} x {hardware.name}{others}")
    freest = sorted(alike, key=lambda device: -device.free_bytes)[: count * each]
    found = sorted((device.device for device in freest), key=[device.device for device in seen].index)
    sets = (found[start : start + each] for start in range(0, len(found), each))
    return tuple(Place(devices=tuple(own), shown="+".join(own)) for own in sets)


def hardware_of(hardware: Hardware, places: tuple[Place, ...]) -> Hardware:
    """Return each trial's hardware, with the least free on any device."""
    free = min(detect(device).free_bytes for place in places for device in place.devices)
    return hardware.model_copy(update={"free_bytes": free, "count": len(places[0].devices)})


def sharing_notes(devices: Sequence[str]) -> tuple[str, ...]:
    """Return notes on how processes share GPUs, where that changes a search; MachineError: no trial could use one."""
    found: set[str] = set()
    for device in devices:
        sharing, holders = sharing_of(device), computing_on(device)
        if "nobody" in sharing:
            raise MachineError(f"{device}: its compute mode admits no process; `nvidia-smi -c 0` admits them")
        if "one" in sharing and "MPS" not in sharing and holders:  # with MPS, it is the server that has it
            who = "this very process" if os.getpid() in holders else f"process {min(holders)}"
            what = f"is in exclusive-process mode, and {who} has it, so that no trial can"
            raise MachineError(f"{device}: {what}; end that one, or admit several with `nvidia-smi -c 0`")
        found |= sharing
    notes = {
        "MPS": "MPS shares the GPU: a fault of one process ends all, so finals run one after the other, not in turn",
        "one": "the GPU is in exclusive-process mode, so finals run one after the other, not in turn",
        "MIG": "the GPU is a MIG instance, whose idle time the driver doesn't tell: load of the host counts in full",
    }
    return tuple(note for how, note in notes.items() if how in found)


def spread(hardware: Hardware, asked: Sequence[int | Literal["all"]], *, is_single: bool) -> tuple[Hardware, list[str]]:
    """Return the hardware whose count is the most devices that a training is to have (`--devices`), and notes.

    On CUDA these are devices of one kind, on the CPU processes that share its cores, each with the whole budget.
    `is_single`: one trial at a time, here; else each place has its devices already. MachineError: there aren't as many.
    """
    there, nodes = hardware.count or 1, hardware.nodes
    if hardware.is_cpu and "all" in asked:
        raise InputError("--devices all: the CPU is one device; name a number of processes")
    numbers = numbers_of(hardware, asked)
    count, several = max(numbers), " or ".join(map(str, numbers))
    if count == 1:
        notes, idle = [], 1
        if not asked and is_single and there > 1:
            taken = enumerate(cuda_used_bytes(device) or 0 for device in like_devices(hardware.device))
            idle = next((n for n, size in taken if size > 0.05 * hardware.memory_bytes), there)  # drivers take a little
        if idle > 1:
            notes = [f"this machine has {idle} such devices idle; --devices {idle} searches for all of them together"]
        return hardware.model_copy(update={"count": 1}), notes
    each, where = count // nodes, f" of each of {nodes} machines" * (nodes > 1)
    if odd := next((n for n in numbers if n > each and n % each), None):
        raise InputError(f"--devices {odd}: whole machines of {each} devices (--nodes {nodes}), or a part of one")
    if hardware.is_cpu:
        if each > hardware.cores:
            raise MachineError(f"--devices {count}: on the CPU each is a process, and there are {hardware.cores} cores")
        shared = f"{several} processes, which share {hardware.cores} cores{where}"
        notes = [f"each training is spread over {shared}; each has the memory budget to itself"]
        return hardware.model_copy(update={"count": count, "free_bytes": hardware.free_bytes // each}), notes
    if count > there:
        raise MachineError(f"--devices {count}: there are {there} x {hardware.name} in the machine that may be used")
    if not is_single:  # each place has as many
        on = f"{several} devices" + f", on up to {nodes} machines" * (nodes > 1)
        return hardware.model_copy(update={"count": count}), [f"each training is spread over {on}"]
    used = like_devices(hardware.device)[:count]
    free = min(detect(device).free_bytes for device in used)
    notes = [f"each training is spread over {several} devices: {', '.join(used)}"]
    return hardware.model_copy(update={"count": count, "free_bytes": free}), notes


def numbers_of(hardware: Hardware, asked: Sequence[int | Literal["all"]]) -> tuple[int, ...]:
    """Return the numbers of devices that trainings are to have, that of the baseline first.

    "all" alone compares all devices with one and with each power of two below; beside others it is their number.
    """
    most = hardware.count or 1
    fewer = [2**n for n in range(most.bit_length()) if 2**n < most] if tuple(asked) == ("all",) else []
    return tuple(dict.fromkeys(most if number == "all" else number for number in (*asked, *fewer))) or (1,)


def check_disk(run_directory: Path) -> None:
    try:
        free = shutil.disk_usage(run_directory).free
    except FileNotFoundError:
        raise InfrastructureError(f"{run_directory}: was removed while the search ran") from None
    if free < 1 << 20:  # the files of a trial, some 100 KiB, may be cut short
        raise full_disk(run_directory)


def full_disk(run_directory: Path) -> InfrastructureError:
    left = shutil.disk_usage(run_directory).free >> 10
    told = f"{run_directory}: the disk is full ({left} KiB are free): make room{goes_on(run_directory)}"
    return InfrastructureError(told)


def goes_on(run_directory: Path) -> str:
    """Return the end of an error that ends a search: how it goes on later, if it has finished a trial."""
    kept = any(run_directory.glob("trials/*/result.json"))
    return f"; finished trials are kept: {resuming(run_directory)} goes on then" * kept
