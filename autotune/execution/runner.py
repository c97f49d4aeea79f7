"""Runs one trial at a time in a child process and says how it ended.

A :class:`Runner` takes a request and returns a result; :class:`LocalRunner` keeps one launcher process (see `launch`)
that forks the children. The parent blocks while a child is being timed. A child's own outcome file is believed first,
then its exit code or signal.
"""

from __future__ import annotations

import json
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self

import psutil
from pydantic import TypeAdapter, ValidationError

from autotune import errors
from autotune.errors import InfrastructureError
from autotune.execution import describe
from autotune.execution.guard import is_out_of_memory_log
from autotune.execution.launch import DEFAULT_ENTRY, ENVIRONMENT, end_stale
from autotune.execution.logtail import read_tail
from autotune.files import write_value
from autotune.hardware import Hardware, used_bytes
from autotune.trial import (
    DescribeAnswer,
    DescribeRequest,
    Description,
    Failure,
    Measurement,
    Outcome,
    Refusal,
    TrialRequest,
    TrialResult,
    TrialStatus,
)
from autotune.units import show_memory

LAUNCHER_START_S = 180.0  # importing torch and transformers from a cold disk
LAUNCHER_GRACE_S = 60.0  # to kill and reap after the trial's own time limit
IDLE_LIMIT_S = 10.0
# What other programs may take meanwhile: a desktop's GPU memory moves by tens of MiB, a host's by hundreds.
IDLE_TOLERANCE_BYTES = {"cuda": 128 << 20, "cpu": 1 << 30}

_OUTCOMES: TypeAdapter[Outcome] = TypeAdapter(Outcome)
_ANSWERS: TypeAdapter[Description | Refusal] = TypeAdapter(DescribeAnswer)


class Runner(Protocol):
    """Turns a request into a result, whatever happens on the way."""

    def run(self, request: TrialRequest) -> TrialResult:
        """Run one trial.

        Raises:
            InfrastructureError: No trial can be run at all.
        """
        ...


def trial_directory(run_directory: Path, number: int) -> Path:
    """Return the directory of trial `number`."""
    return run_directory / "trials" / f"{number:04d}"


class LocalRunner:
    """Runs trials on this machine, each in a process of its own, and writes `result.json` for each.

    Use it as a context manager: leaving it ends the launcher and all that runs under it.

    Args:
        run_directory: The search's directory; trial N lives in `trials/NNNN`.
        hardware: The device whose memory must be back at its idle level after a trial.
        entry: ``module:function`` that a child runs; another one than the default is for tests.
    """

    def __init__(self, run_directory: Path, hardware: Hardware, *, entry: str = DEFAULT_ENTRY) -> None:
        self._run_directory = run_directory.resolve()
        self._hardware = hardware
        self._entry = entry
        self._launcher: _Launcher | None = None

    def __enter__(self) -> Self:
        """End what a search that was killed here has left running."""
        for directory in (self._run_directory / "trials").glob("[0-9]*"):
            if not (directory / "result.json").exists():
                end_stale(directory)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the launcher and, with it, a trial that still runs."""
        if self._launcher is not None:
            self._launcher.end()
            self._launcher = None

    def run(self, request: TrialRequest) -> TrialResult:
        """Run one trial and write its result; a launcher that died is replaced once.

        Raises:
            InfrastructureError: The launcher can't be started.
        """
        directory = trial_directory(self._run_directory, request.number)
        shutil.rmtree(directory, ignore_errors=True)
        directory.mkdir(parents=True)
        write_value(request, directory / "request.json")
        idle_bytes, oom_kills = used_bytes(self._hardware), _host_oom_kills()
        started = time.monotonic()
        ending = self._ending(directory, self._entry, request.limits.timeout_s)
        outcome = _outcome(directory, ending, request, _host_oom_kills() > oom_kills)
        warnings = self._wait_until_idle(idle_bytes)
        if ending and ending["leftovers"]:
            warnings += (f"{ending['leftovers']} process(es) that the trial left behind were killed",)
        shutil.rmtree(directory / "trainer", ignore_errors=True)
        result = TrialResult(request=request, outcome=outcome, duration_s=time.monotonic() - started, warnings=warnings)
        write_value(result, directory / "result.json")
        return result

    def describe(self, request: DescribeRequest, *, timeout_s: float = 600.0) -> Description:
        """Return what a child finds out about a workload.

        Raises:
            AutotuneError: The workload can't be used; the class is the child's.
            InfrastructureError: The child gave no answer.
        """
        directory = self._run_directory / "describe"
        shutil.rmtree(directory, ignore_errors=True)
        directory.mkdir(parents=True)
        write_value(request, directory / "request.json")
        self._ending(directory, describe.ENTRY, timeout_s)
        try:
            answer = _ANSWERS.validate_json((directory / describe.ANSWER_FILE).read_bytes())
        except (OSError, ValidationError):
            tail = read_tail(directory / "log.txt", lines=1)
            raise InfrastructureError(f"the model could not be inspected: {tail or 'no answer'}") from None
        if isinstance(answer, Refusal):
            raise getattr(errors, answer.error, errors.InputError)(answer.message)
        return answer

    def _ending(self, directory: Path, entry: str, timeout_s: float) -> dict[str, Any] | None:
        """Have the launcher run a child in `directory`; return how it ended, None if the launcher died."""
        if self._launcher is None:
            self._launcher = _Launcher(self._run_directory)
        job = {"directory": str(directory), "entry": entry, "timeout_s": timeout_s}
        ending = self._launcher.run(job, timeout_s + LAUNCHER_GRACE_S)
        if ending is None:
            self.close()
        return ending

    def _wait_until_idle(self, idle_bytes: int) -> tuple[str, ...]:
        """Wait until the device's memory is back where it was before the trial; return a warning if it isn't."""
        deadline = time.monotonic() + IDLE_LIMIT_S
        tolerance = IDLE_TOLERANCE_BYTES[self._hardware.kind]
        while (excess := used_bytes(self._hardware) - idle_bytes) > tolerance:
            if time.monotonic() > deadline:
                return (
                    f"{excess / 2**30:.1f} GiB more than before the trial are in use {IDLE_LIMIT_S:.0f} s after it: "
                    "another process took them, or the trial's memory was not given back",
                )
            time.sleep(0.1)
        return ()


class _Launcher:
    """The launcher process, seen from the parent."""

    def __init__(self, run_directory: Path) -> None:
        self._log_path = run_directory / "launcher.log"
        with self._log_path.open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "autotune.execution.launch"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env={**os.environ, **{k: os.environ.get(k, v) for k, v in ENVIRONMENT.items()}},
                start_new_session=True,
            )
        ready = self._read(LAUNCHER_START_S)
        if ready is None:
            self.end()
            tail = read_tail(self._log_path, lines=1)
            raise InfrastructureError(f"the process that runs trials did not start: {tail or 'no message'}")

    def run(self, job: dict[str, Any], timeout_s: float) -> dict[str, Any] | None:
        """Run a job; return its ending, or None if the launcher died or fell silent."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(job).encode() + b"\n")
            self._process.stdin.flush()
        except OSError:
            return None
        return self._read(timeout_s)

    def _read(self, timeout_s: float) -> dict[str, Any] | None:
        assert self._process.stdout is not None
        readable, _, _ = select.select([self._process.stdout], [], [], timeout_s)
        line = self._process.stdout.readline() if readable else b""
        return json.loads(line) if line else None

    def end(self) -> None:
        """Kill the launcher and all that runs under it."""
        try:
            below = psutil.Process(self._process.pid).children(recursive=True)
        except psutil.Error:
            below = []
        self._process.kill()
        self._process.wait()
        for process in below:
            try:
                process.kill()
            except psutil.Error:
                continue
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                try:
                    pipe.close()
                except OSError:
                    continue


