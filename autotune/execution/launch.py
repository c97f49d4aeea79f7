"""The launcher's own program: it imports everything once, touches no device, and forks each trial.

Jobs come as JSON lines on stdin, replies go out as JSON lines on a pipe of their own, so that libraries may print what
they like. It runs one job at a time, on its only thread: see `job`.

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
import sys
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

from autotune.execution.environment import forget_unfinished, trial_device
from autotune.execution.job import END_LIMIT_S, LOOK_EVERY_S, Host, has_ended, run_job, tell_where_it_stands
from autotune.execution.processes import become_subreaper, die_with_parent, end_descendants
from autotune.execution.ranks import own_rank
from autotune.values.hardware import installed_versions

DEFAULT_ENTRY = "autotune.execution.worker:run_trial"

_OWN_MODULES = (
    "training.adapters", "training.arguments", "training.build", "training.dataset", "training.loss",
    "training.random_weights", "execution.checking", "execution.effects", "execution.measure",
    "execution.noise", "execution.trainer_setup", "execution.trial", "execution.turns", "execution.worker",
)  # fmt: skip

_FORK_TEST_LIMIT_S = 120.0


def main() -> None:
    """Serve jobs until stdin ends, or run one job in this very process (``--one DIRECTORY``)."""
    parser = argparse.ArgumentParser(prog="python -m autotune.execution.launch")
    parser.add_argument("--device", default="cpu", help="torch device of the trials, as the parent counts")
    parser.add_argument("--cores", help="that trials are bound to, such as 0,1 (default: any)")
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
    die_with_parent(os.getppid())
    become_subreaper()
    os.set_inheritable(arguments.replies, False)
    if arguments.cores:
        os.sched_setaffinity(0, [int(core) for core in arguments.cores.split(",")])
    started = time.monotonic()
    forkable = not arguments.fresh and _preload(trial_device(arguments.device))
    _reply(arguments.replies, {"ready": True, "forkable": forkable, "import_s": time.monotonic() - started})
    forget_unfinished(since=time.time())  # those of earlier searches and trainings
    host = Host(os.getpid(), (arguments.replies,), _run_here if forkable else _run_afresh)
    for line in sys.stdin:
        _reply(arguments.replies, run_job(json.loads(line), host))


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
        if "deepspeed" in installed_versions():  # where it is installed, accelerate imports it in every training
            _try_import("deepspeed")
    for module in _OWN_MODULES:
        importlib.import_module(f"autotune.{module}")
    # What is there by now stays, the packages' versions too: the collections that the Trainer forces would go through
    # all of it in every trial, and copy its pages, which took 0.5 s.
    gc.collect()
    gc.freeze()
    if device == "cpu":
        return True
    return not torch.cuda.is_initialized() and _survives_fork(device)  # type: ignore[no-untyped-call]


def _try_import(module: str) -> None:
    """Import what only some trials need; if it is missing or broken, those trials report it."""
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

    from autotune.values.nvml import capability_of, nvml_handle

    original = torch.cuda.get_device_capability

    def capability(device: Any = None) -> tuple[int, int]:
        try:
            index = 0 if device is None else torch.cuda._utils._get_device_index(device, optional=True)
            return capability_of(nvml_handle(index))
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
    deadline = time.monotonic() + _FORK_TEST_LIMIT_S
    while not has_ended(pid) and time.monotonic() < deadline:
        time.sleep(LOOK_EVERY_S)
    statuses, _ = end_descendants(pid, limit_s=END_LIMIT_S)
    return statuses.get(pid) == 0


def _run_here(entry: str, directory: Path) -> None:
    """Run a job (``module:function``) in this process."""
    pkgutil.resolve_name(entry)(directory)


def _run_afresh(entry: str, directory: Path) -> None:
    """Become a fresh interpreter that runs a job."""
    os.execv(sys.executable, launch_command("--entry", entry, "--one", str(directory)))


if __name__ == "__main__":
    main()
