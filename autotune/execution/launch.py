"""The launcher: a process that imports everything once, touches no device, and forks each trial.

Started by `runner` as ``python -m autotune.execution.launch``; jobs come as JSON lines on stdin, and replies go out as
JSON lines on what was stdout (libraries that print get the launcher's stderr). It runs one job at a time, on its only
thread:

* the child leads a session of its own, dies with the launcher (PR_SET_PDEATHSIG), and prints into a pipe of which the
  head and the tail are kept as the trial's log, however much it prints;
* at the time limit, and after every exit, whatever is left of the child's process group and of the launcher's
  descendants is killed. The launcher is their subreaper, so a grandchild can't escape by a session of its own.

A fork is only safe while its parent has started no threads of the device's libraries: if importing has initialised
CUDA all the same, each trial is a fresh interpreter instead.
"""

from __future__ import annotations

import argparse
import ctypes
import importlib
import json
import os
import selectors
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

from autotune.execution.logtail import BoundedLog

DEFAULT_ENTRY = "autotune.execution.worker:run_trial"

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36

# Set before any library is imported; see each library's reason.
ENVIRONMENT = {
    "PYTORCH_NVML_BASED_CUDA_CHECK": "1",  # torch.cuda.is_available() without a context, which a fork would inherit
    "ARROW_DEFAULT_MEMORY_POOL": "system",  # pyarrow's own pool reserves 1 GiB, which the memory limit would count
    "TOKENIZERS_PARALLELISM": "false",  # threads before a fork
    "TRANSFORMERS_VERBOSITY": "error",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "PYTHONFAULTHANDLER": "1",
}


def main() -> None:
    """Serve jobs until stdin ends, or run one job in this very process (``--one DIRECTORY``)."""
    parser = argparse.ArgumentParser(prog="python -m autotune.execution.launch")
    parser.add_argument("--one", type=Path, metavar="DIRECTORY", help="run one job here and exit")
    parser.add_argument("--entry", default=DEFAULT_ENTRY, metavar="MODULE:FUNCTION")
    arguments = parser.parse_args()
    die_with_parent()
    if arguments.one is not None:
        _entry(arguments.entry)(arguments.one)
        return
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    started = time.monotonic()
    forkable = _preload()
    _reply(replies, {"ready": True, "forkable": forkable, "import_s": time.monotonic() - started})
    for line in sys.stdin:
        job = json.loads(line)
        _reply(replies, _run(job, forkable=forkable))


