"""The launcher: a process that imports everything once, touches no device, and forks each trial.

:class:`Launcher` is that process as the parent sees it: started for all places of a search, given jobs, ended with all
that runs under it. `main` is its own program. Jobs come as JSON lines on stdin, replies go out as JSON lines on a pipe
of their own, so that libraries may print what they like; see `job`. It isn't the server of `multiprocessing`, which has
its parent's environment, output and session, imports the parent's main program again, and ends nothing below a child.

A fork is only safe while its parent has not touched the device, and importing may do so behind our back. On CUDA a
child is therefore tried first; if it can't use the device, each trial is a fresh interpreter instead.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import importlib
import json
import os
import pkgutil
import secrets
import select
import subprocess
import sys
import time
import traceback
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

from autotune.errors import InfrastructureError
from autotune.execution.environment import forget_unfinished, launcher_environment, trial_device
from autotune.execution.failures import import_failure, read_tail
from autotune.execution.job import (
    END_LIMIT_S,
    MARK_VARIABLE,
    Job,
    Jobs,
    become_subreaper,
    die_with_parent,
    end_below,
    end_marked,
    has_ended,
    tell_where_it_stands,
)
from autotune.execution.ranks import own_rank
from autotune.value import open_own, write_text
from autotune.values.hardware import installed_versions

DEFAULT_ENTRY = "autotune.execution.worker:run_trial"

_OWN_MODULES = (
    "training.adapters", "training.arguments", "training.build", "training.dataset", "training.loss",
    "training.random_weights", "execution.checking", "execution.effects", "execution.measure",
    "execution.noise", "execution.trial", "execution.token_ring", "execution.worker",
)  # fmt: skip

MARK_FILE = "processes.json"  # the mark that all processes of a search carry
LOG_FILE = "launcher.log"

LAUNCHER_START_S = 300.0  # importing torch and transformers from a cold disk, and trying a fork on the device


def end_what_was_left(run_directory: Path) -> None:
    """End what a search that was killed in `run_directory` has left running."""
    with contextlib.suppress(OSError, ValueError, TypeError, KeyError):
        mark = json.loads((run_directory / MARK_FILE).read_text())["mark"]
        end_marked(str(mark), limit_s=END_LIMIT_S)


class Launcher:
    """A launcher process, which takes jobs once `wait` has returned; it can be made before there is time to wait.

    Args:
        run_directory: The search's directory.
        devices: Of all its trials, as this process counts.
    """

    def __init__(self, run_directory: Path, devices: Sequence[str]) -> None:
        self._mark = secrets.token_hex(8)
        write_text(json.dumps({"mark": self._mark}) + "\n", run_directory / MARK_FILE)
        self._log_path = run_directory / LOG_FILE
        self._replies, write_end = os.pipe()
        with os.fdopen(open_own(self._log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND), "ab") as log:
            self._process = subprocess.Popen(
                launch_command("--device", devices[0], "--replies", str(write_end)),
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                pass_fds=(write_end,),
                env=launcher_environment(devices[0], {MARK_VARIABLE: self._mark}, others=devices[1:]),
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
            ready = self.reply(min(limit_s, LAUNCHER_START_S))
        except TimeoutError:
            ready = None
        if ready is None:
            tail = read_tail(self._log_path, lines=1)
            raise InfrastructureError(f"the process that runs trials did not start: {tail or 'no message'}")
        self.forkable = bool(ready["forkable"])

    def send(self, job: Job) -> None:
        """Have a job run; if the launcher has died, `reply` tells."""
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.write(job.model_dump_json().encode() + b"\n")
            self._process.stdin.flush()

    def reply(self, timeout_s: float) -> dict[str, Any] | None:
        """Return how the next job ended; None: the launcher has died. TimeoutError: it said nothing for so long."""
        deadline = time.monotonic() + timeout_s
        poll = select.poll()  # unlike select.select it takes any number of a file
        poll.register(self._replies, select.POLLIN)
        while b"\n" not in self._unread:
            if not poll.poll(max(0.0, deadline - time.monotonic()) * 1000):
                raise TimeoutError
            if not (chunk := os.read(self._replies, 1 << 16)):
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


def main() -> None:
    """Serve jobs until stdin ends, or run one job in this very process (``--one DIRECTORY``)."""
    parser = argparse.ArgumentParser(prog="python -m autotune.execution.launch")
    parser.add_argument("--device", default="cpu", help="one torch device of the trials, as the parent counts")
    parser.add_argument("--replies", type=int, metavar="FD", help="open file that replies go to")
    parser.add_argument("--fresh", action="store_true", help="never fork: each trial is a fresh interpreter")
    parser.add_argument("--one", type=Path, metavar="DIRECTORY", help="run one job here and exit")
    parser.add_argument("--entry", default=DEFAULT_ENTRY, metavar="MODULE:FUNCTION")
    arguments = parser.parse_args()
    if arguments.one is not None:
        tell_where_it_stands()
        _run_here(arguments.entry, arguments.one)
        if own_rank().is_launched:
            sys.stdout.flush()
            os._exit(0)  # libraries say goodbye to the other ranks, and may wait for them
        return
    if arguments.replies is None:
        parser.error("--replies FD is needed to serve jobs")
    # From Python 3.12 on: allocators of libraries (pyarrow's jemalloc) have threads, which no trial needs.
    warnings.filterwarnings("ignore", message=".*multi-threaded, use of fork", category=DeprecationWarning)
    die_with_parent(os.getppid())
    become_subreaper()
    os.set_inheritable(arguments.replies, False)
    started = time.monotonic()
    try:
        forkable = not arguments.fresh and _preload(trial_device(arguments.device))
    except Exception as error:
        traceback.print_exc()
        sys.exit(import_failure(error))  # the last line of the log, which the parent shows
    ready = {"forkable": forkable, "import_s": time.monotonic() - started}
    os.write(arguments.replies, json.dumps(ready).encode() + b"\n")
    forget_unfinished(since=time.time())  # those of earlier searches and trainings
    Jobs(sys.stdin.fileno(), arguments.replies, _run_here if forkable else _run_afresh).serve()


def launch_command(*arguments: str) -> list[str]:
    """Return the command of this module; -P: the present directory is not searched for modules."""
    return [sys.executable, "-P", "-m", "autotune.execution.launch", *arguments]


def _preload(device: str) -> bool:
    """Import what every trial needs; return whether this process may be forked."""
    import torch

    with _capability_without_context():
        importlib.import_module("transformers.trainer")
        # Those that only some trials need report what is missing or broken. Accelerate imports deepspeed in every one.
        for module in ("peft", "bitsandbytes", *({"deepspeed"} & installed_versions().keys())):
            try:
                importlib.import_module(module)
            except Exception as error:
                print(f"{module} is not preloaded: {error}", file=sys.stderr)  # noqa: T201  # the launcher's log
    for module in _OWN_MODULES:
        importlib.import_module(f"autotune.{module}")
    # What is there by now stays, the packages' versions too: the collections that the Trainer forces would go through
    # all of it in every trial, and copy its pages, which took 0.5 s.
    gc.collect()
    gc.freeze()
    if device == "cpu":
        return True
    return not torch.cuda.is_initialized() and _survives_fork(device)  # type: ignore[no-untyped-call]


@contextlib.contextmanager
def _capability_without_context() -> Iterator[None]:
    """Have torch answer for a device's capability out of NVML.

    Importing bitsandbytes asks for it, and torch would make a context to answer.
    """
    import pynvml
    import torch

    from autotune.values.hardware import capability_of, nvml_handle

    original = torch.cuda.get_device_capability

    def capability(device: Any = None) -> tuple[int, int]:
        try:
            index = 0 if device is None else torch.cuda._utils._get_device_index(device, optional=True)
            return capability_of(nvml_handle(f"cuda:{index}"))
        except (pynvml.NVMLError, IndexError):
            return original(device)

    with patch.object(torch.cuda, "get_device_capability", capability):
        yield


def _survives_fork(device: str) -> bool:
    """Return whether a forked child can use the device: it is tried, since libraries may touch it unseen."""
    pid = os.fork()
    if pid == 0:
        try:
            import torch

            from autotune.values.hardware import cuda_used_bytes

            torch.ones(1, device=device)
            cuda_used_bytes(device)
            os._exit(0)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
    deadline = time.monotonic() + 120.0
    while not has_ended(pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    statuses, _ = end_below([pid], limit_s=END_LIMIT_S)
    return statuses.get(pid) == 0


def _run_here(entry: str, directory: Path) -> None:
    pkgutil.resolve_name(entry)(directory)


def _run_afresh(entry: str, directory: Path) -> None:
    os.execv(sys.executable, launch_command("--entry", entry, "--one", str(directory)))


if __name__ == "__main__":
    main()