def _host_oom_kills() -> int:
    """Return how many processes the host's out-of-memory killer has ended since boot."""
    try:
        for line in Path("/proc/vmstat").read_text().splitlines():
            if line.startswith("oom_kill "):
                return int(line.split()[1])
    except OSError:
        pass
    return 0


def _outcome(directory: Path, ending: dict[str, Any] | None, request: TrialRequest, host_oom: bool) -> Outcome:
    """Return the child's own outcome, or what its end without one means."""
    tail = read_tail(directory / "log.txt")
    path = directory / "rank-0.json"
    if path.exists():
        try:
            outcome = _OUTCOMES.validate_json(path.read_bytes())
        except ValidationError:
            return Failure(status=TrialStatus.CRASHED, cause="the trial's outcome file is garbage", log_tail=tail)
        if isinstance(outcome, Failure):
            return outcome.model_copy(update={"log_tail": tail})
        return _within_budget(outcome, request)
    if ending is None:
        return Failure(status=TrialStatus.CRASHED, cause="the launcher died with the trial", log_tail=tail)
    if ending["timed_out"]:
        limit = request.limits.timeout_s
        return Failure(status=TrialStatus.TIMED_OUT, cause=f"no result within {limit:.0f} s", log_tail=tail)
    return _death(ending["returncode"], tail, host_oom)


def _within_budget(outcome: Measurement, request: TrialRequest) -> Outcome:
    """Return a measurement that kept the budget; memory that no cap covers (paged states) is seen only here."""
    budget = request.limits.memory_bytes
    if outcome.memory.peak_bytes <= budget:
        return outcome
    cause = f"peaked at {show_memory(outcome.memory.peak_bytes)}, beyond the budget of {show_memory(budget)}"
    return Failure(status=TrialStatus.OUT_OF_MEMORY, cause=cause, memory=outcome.memory)


def _death(returncode: int, tail: str, host_oom: bool) -> Failure:
    if returncode == -signal.SIGKILL and host_oom:
        cause = "killed by the host's out-of-memory killer"
        return Failure(status=TrialStatus.OUT_OF_MEMORY, cause=cause, log_tail=tail)
    if is_out_of_memory_log(tail):
        cause = f"died of a failed allocation (exit code {returncode})"
        return Failure(status=TrialStatus.OUT_OF_MEMORY, cause=cause, log_tail=tail)
    if returncode < 0:
        return Failure(status=TrialStatus.CRASHED, cause=f"killed by {signal.Signals(-returncode).name}", log_tail=tail)
    return Failure(status=TrialStatus.CRASHED, cause=f"ended without a result (exit code {returncode})", log_tail=tail)
