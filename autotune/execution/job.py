"""The jobs of the launcher: their processes, from their fork until nothing of them is left.

A job is the ranks of one trial, or trials that run in turn, each in a directory of its own (see `token_ring`). Each
process leads a session of its own, dies with the launcher, and prints into a pipe of which head and tail are kept as
its log. A job ends when all its processes have ended, when its time is up, or when one of several fails: the others get
a moment to write down what they saw, and are killed with all of the processes' groups and every orphan.

Three nets end all that a trial has started, since each has holes: a process group, which leaders of a session leave
(torchrun's ranks are); a subreaper, which gets these when their parent ends; a mark in the environment.
"""

import contextlib
import ctypes
import dataclasses
import faulthandler
import itertools
import json
import os
import resource
import selectors
import shutil
import signal
import socket
import sys
import tempfile
import time
import traceback
import weakref
from collections.abc import Callable, Collection, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NoReturn

import psutil
from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt

from autotune.execution import environment
from autotune.execution.outcome import Ending, has_failed, log_file, outcome_file
from autotune.execution.token_ring import ring, take_place
from autotune.stand_in.device import is_rehearsal
from autotune.value import Value, open_own
from autotune.values.trial import Rendezvous

PROCESS_FILE = "process.json"  # in a job's directory once it has its processes

MARK_VARIABLE = "AUTOTUNE_SEARCH_MARK"
ENDS_VARIABLE = "AUTOTUNE_ENDS_AT"  # when the job's time is up, by the monotonic clock, which all processes share

END_LIMIT_S = 20.0  # a killed process that a driver holds longer is given up
_OUTCOMES_EVERY_S = 0.5  # a rank that has failed may hang on its way out, so its outcome is looked for
_GRACE_S = 2.0  # for the others after the first rank has failed: they notice a lost connection in milliseconds

# Of a log, from its beginning and from its end.
HEAD_BYTES, TAIL_BYTES = 1 << 20, 1 << 16


class Job(Value):
    """A program that the launcher runs at a place."""

    place: NonNegativeInt
    directories: tuple[Path, ...] = Field(description="one for each process that runs in turn; one for all ranks")
    entry: str = Field(description="`module:function`, called with a directory")
    timeout_s: PositiveFloat
    ranks: PositiveInt | None = Field(default=None, description="on this machine; None: no ranks")
    rendezvous: Rendezvous | None = Field(default=None, description="of ranks on several machines")
    visible: str = Field(default="", description="CUDA_VISIBLE_DEVICES of its processes")


class BoundedLog:
    """A log file of head and tail, and a line that counts the bytes left out between them."""

    def __init__(self, path: Path) -> None:
        self._file = os.fdopen(open_own(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), "wb")
        self._head_left, self._tail, self._dropped_bytes = HEAD_BYTES, b"", 0

    def close(self) -> None:
        if self._dropped_bytes:
            self._file.write(f"\n[... {self._dropped_bytes} bytes left out ...]\n".encode())
        self._file.write(self._tail)
        self._file.close()

    def copy_from(self, descriptor: int) -> bool:
        """Take what the non-blocking `descriptor` holds; return whether that was anything."""
        try:
            chunk = os.read(descriptor, 1 << 16)
        except BlockingIOError:
            return False
        head, rest = chunk[: self._head_left], chunk[self._head_left :]
        self._head_left -= len(head)
        self._file.write(head)
        self._file.flush()
        self._dropped_bytes += max(0, len(self._tail) + len(rest) - TAIL_BYTES)
        self._tail = (self._tail + rest)[-TAIL_BYTES:]
        return bool(chunk)


@dataclasses.dataclass(eq=False)
class _Process:
    number: int  # its rank
    directory: Path
    pid: int
    output: int
    log: BoundedLog
    has_ended: bool = False
    failed_at: float | None = None  # when that was noticed; None: it hasn't, or was killed


@dataclasses.dataclass(eq=False)
class _Running:
    job: Job
    processes: list[_Process]
    deadline: float
    began: float  # seconds since 1970
    shared: set[Path]  # files in shared memory before it
    has_failure: bool = False

    def timed_out(self) -> bool | None:
        """Return whether it has ended by its time limit; False: by itself; None: it goes on."""
        now = time.monotonic()
        for process in self.processes:
            process.has_ended = process.has_ended or has_ended(process.pid)
            outcome = process.directory / outcome_file(process.number)
            if self.job.ranks is not None and process.failed_at is None and has_failed(outcome, process.has_ended):
                process.failed_at = now
        if all(process.has_ended for process in self.processes):
            return False
        if not self.has_failure and any(process.failed_at is not None for process in self.processes):
            # The first rank that fails shortens the limit of the others.
            self.has_failure, self.deadline = True, min(self.deadline, now + _GRACE_S)
        return not self.has_failure if now >= self.deadline else None


