"""The launcher: a process that imports everything once, touches no device, and forks each trial.

:class:`Launcher` is that process as the parent sees it: started for all places of a search, given jobs, ended with all
that runs under it. `main` is its own program, since the forkserver of `multiprocessing` imports the parent's main
program again and ends nothing below a child. Each process of a trial runs `run_trial`, which writes whatever goes wrong
as a :class:`Failure` into its outcome file. A fork is only safe while its parent has not touched the device: on CUDA a
child is tried first; if it can't use the device, each trial is a fresh interpreter.
"""

import contextlib
import gc
import importlib
import json
import os
import pkgutil
import secrets
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from multiprocessing import Pipe, get_context
from multiprocessing.connection import Connection
from pathlib import Path
from traceback import walk_tb
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

from autotune.errors import AutotuneError, InfrastructureError, NoEffectError
from autotune.execution import environment
from autotune.execution import job as jobs
from autotune.execution import outcome as outcomes
from autotune.execution.guard import MemoryGuard, memory_guard
from autotune.execution.token_ring import Turns
from autotune.stand_in.device import bypass
from autotune.value import open_own, read_value, write_text, write_value
from autotune.values.hardware import allocator_settings, capability_of, cuda_used_bytes, installed_versions, nvml_handle
from autotune.values.time_spent import Stopwatch
from autotune.values.trial import Failure, Outcome, Phases, TrialRequest, TrialStatus

DEFAULT_ENTRY = "autotune.execution.launch:run_trial"

TRY_DEVICES = "autotune.execution.launch:try_devices"
FAULT_FILE = "fault.txt"  # why devices don't compute; empty: they do

MARK_FILE = "processes.json"  # the mark that all processes of a search carry
LOG_FILE = "launcher.log"

_TEMPORARY = "AUTOTUNE_TEMPORARY"  # variable: the folder for temporary files, which a rehearsal has below its own

LAUNCHER_START_S = 300.0  # importing torch and transformers from a cold disk, and trying a fork on the device


class Launcher:
    """A launcher process for all trials of a search, run by `python`, which takes jobs once `wait` has returned."""

    def __init__(self, run_directory: Path, devices: Sequence[str], *, python: str = sys.executable) -> None:
        self._mark = secrets.token_hex(8)
        write_text(json.dumps({"mark": self._mark}) + "\n", run_directory / MARK_FILE)
        self._log_path = run_directory / LOG_FILE
        self._connection, other_end = Pipe()
        jobs.temporary_folder(self._mark).mkdir(mode=0o700)
        mark = {jobs.MARK_VARIABLE: self._mark, _TEMPORARY: str(jobs.temporary_folder(self._mark))}
        with os.fdopen(open_own(self._log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND), "ab") as log:
            self._process = subprocess.Popen(
                launch_command("jobs", devices[0], str(other_end.fileno()), python=python),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=(other_end.fileno(),),
                env=environment.launcher_environment(devices[0], mark, others=devices[1:], python=python),
                start_new_session=True,
            )
        other_end.close()
        self.forkable: bool | None = None  # None: it isn't ready yet

    def wait(self, limit_s: float = LAUNCHER_START_S) -> None:
        """Wait until it takes jobs; InfrastructureError says why it did not start."""
        if self.forkable is not None:
            return
        code = 0
        with contextlib.suppress(TimeoutError):
            self.forkable = self.reply(min(limit_s, LAUNCHER_START_S))
            code = self._process.wait() if self.forkable is None else 0
        if self.forkable is None:
            tail = f"killed by signal {-code}" if code < 0 else outcomes.read_tail(self._log_path, lines=1)
            raise InfrastructureError(f"the process that runs trials did not start: {tail or 'no message'}")

    def send(self, job: jobs.Job) -> None:
        with contextlib.suppress(OSError):  # it has died, as `reply` will tell
            self._connection.send(job)

    def reply(self, timeout_s: float) -> Any:
        """Return place and `Ending` of the next job to end; None: the launcher has died; TimeoutError: it is silent."""
        try:
            if not self._connection.poll(max(0.0, timeout_s)):
                raise TimeoutError
            return self._connection.recv()
        except (EOFError, ConnectionError):
            return None

    def has_died(self) -> bool:
        return self._process.poll() is not None

    def end(self) -> None:
        self._process.kill()
        self._process.wait()
        jobs.end_marked(self._mark)
        self._connection.close()


