"""The launcher: a process that imports everything once, touches no device, and forks each trial.

Started by `runner`; jobs come as JSON lines on stdin, replies go out as JSON lines on a pipe of their own, so that
libraries may print what they like. It runs one job at a time, on its only thread:

* the child leads a session of its own, dies with the launcher, and prints into a pipe of which the head and the tail
  are kept as the trial's log, however much it prints;
* at the time limit, and after every exit, whatever is left of the child's process group and of the launcher's
  descendants is killed. The launcher is their subreaper, so a grandchild can't escape by a session of its own.

A fork is only safe while its parent has not touched the device, and importing may do so behind our back. On CUDA a
child is therefore tried first; if it can't use the device, each trial is a fresh interpreter instead.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import gc
import importlib
import json
import os
import resource
import selectors
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from autotune.execution.environment import trial_device
from autotune.execution.logtail import BoundedLog
from autotune.execution.processes import become_subreaper, die_with_parent, end_descendants, kill_group
from autotune.hardware import installed_versions

DEFAULT_ENTRY = "autotune.execution.worker:run_trial"
PROCESS_FILE = "process.json"  # in a job's directory once it has a process

_OWN_MODULES = (
    "adapters", "data", "loss", "models", "quick_weights", "training_args", "execution.checking", "execution.effects",
    "execution.measure", "execution.noise", "execution.worker",
)  # fmt: skip

END_LIMIT_S = 20.0  # a killed process that a driver holds longer is given up
_FORK_TEST_LIMIT_S = 120.0
_LOOK_EVERY_S = 0.05


class _Launcher(NamedTuple):
    """What every job needs to know."""

    pid: int
    replies: int
    forkable: bool


def main() -> None:
    """Serve jobs until stdin ends, or run one job in this very process (``--one DIRECTORY``)."""
    parser = argparse.ArgumentParser(prog="python -m autotune.execution.launch")
    parser.add_argument("--device", default="cpu", help="torch device of the trials, as the parent counts")
    parser.add_argument("--replies", type=int, metavar="FD", help="open file that replies go to")
    parser.add_argument("--fresh", action="store_true", help="never fork: each trial is a fresh interpreter")
    parser.add_argument("--one", type=Path, metavar="DIRECTORY", help="run one job here and exit")
    parser.add_argument("--entry", default=DEFAULT_ENTRY, metavar="MODULE:FUNCTION")
    arguments = parser.parse_args()
    if arguments.one is not None:
        _entry(arguments.entry)(arguments.one)
        return
    if arguments.replies is None:
        parser.error("--replies FD is needed to serve jobs")
    die_with_parent(os.getppid())
    become_subreaper()
    os.set_inheritable(arguments.replies, False)
    started = time.monotonic()
    forkable = not arguments.fresh and _preload(trial_device(arguments.device))
    _reply(arguments.replies, {"ready": True, "forkable": forkable, "import_s": time.monotonic() - started})
    launcher = _Launcher(os.getpid(), arguments.replies, forkable)
    for line in sys.stdin:
        _reply(arguments.replies, _run(json.loads(line), launcher))


def launch_command(*arguments: str) -> list[str]:
    """Return the command of this module; -P: the present directory is not searched for modules."""
    return [sys.executable, "-P", "-m", "autotune.execution.launch", *arguments]


def _reply(descriptor: int, message: dict[str, Any]) -> None:
    os.write(descriptor, json.dumps(message).encode() + b"\n")


def _preload(device: str) -> bool:
    """Import what every trial needs; return whether this process may be forked."""
    import torch

    with _capability_without_context():
        importlib.import_module("transformers.trainer")
        for module in ("peft", "bitsandbytes"):
            _try_import(module)
    for module in _OWN_MODULES:
        importlib.import_module(f"autotune.{module}")
    installed_versions()  # kept: reading them out of the packages takes 0.14 s
    # What is there by now stays: the collections that the Trainer forces would go through all of it in every trial,
    # and copy its pages, which took 0.5 s.
    gc.collect()
    gc.freeze()
    if device == "cpu":
        return True
    return not torch.cuda.is_initialized() and _survives_fork(device)  # type: ignore[no-untyped-call]


def _try_import(module: str) -> None:
    """Import what only some trials need; if it is missing or broken, that is the matter of those trials."""
    try:
        importlib.import_module(module)
    except Exception as error:
        print(f"{module} is not preloaded: {error}", file=sys.stderr)  # noqa: T201  # the launcher's log


@contextlib.contextmanager
def _capability_without_context() -> Iterator[None]:
    """Have torch answer for a device's capability out of NVML.

    Importing bitsandbytes asks for it, and torch would make a context to answer.
    """
    import pynvml
    import torch

    from autotune.hardware import nvml_handle

    original = torch.cuda.get_device_capability

    def capability(device: Any = None) -> tuple[int, int]:
        try:
            index = 0 if device is None else torch.cuda._utils._get_device_index(device, optional=True)
            major, minor = pynvml.nvmlDeviceGetCudaComputeCapability(nvml_handle(index))
        except (pynvml.NVMLError, IndexError):
            return original(device)
        return major, minor

    torch.cuda.get_device_capability = capability
    try:
        yield
    finally:
        torch.cuda.get_device_capability = original


def _survives_fork(device: str) -> bool:
    """Return whether a forked child can use the device: it is tried, since libraries may touch it unseen."""
    pid = os.fork()
    if pid == 0:
        try:
            import torch

            from autotune.hardware import cuda_used_bytes

            torch.ones(1, device=device)
            cuda_used_bytes(device)
            os._exit(0)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
    deadline = time.monotonic() + _FORK_TEST_LIMIT_S
    while not _has_ended(pid) and time.monotonic() < deadline:
        time.sleep(_LOOK_EVERY_S)
    status, _ = end_descendants(pid, limit_s=END_LIMIT_S)
    return status == 0


def _entry(name: str) -> Callable[[Path], None]:
    module, _, function = name.partition(":")
    entry: Callable[[Path], None] = getattr(importlib.import_module(module), function)
    return entry


def _run(job: dict[str, Any], launcher: _Launcher) -> dict[str, Any]:
    """Run one job to its end and return how it ended: returncode (None: it can't be ended), timed_out, unkillable."""
    directory = Path(job["directory"])
    read_end, write_end = os.pipe()
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid == 0:
        os.close(read_end)
        _become_trial(job["entry"], directory, write_end, launcher)
    os.close(write_end)
    (directory / PROCESS_FILE).write_text(json.dumps({"pid": pid}))
    with BoundedLog(directory / "log.txt") as log:
        timed_out = _wait(pid, read_end, log, float(job["timeout_s"]))
        if timed_out:
            kill_group(pid)
        status, unkillable = end_descendants(pid, limit_s=END_LIMIT_S)
        _drain(read_end, log)
    os.close(read_end)
    returncode = None if status is None else os.waitstatus_to_exitcode(status)
    return {"returncode": returncode, "timed_out": timed_out, "unkillable": unkillable}


def _become_trial(entry: str, directory: Path, output: int, launcher: _Launcher) -> None:
    """Turn this forked child into the trial's process; never returns."""
    try:
        os.setsid()
        die_with_parent(launcher.pid)
        null = os.open(os.devnull, os.O_RDONLY)
        for source, target in ((null, 0), (output, 1), (output, 2)):
            os.dup2(source, target)
        # Only what is the launcher's own: libraries have open files too, the NVIDIA driver's among them.
        for descriptor in (null, output, launcher.replies):
            os.close(descriptor)
        _prefer_as_victim()
        if not launcher.forkable:
            os.execv(sys.executable, launch_command("--entry", entry, "--one", str(directory)))
        _entry(entry)(directory)
        code = 0
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    ctypes.CDLL(None).fflush(None)  # what libraries printed without Python
    os._exit(code)


def _prefer_as_victim() -> None:
    """Leave no core file of gigabytes, and be the one that the host's out-of-memory killer chooses."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    try:
        Path("/proc/self/oom_score_adj").write_text("800")
    except OSError:  # not every container has it
        return


def _wait(pid: int, read_end: int, log: BoundedLog, timeout_s: float) -> bool:
    """Copy the child's output to its log until it exits; return True if the time limit came first."""
    deadline = time.monotonic() + timeout_s
    os.set_blocking(read_end, False)
    with selectors.DefaultSelector() as selector, _wakes_at_exit(pid, selector) as wakes:
        selector.register(read_end, selectors.EVENT_READ)
        while True:
            remaining = max(0.0, deadline - time.monotonic())
            ready = [key.fd for key, _ in selector.select(remaining if wakes else min(remaining, _LOOK_EVERY_S))]
            if read_end in ready and not log.copy_from(read_end):
                selector.unregister(read_end)  # every writer has closed it
            if _has_ended(pid):
                return False
            if not remaining:
                return True


@contextlib.contextmanager
def _wakes_at_exit(pid: int, selector: selectors.BaseSelector) -> Iterator[bool]:
    """Have `selector` wake when the child exits; yield False on a kernel that can't (before Linux 5.3)."""
    try:
        process = os.pidfd_open(pid)
    except OSError:
        yield False
        return
    selector.register(process, selectors.EVENT_READ)
    try:
        yield True
    finally:
        os.close(process)


def _has_ended(pid: int) -> bool:
    """Return whether the child has ended; it stays to be reaped."""
    return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def _drain(read_end: int, log: BoundedLog) -> None:
    """Copy what is left in the pipe: all writers are gone."""
    while log.copy_from(read_end):
        continue


if __name__ == "__main__":
    main()
