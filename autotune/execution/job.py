"""One job of the launcher: its processes, from their fork until nothing of them is left.

They are the ranks of one trial, or trials that run in turn, each in a directory of its own (see `turns`).

Each leads a session of its own, dies with the launcher, and prints into a pipe of which head and tail are kept as its
log. A job ends when all its processes have, when its time is up, or when one of several fails: the others, which would
wait for it in a collective for ever, get a moment to write down what they saw, and are killed. After every end,
whatever is left of the processes' groups and of the launcher's descendants is killed too. The launcher is their
subreaper, so a grandchild can't escape by a session of its own.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import faulthandler
import itertools
import json
import os
import resource
import selectors
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from autotune.execution.environment import forget_unfinished, see_only
from autotune.execution.failures import BoundedLog
from autotune.execution.outcome import has_failed, log_file, outcome_file
from autotune.execution.processes import (
    die_with_parent,
    end_descendants,
    kill_group,
    remove_orphans,
    shared_files,
)
from autotune.execution.ranks import ADDRESS, own_rank, rank_environment
from autotune.execution.turns import ring, take_place

PROCESS_FILE = "process.json"  # in a job's directory once it has its processes

END_LIMIT_S = 20.0  # a killed process that a driver holds longer is given up
LOOK_EVERY_S = 0.05  # where the kernel doesn't tell of an exit
_OUTCOMES_EVERY_S = 0.5  # a rank that has failed may hang on its way out
_GRACE_S = 2.0  # for the others after the first rank has failed: a lost connection is noticed in milliseconds
_BACKLOG = 1024  # ranks that come before the first has opened its store
_STACK_S = 0.5  # to write down where a process stands, before it is killed at the time limit


class Host(NamedTuple):
    """The launcher, as far as a job's processes need to know it."""

    pid: int
    private: tuple[int, ...]  # open files that they must not inherit
    program: Callable[[str, Path], None]  # runs an entry in a directory


@dataclasses.dataclass(eq=False)
class _Process:
    """One process of a job, seen from the launcher."""

    number: int  # its rank
    directory: Path
    pid: int
    output: int
    log: BoundedLog
    wake: int | None = None
    has_ended: bool = False
    failed_at: float | None = None  # when that was noticed; None: it hasn't, or was killed


def run_job(job: dict[str, Any], host: Host) -> dict[str, Any]:
    """Run one job to its end and return how it ended, as fields of `outcome.Ending`."""
    ranks = job.get("ranks")
    before, began = shared_files(), time.time()
    sys.stdout.flush()
    sys.stderr.flush()
    with contextlib.ExitStack() as stack:
        processes, port = _start(job, ranks, host, stack)
        pids = [process.pid for process in processes]
        for directory in dict.fromkeys(process.directory for process in processes):
            begun = {"pid": pids[0], "pids": pids, "port": port, "at": time.monotonic()}  # one clock for all processes
            (directory / PROCESS_FILE).write_text(json.dumps(begun))
        timed_out = _wait(processes, float(job["timeout_s"]), several=ranks is not None)
        if timed_out:
            if ranks is not None:
                _ask_where_they_stand(processes)
            for pid in pids:
                kill_group(pid)
        statuses, unkillable = end_descendants(*pids, limit_s=END_LIMIT_S)
        for process in processes:
            while process.log.copy_from(process.output):  # what is left in the pipe: all writers are gone
                continue
    codes = [None if (s := statuses.get(pid)) is None else os.waitstatus_to_exitcode(s) for pid in pids]
    failed_at = [process.failed_at for process in processes]
    if any(codes) or None in codes or any(failed_at):
        remove_orphans(before)
        forget_unfinished(since=began)
    return {"returncodes": codes, "failed_at": failed_at, "timed_out": timed_out, "unkillable": unkillable}


def _start(
    job: dict[str, Any], ranks: int | None, host: Host, stack: contextlib.ExitStack
) -> tuple[list[_Process], int | None]:
    """Fork the processes of a job; return them and the port where ranks meet."""
    processes: list[_Process] = []
    directories = [Path(directory) for directory in job["directories"]]
    places = ring(len(directories)) if len(directories) > 1 else []
    meeting: contextlib.AbstractContextManager[socket.socket | None] = contextlib.nullcontext()
    if ranks is not None:  # a port of their own, from before they are forked until the first of them ends
        meeting = socket.create_server((ADDRESS, 0), backlog=_BACKLOG)
    with meeting as listener:
        members = [(directory, number) for directory in directories for number in range(ranks or 1)]
        for place, (directory, number) in enumerate(members):
            read_end, write_end = os.pipe()
            pid = os.fork()
            if pid == 0:
                others = (end for other, ends in enumerate(places) if other != place for end in ends)
                inherited = (read_end, *(process.output for process in processes), *host.private, *others)
                if places:
                    take_place(place, places[place], len(places))
                _become_trial(job, directory, _Seat(number, write_end, inherited, listener), host)
            os.close(write_end)
            stack.callback(os.close, read_end)
            os.set_blocking(read_end, False)
            log = stack.enter_context(BoundedLog(directory / log_file(number)))
            processes.append(_Process(number, directory, pid, read_end, log))
        for end in itertools.chain.from_iterable(places):  # held here, they would hide that a process has ended
            os.close(end)
        return processes, None if listener is None else listener.getsockname()[1]