def die_with_parent() -> None:
    """Ask the kernel to kill this process when the thread that started it ends."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def _reply(replies: IO[str], message: dict[str, Any]) -> None:
    replies.write(json.dumps(message) + "\n")
    replies.flush()


def _preload() -> bool:
    """Import what every trial needs; return whether this process may still be forked."""
    import torch

    _without_device(lambda: [importlib.import_module(m) for m in ("transformers.trainer", "peft")])
    for module in ("data", "loss", "models", "execution.effects", "execution.measure", "execution.worker"):
        importlib.import_module(f"autotune.{module}")
    return not torch.cuda.is_initialized()  # type: ignore[no-untyped-call]


def _without_device(action: Callable[[], Any]) -> None:
    """Run `action` while torch answers for a device's capability out of NVML.

    Importing bitsandbytes (which peft does) asks torch for it, and torch would create a context to answer.
    """
    import torch

    from autotune.hardware import nvml_handle

    def capability(device: Any = None) -> tuple[int, int]:
        import pynvml

        index = torch.cuda._utils._get_device_index(device, optional=True) if device is not None else 0
        major, minor = pynvml.nvmlDeviceGetCudaComputeCapability(nvml_handle(index))
        return major, minor

    original = torch.cuda.get_device_capability
    torch.cuda.get_device_capability = capability
    try:
        action()
    finally:
        torch.cuda.get_device_capability = original


def _entry(name: str) -> Callable[[Path], None]:
    module, _, function = name.partition(":")
    entry: Callable[[Path], None] = getattr(importlib.import_module(module), function)
    return entry


def _run(job: dict[str, Any], *, forkable: bool) -> dict[str, Any]:
    """Run one job to its end and return how it ended."""
    directory = Path(job["directory"])
    read_end, write_end = os.pipe()
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid == 0:
        _become_trial(job["entry"], directory, write_end, forkable=forkable)
    os.close(write_end)
    (directory / "process.json").write_text(json.dumps({"pid": pid, "started": _start_time(pid)}))
    with BoundedLog(directory / "log.txt") as log:
        timed_out = _wait(pid, read_end, log, float(job["timeout_s"]))
        if timed_out:
            _kill_group(pid)
        _, status = os.waitpid(pid, 0)
        leftovers = _kill_descendants(pid)
        _drain(read_end, log)
    os.close(read_end)
    return {"returncode": os.waitstatus_to_exitcode(status), "timed_out": timed_out, "leftovers": leftovers}


def _become_trial(entry: str, directory: Path, write_end: int, *, forkable: bool) -> None:
    """Turn this forked child into the trial's process; never returns."""
    try:
        os.setsid()
        die_with_parent()
        null = os.open(os.devnull, os.O_RDONLY)
        for source, target in ((null, 0), (write_end, 1), (write_end, 2)):
            os.dup2(source, target)
        os.closerange(3, 256)  # the launcher's pipes
        if not forkable:
            command = [
                sys.executable,
                "-m",
                "autotune.execution.launch",
                "--entry",
                entry,
                "--one",
                str(directory),
            ]
            os.execv(sys.executable, command)
        _entry(entry)(directory)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)


def _wait(pid: int, read_end: int, log: BoundedLog, timeout_s: float) -> bool:
    """Copy the child's output to its log until it exits; return True if the time limit came first."""
    deadline = time.monotonic() + timeout_s
    os.set_blocking(read_end, False)
    process = os.pidfd_open(pid)
    try:
        with selectors.DefaultSelector() as selector:
            selector.register(read_end, selectors.EVENT_READ)
            selector.register(process, selectors.EVENT_READ)
            while True:
                remaining = deadline - time.monotonic()
                ready = [key.fd for key, _ in selector.select(max(0.0, remaining))]
                if read_end in ready and not log.copy_from(read_end):
                    selector.unregister(read_end)  # every writer has closed it
                if process in ready:
                    return False
                if remaining <= 0:
                    return True
    finally:
        os.close(process)


def _drain(read_end: int, log: BoundedLog) -> None:
    """Copy what is left in the pipe: all writers are gone."""
    while log.copy_from(read_end):
        continue


def _kill_group(pid: int) -> None:
    try:
        os.killpg(pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        return


def _kill_descendants(pid: int) -> int:
    """Kill and reap what the trial left behind; return how many processes that were."""
    import psutil

    _kill_group(pid)
    killed: set[int] = set()
    while True:
        children = psutil.Process().children(recursive=True)
        if not children:
            return len(killed)
        for child in children:
            killed.add(child.pid)
            try:
                child.kill()
            except psutil.Error:
                continue
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                continue
        except ChildProcessError:
            return len(killed)
        time.sleep(0.01)


def _start_time(pid: int) -> int | None:
    """Return the process's start in clock ticks since boot: with the pid it names a process for ever."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    except (OSError, IndexError, ValueError):
        return None


def end_stale(directory: Path) -> bool:
    """Kill the process group that an earlier search left running for the trial in `directory`, if it is still there."""
    try:
        record = json.loads((directory / "process.json").read_text())
    except (OSError, ValueError):
        return False
    if record["started"] is None or _start_time(record["pid"]) != record["started"]:
        return False
    _kill_group(record["pid"])
    return True


if __name__ == "__main__":
    main()