def main() -> None:
    """Run one job, by its entry in its directory, or those that come over a connection, on a device."""
    work, given, place = sys.argv[1:]

    def run_here(entry: str, directory: Path) -> None:
        pkgutil.resolve_name(entry)(directory)

    def run_afresh(entry: str, directory: Path) -> None:
        os.execv(sys.executable, launch_command("one", entry, str(directory)))

    if work == "one":
        jobs.tell_where_it_stands()
        run_here(given, Path(place))
        if environment.own_rank().is_launched:
            jobs.leave(0)
        return
    # From Python 3.12 on: allocators of libraries (pyarrow's jemalloc) have threads, which no trial needs.
    warnings.filterwarnings("ignore", message=".*multi-threaded, use of fork", category=DeprecationWarning)
    jobs.die_with_parent(os.getppid())
    jobs.become_subreaper()
    os.set_inheritable(int(place), False)
    parent = Connection(int(place))
    try:
        forkable = _preload(environment.trial_device(given))
    except Exception as error:
        traceback.print_exc()
        sys.exit(import_failure(error))  # the last line of the log, which the parent shows
    parent.send(forkable)
    environment.forget_unfinished(since=time.time())  # those of earlier searches and trainings
    jobs.Jobs(parent, run_here if forkable else run_afresh).serve()


def import_failure(error: BaseException) -> str:
    """Return the first error of the chain, with the package that can't be imported and the remedy."""
    while (cause := error.__cause__ or (None if error.__suppress_context__ else error.__context__)) is not None:
        error = cause
    said = f"{type(error).__name__}: {outcomes.first_line(error)}"
    names = [frame.f_globals.get("__name__", "").partition(".")[0] for frame, _ in walk_tb(error.__traceback__)]
    # Their frames are the innermost while they load another package's code.
    importing = ("torch", "importlib", "_frozen_importlib", "_frozen_importlib_external", "ctypes", "__main__")
    package = next((name for name in reversed(names) if name not in importing), None)
    if package is None or package in ("autotune", "transformers"):
        return said
    with contextlib.suppress(PackageNotFoundError):
        package = f"{package} {version(package)}"
    return f"{package} can't be imported: {said}; install the build of it for torch {version('torch')}, or uninstall it"


def launch_command(*arguments: str, python: str = sys.executable) -> list[str]:
    """Return the command of this module; -P: the present directory is not searched for modules."""
    return [python, "-P", "-m", "autotune.execution.launch", *arguments]


def _preload(device: str) -> bool:
    """Import what every trial needs; return whether this process may be forked."""
    import torch
    from torch._dynamo.device_interface import CudaInterface
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir

    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", default_cache_dir())  # which stays where it is
    os.environ["TMPDIR"] = tempfile.tempdir = os.environ[_TEMPORARY]

    def capability(device: object = None) -> tuple[int, int]:  # bitsandbytes asks, and torch would make a context
        return capability_of(nvml_handle("cuda:0"))

    with (
        patch.object(torch.cuda, "get_device_capability", capability),
        # For torchao torch asks whether Triton runs on the device.
        patch.object(CudaInterface.Worker, "get_device_properties", lambda *_: SimpleNamespace(major=capability()[0])),
    ):
        importlib.import_module("transformers.trainer")
        # A trial that needs one of these reports why it can't be imported. Accelerate imports deepspeed in all trials.
        for module in ("peft", "bitsandbytes", *({"deepspeed"} & installed_versions().keys())):
            try:
                importlib.import_module(module)
            except Exception as error:
                print(f"{module} is not preloaded: {error}", file=sys.stderr)  # noqa: T201  # the launcher's log
    for module in ("launch", "trial"):  # and with them all others that a trial needs
        importlib.import_module(f"autotune.execution.{module}")
    # The Trainer forces collections, which in each trial would go through the libraries' objects and copy pages: 0.5 s.
    gc.collect()
    gc.freeze()
    if device == "cpu" or torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return device == "cpu"

    def use_device() -> None:
        torch.ones(1, device=device)
        cuda_used_bytes(device)

    child = get_context("fork").Process(target=use_device)
    child.start()
    child.join(120.0)
    child.kill()
    child.join(jobs.END_LIMIT_S)
    return child.exitcode == 0