class _Seat(NamedTuple):
    """What a forked child starts with."""

    number: int
    output: int
    inherited: tuple[int, ...]  # the launcher's own open files
    listener: socket.socket | None


def _become_trial(job: dict[str, Any], directory: Path, seat: _Seat, host: Host) -> None:
    """Turn this forked child into a process of the trial; never returns."""
    try:
        os.setsid()
        die_with_parent(host.pid)
        null = os.open(os.devnull, os.O_RDONLY)
        for source, target in ((null, 0), (seat.output, 1), (seat.output, 2)):
            os.dup2(source, target)
        # Only what is the launcher's own: libraries have open files too, the NVIDIA driver's among them.
        for descriptor in (null, seat.output, *seat.inherited):
            os.close(descriptor)
        _prefer_as_victim()
        see_only(job.get("ranks") or 1)
        if seat.listener is not None:
            _take_rank(seat.number, job["ranks"], seat.listener)
        tell_where_it_stands()
        host.program(job["entry"], directory)
        code = 0
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    ctypes.CDLL(None).fflush(None)  # what libraries printed without Python
    os._exit(code)


def _take_rank(number: int, ranks: int, listener: socket.socket) -> None:
    """Make this process rank `number`; the first keeps the listening socket, the others connect to it."""
    port, kept = listener.getsockname()[1], None
    if number == 0:
        kept = listener.detach()
        os.set_inheritable(kept, True)  # for a fresh interpreter
    listener.close()
    os.environ.update(rank_environment(number, ranks, port, kept))


def tell_where_it_stands() -> None:
    """Have a rank write its stack into its log when it is asked to, at the time limit."""
    if own_rank().is_launched:
        faulthandler.register(signal.SIGUSR1, file=2, all_threads=False)


def _prefer_as_victim() -> None:
    """Leave no core file of gigabytes, and be the one that the host's out-of-memory killer chooses."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    with contextlib.suppress(OSError):  # not every container has it
        Path("/proc/self/oom_score_adj").write_text("800")


def _wait(processes: Sequence[_Process], timeout_s: float, *, several: bool) -> bool:
    """Copy the output of all to their logs until they have ended; return True if the time limit came first.

    One of several that fails shortens the limit to the moment that the others have.
    """
    deadline, has_failure = time.monotonic() + timeout_s, False
    with selectors.DefaultSelector() as selector, _wakes_at_exit(processes, selector) as wakes:
        for process in processes:
            selector.register(process.output, selectors.EVENT_READ, process)
        while True:
            remaining = max(0.0, deadline - time.monotonic())
            longest = remaining if not several else min(remaining, _OUTCOMES_EVERY_S)
            for key, _ in selector.select(longest if wakes else min(remaining, LOOK_EVERY_S)):
                if key.fd == key.data.output and not key.data.log.copy_from(key.fd):
                    selector.unregister(key.fd)  # every writer has closed it
            _note_ends(processes, selector)
            failing = several and _note_failures(processes)
            if all(process.has_ended for process in processes):
                return False
            if failing and not has_failure:
                has_failure, deadline = True, min(deadline, time.monotonic() + _GRACE_S)
            elif not remaining:
                return not has_failure


def _note_ends(processes: Sequence[_Process], selector: selectors.BaseSelector) -> None:
    for process in processes:
        if not process.has_ended and has_ended(process.pid):
            process.has_ended = True
            if process.wake is not None:
                selector.unregister(process.wake)


def _note_failures(processes: Sequence[_Process]) -> bool:
    """Note which ranks have failed since the last call; return whether any has."""
    now = time.monotonic()
    for process in processes:
        if process.failed_at is None and has_failed(
            process.directory / outcome_file(process.number), process.has_ended
        ):
            process.failed_at = now
    return any(process.failed_at is not None for process in processes)


@contextlib.contextmanager
def _wakes_at_exit(processes: Sequence[_Process], selector: selectors.BaseSelector) -> Iterator[bool]:
    """Have `selector` wake when a process exits; yield False on a kernel that can't (before Linux 5.3)."""
    with contextlib.ExitStack() as stack:
        for process in processes:
            try:
                process.wake = os.pidfd_open(process.pid)
            except OSError:
                break
            stack.callback(os.close, process.wake)
            selector.register(process.wake, selectors.EVENT_READ, process)
        yield all(process.wake is not None for process in processes)


def has_ended(pid: int) -> bool:
    """Return whether the child has ended; it stays to be reaped."""
    return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def _ask_where_they_stand(processes: Sequence[_Process]) -> None:
    """Have every process that still runs write its stack into its log: who waits for whom."""
    for process in processes:
        if not process.has_ended:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGUSR1)
    time.sleep(_STACK_S)
