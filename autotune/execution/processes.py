"""Ends processes for good, and removes what killed ones leave in the machine's shared memory.

Ending a trial with all that it started, or what a killed search has left running, takes three nets, since each has
holes. A process group holds what a trial starts, except what leads a session of its own (torchrun's ranks do). A
subreaper, which the launcher is, gets these back when their parent ends, except if the launcher itself is killed. So
every process of a search also carries a mark in its environment, which children inherit; only a process that clears its
environment *and* loses its launcher escapes.

Libraries that share memory between processes (NCCL between ranks, torch between a data loader and its workers,
DeepSpeed on the CPU) make files in /dev/shm and remove them themselves, unless they are killed before. Such files stay
until the machine is restarted, and take its memory.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import signal
import time
from collections.abc import Collection, Sequence
from pathlib import Path

import psutil

MARK_VARIABLE = "AUTOTUNE_SEARCH_MARK"
SHARED_MEMORY = Path("/dev/shm")

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_PAUSE_S = 0.01

# How the libraries call their files in shared memory; anything else is not ours to touch.
_SHARED_PREFIXES = ("torch_", "nccl-", "deepspeed_")


def die_with_parent(parent_pid: int) -> None:
    """Have the kernel kill this process when the thread that started it ends; end it now if that is over already."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent_pid:
        os._exit(1)


def become_subreaper() -> None:
    """Have the kernel give this process the orphans among its descendants."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def kill_group(pid: int) -> None:
    """Kill every process of the group that `pid` leads or led."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


def end_below(pids: Sequence[int] = (), *, spare: Collection[int] = (), limit_s: float) -> tuple[dict[int, int], int]:
    """Kill and reap the children `pids`, their groups and every other descendant but the children `spare` and theirs.

    Return the wait statuses of those `pids` that could be ended (a driver may hold one in the kernel), and how many
    children are left after `limit_s`.
    """
    deadline = time.monotonic() + limit_s
    statuses: dict[int, int] = {}
    while True:
        for pid in pids:
            kill_group(pid)
        children = [child for child in psutil.Process().children() if child.pid not in spare]
        for child in children:
            _kill(child.pid)
            with contextlib.suppress(psutil.NoSuchProcess):
                for process in child.children(recursive=True):
                    _kill(process.pid)
            with contextlib.suppress(ChildProcessError):
                ended, status = os.waitpid(child.pid, os.WNOHANG)
                statuses |= {ended: status} if ended else {}
        if not children or time.monotonic() > deadline:
            return {pid: statuses[pid] for pid in pids if pid in statuses}, len(children)
        time.sleep(_PAUSE_S)


def marked(mark: str) -> list[int]:
    """Return the running processes that carry `mark`, this one excepted."""
    wanted = f"{MARK_VARIABLE}={mark}".encode()
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        try:
            environment = (entry / "environ").read_bytes()  # empty for a zombie
        except OSError:  # it has ended, or is somebody else's
            continue
        if wanted in environment.split(b"\0"):
            found.append(int(entry.name))
    return found


def end_marked(mark: str, *, limit_s: float) -> int:
    """Kill every process that carries `mark`; return how many are left after `limit_s`."""
    deadline = time.monotonic() + limit_s
    clean = 0
    while clean < 2:  # looked at twice: a process has no environment while it becomes another program
        left = marked(mark)
        if time.monotonic() > deadline:
            return len(left)
        for pid in left:
            _kill(pid)
        clean = 0 if left else clean + 1
        time.sleep(_PAUSE_S)
    return 0


def _kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, signal.SIGKILL)


def shared_files(directory: Path = SHARED_MEMORY) -> frozenset[str]:
    """Return the names of all files in shared memory."""
    try:
        return frozenset(path.name for path in directory.iterdir())
    except OSError:
        return frozenset()


def remove_orphans(before: frozenset[str], directory: Path = SHARED_MEMORY) -> tuple[str, ...]:
    """Remove files of ours that have come since `before` and that no process has open or mapped; return their names.

    Files of trials that run at the same time stay, since their processes live.
    """
    new = sorted(name for name in shared_files(directory) - before if name.startswith(_SHARED_PREFIXES))
    orphans = tuple(name for name in new if is_unused(directory / name))
    for name in orphans:
        with contextlib.suppress(OSError):
            (directory / name).unlink()
    return orphans


def is_unused(file: Path) -> bool:
    """Return whether a file is this user's, and no process has it open or mapped; False where the kernel can't tell.

    /proc doesn't show the processes of other containers, which may share memory and caches with this one. The kernel
    counts them all: it grants a lease for writing on a file that is open nowhere else (fcntl(2)).
    """
    try:
        if file.lstat().st_uid != os.getuid():
            return False
        descriptor = os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        try:
            fcntl.fcntl(descriptor, fcntl.F_SETSIG, signal.SIGURG)  # ignored, if another process opens it meanwhile
            fcntl.fcntl(descriptor, fcntl.F_SETLEASE, fcntl.F_WRLCK)
        finally:
            os.close(descriptor)  # and with it the lease
    except OSError:
        return False
    return True