def run_trial(directory: Path) -> None:
    request = read_value(TrialRequest, directory / "request.json")
    if (turns := Turns.here(request.limits.timeout_s)) is not None:
        turns.begin()
    stopwatch, rank = Stopwatch("prepare_s"), environment.own_rank().number
    device = environment.trial_device(request.device)
    outcome: Outcome
    guard = memory_guard(device, request.limits.memory_bytes)
    with contextlib.ExitStack() as cold:
        try:
            if request.cold_compile:  # inductor and Triton find nothing compiled, and leave nothing
                cache = cold.enter_context(tempfile.TemporaryDirectory(dir=directory, ignore_cleanup_errors=True))
                os.environ |= {"TORCHINDUCTOR_CACHE_DIR": cache, "TRITON_CACHE_DIR": f"{cache}/triton"}
            import torch

            # The user's other settings of the allocator stay, which torch has read before this process was forked.
            given, is_expandable = allocator_settings(), request.config.expandable_segments
            if device != "cpu" and (given or is_expandable):
                settings = f"{f'{given},' if given else ''}expandable_segments:{is_expandable}"
                torch._C._accelerator_setAllocatorSettings(settings)
            torch.manual_seed(request.workload.seed)
            environment.meet(device, timeout_s=request.limits.timeout_s)
            with guard:
                from autotune.execution.own_loop import run_loop
                from autotune.execution.trial import Trial

                trial = Trial(request, directory, stopwatch, guard, turns)
                if (step := request.workload.own_step) is not None:
                    outcome = trial.run_steps(step)
                elif (code := request.workload.own_code) is not None:
                    outcome = run_loop(trial, code) if code.is_loop else trial.run_user_code(code)
                else:
                    outcome = trial.run_named_model()
        except (Exception, SystemExit) as error:
            outcome = _failure(error, guard, request.limits.memory_bytes)
    laps = {**stopwatch.laps(), **({"waited_s": turns.waited_s} if turns is not None else {})}
    outcome = outcome.model_copy(update={"phases": Phases(**laps)})
    write_value(outcome, directory / outcomes.outcome_file(rank))


def _failure(error: BaseException, guard: MemoryGuard, budget_bytes: int) -> Failure:
    traceback.print_exc()  # into the trial's log
    memory, in_use, crowded = None, None, False
    with contextlib.suppress(Exception):  # after a device error every question raises another
        memory, in_use = guard.peak(), guard.in_use_bytes()
    is_short, torch = outcomes.is_out_of_memory(error), sys.modules.get("torch")
    if is_short and torch is not None and torch.cuda.is_initialized():
        try:
            torch.cuda.synchronize()
        except Exception as sticking:  # because of which a library can't make its handle, as when memory is short
            if not outcomes.is_out_of_memory(sticking):
                error, is_short = sticking, False
    is_devices = outcomes.is_of_device(error)
    if is_short:
        status, cause = TrialStatus.OUT_OF_MEMORY, outcomes.shortage(error, in_use, budget_bytes)
        with contextlib.suppress(Exception):
            crowded = guard.is_crowded_out(outcomes.asked_bytes(error))
        cause = "other processes hold memory of the device that the budget counts on: " * crowded + cause
    elif isinstance(error, NoEffectError | AutotuneError) and not is_devices:
        status, cause = TrialStatus.INVALID, (str(error).strip() or type(error).__name__).splitlines()[0][:300]
    else:
        status, cause = TrialStatus.CRASHED, bypass() or f"{type(error).__name__}: {outcomes.first_line(error)}"
    is_devices = is_devices and status is TrialStatus.CRASHED
    return Failure(status=status, cause=cause, memory=memory, device_failed=is_devices, crowded_out=crowded)


def try_devices(directory: Path) -> None:
    """Compute on each device of this fresh process; write down why one doesn't."""
    import torch

    fault = ""
    try:
        for index in range(max(1, torch.cuda.device_count())):
            square = torch.ones(64, 64, device=f"cuda:{index}")
            float((square @ square).sum())
    except Exception as error:
        # A device that others have filled computes for them.
        fault = "" if outcomes.is_out_of_memory(error) else outcomes.first_line(error)
    write_text(fault, directory / FAULT_FILE)


if __name__ == "__main__":
    main()