class Jobs:
    """Runs, in the main thread, jobs that come by a connection, by `program`; sends place and `Ending` of each."""

    def __init__(self, parent: Connection, program: Callable[[str, Path], None]) -> None:
        self._parent, self._program, self._pid = parent, program, os.getpid()
        self._running: list[_Running] = []
        self._selector = selectors.DefaultSelector()
        self._exits, self._wake = os.pipe()  # gets a byte when a child ends
        for end in (self._exits, self._wake):
            os.set_blocking(end, False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self._wake, warn_on_full_buffer=False)
        for file in (self._parent.fileno(), self._exits):
            self._selector.register(file, selectors.EVENT_READ)

    def serve(self) -> None:
        while True:
            now = time.monotonic()
            limits_s = [each.deadline - now if each.job.ranks is None else _OUTCOMES_EVERY_S for each in self._running]
            for key, _ in self._selector.select(max(0.0, min(limits_s)) if limits_s else None):
                if key.fd == self._exits:
                    os.read(self._exits, 1 << 12)
                elif key.data is not None:
                    if not key.data.log.copy_from(key.fd):
                        self._selector.unregister(key.fd)  # every writer has closed it
                else:
                    try:
                        self._begin(self._parent.recv())
                    except (EOFError, ConnectionError):
                        return
            for running in list(self._running):
                if (timed_out := running.timed_out()) is not None:
                    self._end(running, timed_out)

    def _begin(self, job: Job) -> None:
        running = _Running(job, [], time.monotonic() + job.timeout_s, time.time(), environment.shared_files())
        self._running.append(running)
        os.environ[ENDS_VARIABLE] = str(running.deadline)
        sys.stdout.flush()
        sys.stderr.flush()
        places = ring(len(job.directories)) if len(job.directories) > 1 else []
        listening: contextlib.AbstractContextManager[socket.socket | None] = contextlib.nullcontext()
        if job.ranks is not None and job.rendezvous is None:
            # A port of their own, from before they are forked until the first of them ends. The backlog is of ranks
            # that come before the first one's store.
            listening = socket.create_server((environment.ADDRESS, 0), backlog=1024)
        with listening as listener:
            first = 0 if job.rendezvous is None else job.rendezvous.node_rank * (job.ranks or 1)
            here = range(first, first + (1 if is_rehearsal() else job.ranks or 1))
            members = [(directory, number) for directory in job.directories for number in here]
            for place, (directory, number) in enumerate(members):
                read_end, write_end = os.pipe()
                if (pid := os.fork()) == 0:
                    for end in itertools.chain.from_iterable(places[:place] + places[place + 1 :]):
                        os.close(end)
                    if places:
                        take_place(place, places[place], len(places))
                    os.close(read_end)
                    self._become_process(job, directory, number, write_end, listener)
                os.close(write_end)
                os.set_blocking(read_end, False)
                process = _Process(number, directory, pid, read_end, BoundedLog(directory / log_file(number)))
                running.processes.append(process)
                self._selector.register(read_end, selectors.EVENT_READ, process)
            for end in itertools.chain.from_iterable(places):  # held here, they would hide that a process has ended
                os.close(end)
            pids, port = [p.pid for p in running.processes], None if listener is None else listener.getsockname()[1]
        for directory in job.directories:
            (directory / PROCESS_FILE).write_text(json.dumps({"pid": pids[0], "pids": pids, "port": port}))

    def _become_process(
        self, job: Job, directory: Path, number: int, output: int, listener: socket.socket | None
    ) -> NoReturn:
        try:
            for inherited in list(weakref.finalize._registry):  # type: ignore[attr-defined]
                inherited.atexit = False  # it is of the launcher, which lives on
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            os.setsid()
            die_with_parent(self._pid)
            become_subreaper()
            null = os.open(os.devnull, os.O_RDONLY)
            for source, target in ((null, 0), (output, 1), (output, 2)):
                os.dup2(source, target)
            # The launcher's own alone: libraries have open files too, the NVIDIA driver's among them.
            self._selector.close()
            others = (process.output for running in self._running for process in running.processes)
            for descriptor in (null, output, self._parent.fileno(), self._exits, self._wake, *others):
                os.close(descriptor)
            resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
            with contextlib.suppress(OSError):  # not every container has it
                Path("/proc/self/oom_score_adj").write_text("800")  # the one that is killed if memory runs out
            os.environ["CUDA_VISIBLE_DEVICES"] = job.visible
            if job.ranks is not None:
                meeting, kept = job.rendezvous, None
                if listener is not None:
                    meeting = Rendezvous(address=environment.ADDRESS, port=listener.getsockname()[1])
                    if number == 0:  # the others connect to it
                        kept = listener.detach()
                        os.set_inheritable(kept, True)  # for a fresh interpreter
                    listener.close()
                assert meeting is not None
                os.environ.update(environment.rank_environment(number, job.ranks, meeting, kept))
            tell_where_it_stands()
            self._program(job.entry, directory)
            code = 0
        except BaseException:
            traceback.print_exc()
            code = 1
        leave(code)

    def _end(self, running: _Running, timed_out: bool) -> None:
        self._running.remove(running)
        pids = [process.pid for process in running.processes]
        if timed_out and running.job.ranks is not None:  # each writes its stack into its log: who waited for whom
            for process in running.processes:
                if not process.has_ended:
                    _kill(process.pid, signal.SIGUSR1)
            time.sleep(0.5)
        others = {process.pid for other in self._running for process in other.processes}
        statuses = end_below(pids, spare=others, limit_s=END_LIMIT_S)
        for process in running.processes:
            while process.log.copy_from(process.output):  # the rest in the pipe: all writers are gone
                continue
            process.log.close()
            with contextlib.suppress(KeyError):
                self._selector.unregister(process.output)
            os.close(process.output)
        codes = [None if (s := statuses.get(pid)) is None else os.waitstatus_to_exitcode(s) for pid in pids]
        failed_at = [process.failed_at for process in running.processes]
        if any(codes) or None in codes or any(failed_at):
            environment.remove_orphans(running.shared)
            environment.forget_unfinished(since=running.began)
        self._parent.send((running.job.place, Ending(returncodes=codes, failed_at=failed_at, timed_out=timed_out)))


