"""The launcher process, seen from the parent: started for a place, given jobs, ended with all that runs under it."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import select
import subprocess
import time
from pathlib import Path
from typing import Any

from autotune.errors import InfrastructureError
from autotune.execution.environment import launcher_environment
from autotune.execution.job import END_LIMIT_S
from autotune.execution.launch import launch_command
from autotune.execution.logtail import read_tail
from autotune.execution.places import Place
from autotune.execution.processes import MARK_VARIABLE, end_marked
from autotune.value import write_text

MARK_FILE = "processes.json"  # the mark that all processes of a search carry; each of several places has its own

LAUNCHER_START_S = 300.0  # importing torch and transformers from a cold disk, and trying a fork on the device


def end_what_was_left(run_directory: Path) -> None:
    """End what a search that was killed in `run_directory` has left running."""
    for path in run_directory.glob(MARK_FILE.replace(".", "*.")):
        try:
            mark = json.loads(path.read_text())["mark"]
        except (OSError, ValueError, TypeError, KeyError):
            continue
        end_marked(str(mark), limit_s=END_LIMIT_S)


def _named(file: str, place: Place) -> str:
    """Return the name that a file has for a place: 'processes.json', 'processes-1.json'."""
    return file.replace(".", f"-{place.name}.") if place.name else file


class Launcher:
    """A launcher process, which takes jobs once `wait` has returned; it can be made before there is time to wait.

    Args:
        run_directory: The search's directory.
        place: Where its trials run.
        stop: A file that becomes readable when it has to end; whoever waits for it is interrupted then.
    """

    def __init__(self, run_directory: Path, place: Place, *, stop: int | None = None) -> None:
        self._mark = secrets.token_hex(8)
        self._stop = stop
        write_text(json.dumps({"mark": self._mark}) + "\n", run_directory / _named(MARK_FILE, place))
        self._log_path = run_directory / _named("launcher.log", place)
        self._replies, write_end = os.pipe()
        bound = ("--cores", ",".join(map(str, place.cores))) if place.cores else ()
        with self._log_path.open("ab") as log:
            self._process = subprocess.Popen(
                launch_command("--device", place.device, "--replies", str(write_end), *bound),
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                pass_fds=(write_end,),
                env={
                    **launcher_environment(place.device, {MARK_VARIABLE: self._mark}, others=place.others),
                    **place.environment(),
                },
                start_new_session=True,
            )
        os.close(write_end)
        self._unread = b""
        self.forkable: bool | None = None  # None: it isn't ready yet

    def wait(self, limit_s: float = LAUNCHER_START_S) -> None:
        """Wait until it takes jobs, if it doesn't yet; InfrastructureError says why it did not start."""
        if self.forkable is not None:
            return
        try:
            ready = self._read(min(limit_s, LAUNCHER_START_S))
        except TimeoutError:
            ready = None
        if ready is None:
            tail = read_tail(self._log_path, lines=1)
            raise InfrastructureError(f"the process that runs trials did not start: {tail or 'no message'}")
        self.forkable = bool(ready["forkable"])

    def has_died(self) -> bool:
        """Return whether the process took jobs and has ended."""
        return self.forkable is not None and self._process.poll() is not None

    def run(self, job: dict[str, Any], timeout_s: float) -> dict[str, Any] | None:
        """Run a job; return how it ended, or None if the launcher died; TimeoutError means that it fell silent."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(job).encode() + b"\n")
            self._process.stdin.flush()
        except OSError:
            return None
        return self._read(timeout_s)

    def _read(self, timeout_s: float) -> dict[str, Any] | None:
        """Return the next reply, or None at the end of the pipe."""
        deadline = time.monotonic() + timeout_s
        poll = select.poll()  # unlike select.select it takes any number of a file
        poll.register(self._replies, select.POLLIN)
        if self._stop is not None:
            poll.register(self._stop, select.POLLIN)
        while b"\n" not in self._unread:
            ready = [file for file, _ in poll.poll(max(0.0, deadline - time.monotonic()) * 1000)]
            if not ready:
                raise TimeoutError
            if self._stop in ready:
                raise KeyboardInterrupt  # as if Ctrl-C had come in this thread
            chunk = os.read(self._replies, 1 << 16)
            if not chunk:
                return None
            self._unread += chunk
        line, _, self._unread = self._unread.partition(b"\n")
        reply: dict[str, Any] = json.loads(line)
        return reply

    def end(self) -> None:
        """Kill the launcher and all that runs under it."""
        self._process.kill()
        self._process.wait()
        end_marked(self._mark, limit_s=END_LIMIT_S)
        os.close(self._replies)
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):  # what was buffered has no reader any more
            self._process.stdin.close()
