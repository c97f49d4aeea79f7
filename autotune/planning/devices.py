"""Settles over how many devices each training is spread (`--devices`), or refuses it by an error that says why.

On CUDA these are devices of the same kind. On the CPU they are processes that share its cores, each with the whole
memory budget, like ranks on devices; their speeds say nothing about GPUs.
"""

from __future__ import annotations

from autotune.errors import InputError, MachineError
from autotune.planning.options import SearchOptions
from autotune.values import hardware as machine
from autotune.values.hardware import Hardware

# A device with less than this share of its memory in use is taken as idle: drivers and desktops take some.
_IDLE_SHARE = 0.05


def spread(options: SearchOptions, hardware: Hardware) -> tuple[Hardware, list[str]]:
    """Return the hardware with the number of devices of each training as its count, and notes for the user."""
    asked, there = options.devices, hardware.count or 1
    if hardware.is_cpu:
        return _processes(asked, hardware)
    if asked == "all":
        asked = there
    if asked in (None, 1):
        notes = _idle_note(hardware) if asked is None and options.fleet.is_single else []
        return hardware.model_copy(update={"count": 1}), notes
    if asked > there:
        raise MachineError(f"--devices {asked}: there are {there} x {hardware.name} in the machine that may be used")
    if not options.fleet.is_single:  # each place has as many
        return hardware.model_copy(update={"count": asked}), [f"each training is spread over {asked} devices"]
    used = machine.like_devices(hardware.device)[:asked]
    free = min(machine.detect(device).free_bytes for device in used)
    notes = [f"each training is spread over {asked} devices: {', '.join(used)}"]
    return hardware.model_copy(update={"count": asked, "free_bytes": free}), notes


def _processes(asked: int | str | None, hardware: Hardware) -> tuple[Hardware, list[str]]:
    """Return the CPU with the number of processes as its count and one process's share of the free memory."""
    if asked is None or asked == 1:
        return hardware.model_copy(update={"count": 1}), []
    if not isinstance(asked, int):
        raise InputError("--devices all: the CPU is one device; name a number of processes")
    if asked > hardware.cores:
        raise MachineError(f"--devices {asked}: on the CPU each is a process, and there are {hardware.cores} cores")
    note = (
        f"each training is spread over {asked} processes, which share {hardware.cores} cores; "
        "each has the memory budget to itself"
    )
    return hardware.model_copy(update={"count": asked, "free_bytes": hardware.free_bytes // asked}), [note]


def _idle_note(hardware: Hardware) -> list[str]:
    """Return a note if further devices are idle that the search could use."""
    others = machine.like_devices(hardware.device)[1:] if (hardware.count or 1) > 1 else ()
    limit = _IDLE_SHARE * hardware.memory_bytes
    idle = 1 + sum((machine.cuda_used_bytes(device) or 0) < limit for device in others)
    if idle == 1:
        return []
    return [f"this machine has {idle} such devices idle; --devices {idle} searches for all of them together"]


def check_global_batch(asked: int, ranks: int) -> None:
    """Refuse a global batch that the ranks can't share evenly; the error names the nearest that they can."""
    if asked % ranks == 0:
        return
    below, above = asked // ranks * ranks, -(-asked // ranks) * ranks
    nearest = f"{below} and {above} do" if below else f"{above} does"
    raise InputError(f"--global-batch {asked}: {ranks} devices can't share it evenly; {nearest}")


def default_global_batch(usual: int, ranks: int) -> int:
    """Return the smallest global batch of at least `usual` samples that the ranks can share evenly."""
    return -(-usual // ranks) * ranks
