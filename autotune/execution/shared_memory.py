"""Removes what killed processes have left in the machine's shared memory.

Libraries that share memory between processes (NCCL between ranks, torch between a data loader and its workers,
DeepSpeed on the CPU) make files in /dev/shm and remove them themselves, unless they are killed before. Such files stay
until the machine is restarted, and its memory with them. Called by the launcher after a trial that failed.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

DIRECTORY = Path("/dev/shm")

# How these libraries call their files; anything else is not ours to touch.
_PREFIXES = ("torch_", "nccl-", "deepspeed_")


def names(directory: Path = DIRECTORY) -> frozenset[str]:
    """Return the names of all files there are."""
    try:
        return frozenset(path.name for path in directory.iterdir())
    except OSError:
        return frozenset()


def remove_orphans(before: frozenset[str], directory: Path = DIRECTORY) -> tuple[str, ...]:
    """Remove our own files that have come since `before` and that no process has open or mapped; return their names.

    Others may run trials at the same time: their processes live, and so do their files.
    """
    new = {name for name in names(directory) - before if name.startswith(_PREFIXES) and _is_ours(directory / name)}
    orphans = tuple(sorted(new - _in_use(directory))) if new else ()
    for name in orphans:
        with contextlib.suppress(OSError):
            (directory / name).unlink()
    return orphans


def _is_ours(path: Path) -> bool:
    try:
        return path.lstat().st_uid == os.getuid() and path.is_file()
    except OSError:
        return False


def _in_use(directory: Path) -> set[str]:
    """Return the names of the files that a process of ours has open or mapped."""
    used = set()
    for process in Path("/proc").iterdir():
        if process.name.isdigit():
            used |= _mapped(process, directory) | _open(process, directory)
    return used


def _mapped(process: Path, directory: Path) -> set[str]:
    prefix = f"{directory}/"
    try:
        lines = (process / "maps").read_text(errors="replace").splitlines()
    except OSError:  # it has ended, or is somebody else's
        return set()
    return {line.partition(prefix)[2] for line in lines if prefix in line}


def _open(process: Path, directory: Path) -> set[str]:
    found = set()
    with contextlib.suppress(OSError):
        for entry in (process / "fd").iterdir():
            with contextlib.suppress(OSError):
                target = entry.readlink()
                if target.parent == directory:
                    found.add(target.name)
    return found