def tell_where_it_stands() -> None:
    """Have a rank write its stack into its log at SIGUSR1, which it gets at the time limit."""
    if environment.own_rank().is_launched:
        faulthandler.register(signal.SIGUSR1, file=2, all_threads=False)


def leave(code: int) -> NoReturn:
    """End this process without exit functions, which may wait for other ranks; temporary folders are removed."""
    weakref.finalize._exitfunc()  # type: ignore[attr-defined]  # those of `datasets` may hold all of a user's data
    sys.stdout.flush()
    sys.stderr.flush()
    ctypes.CDLL(None).fflush(None)  # prints of libraries past Python
    os._exit(code)


def has_ended(pid: int) -> bool:
    """Return whether the child has ended; it stays to be reaped."""
    return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def die_with_parent(parent_pid: int) -> None:
    """Have the kernel kill this process when the thread that started it ends; end it now if that has ended already."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)  # PR_SET_PDEATHSIG
    if os.getppid() != parent_pid:
        os._exit(1)


def become_subreaper() -> None:
    ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER


def end_below(pids: Sequence[int] = (), *, spare: Collection[int] = (), limit_s: float) -> dict[int, int]:
    """Kill and reap the children `pids`, their groups and all other descendants but the children `spare` and theirs.

    Return the wait statuses of the `pids` that have ended within `limit_s`: a driver may hold one in the kernel.
    """
    deadline = time.monotonic() + limit_s
    statuses: dict[int, int] = {}
    while True:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(pid, signal.SIGKILL)
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
            return {pid: statuses[pid] for pid in pids if pid in statuses}
        time.sleep(0.01)


def marked(mark: str) -> list[int]:
    """Return the running processes that carry `mark`, this one excepted."""
    running = psutil.process_iter(["environ"])  # None for a zombie, and for somebody else's
    return [p.pid for p in running if (p.info["environ"] or {}).get(MARK_VARIABLE) == mark and p.pid != os.getpid()]


def temporary_folder(mark: str) -> Path:  # for files of trials, of which some are killed
    return Path(tempfile.gettempdir()) / f"autotune-{mark}"


def end_marked(mark: str) -> None:
    """Kill every process that carries `mark`, wait for `END_LIMIT_S` at most, and remove their temporary files."""
    deadline, clean = time.monotonic() + END_LIMIT_S, 0
    # Looked at twice: a process has no environment while it becomes another program.
    while clean < 2 and time.monotonic() < deadline:
        left = marked(mark)
        for pid in left:
            _kill(pid)
        clean = 0 if left else clean + 1
        time.sleep(0.01)
    shutil.rmtree(temporary_folder(mark), ignore_errors=True)


def _kill(pid: int, number: int = signal.SIGKILL) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, number)
