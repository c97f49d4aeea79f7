"""Runs one trial at a time in a child process and says how it ended.

A :class:`Runner` is given requests and gives back results; :class:`LocalRunner` keeps one launcher process (see
`launch`) that forks the children. The parent blocks while a child is being timed; what its end means is decided in
`outcome`.
"""

from __future__ import annotations

import abc
import math
import shutil
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Self

from pydantic import TypeAdapter, ValidationError

from autotune import errors
from autotune.errors import InfrastructureError
from autotune.execution.environment import COMPILE_LIMIT_S, forget_ended_builder, operators_of
from autotune.execution.failures import read_tail
from autotune.execution.job import END_LIMIT_S, PROCESS_FILE
from autotune.execution.launch import DEFAULT_ENTRY, Launcher, end_what_was_left
from autotune.execution.outcome import Ending, host_oom_kills, log_file, merged_outcome
from autotune.execution.places import Place, check_place, whole
from autotune.value import Value, write_value
from autotune.values.hardware import Hardware, cuda_used_bytes
from autotune.values.trial import (
    DescribeAnswer,
    DescribeRequest,
    Description,
    ExamineRequest,
    Refusal,
    TrialRequest,
    TrialResult,
    TrialStatus,
)

LAUNCHER_GRACE_S = END_LIMIT_S + 40.0  # to kill and reap after the trial's own time limit
IDLE_LIMIT_S = 10.0
IDLE_TOLERANCE_BYTES = 128 << 20  # a desktop's GPU memory moves by tens of MiB meanwhile

# Of the monotonic clock, in seconds since 1970: by it trials of a search keep their order when the clock is set.
_EPOCH_S = time.time() - time.monotonic()

_DESCRIBE, _COMPILE = "autotune.execution.describe", "autotune.execution.environment:compile_operators"
_ANSWERS: TypeAdapter[Description | Refusal] = TypeAdapter(DescribeAnswer)


class Runner(abc.ABC):
    """Turns requests into results, whatever happens on the way; InfrastructureError: no trial can be run at all.

    A search begins trials where a place is free and waits for the next that ends. One place runs a trial while it is
    waited for, in the thread that waits; several run theirs at once (`pool`, `ray_pool`).

    Attributes:
        takes_turns: Whether several trials can be alive at once and compute in turn.
    """

    takes_turns: bool = False
    _begun: TrialRequest | None = None

    def free(self) -> int:
        """Return how many more trials can be begun now."""
        return int(self._begun is None)

    def begin(self, request: TrialRequest) -> None:
        """Begin a trial at a free place."""
        self._begun = request

    def wait(self) -> TrialResult:
        """Block until one of the trials that were begun has ended, and return its result."""
        assert self._begun is not None, "no trial was begun"
        request, self._begun = self._begun, None
        return self.run(request)

    @abc.abstractmethod
    def run(self, request: TrialRequest) -> TrialResult:
        """Run one trial alone, always at the same place, for measurements that are compared."""

    def run_in_turn(self, requests: Sequence[TrialRequest]) -> list[TrialResult]:
        """Run trials that are alive at once and compute in turn, if it `takes_turns`."""
        raise AssertionError("this runner takes no turns")


def trial_directory(run_directory: Path, number: int) -> Path:
    """Return the directory of trial `number`."""
    return run_directory / "trials" / f"{number:04d}"


class LocalRunner(Runner):
    """Runs trials on this machine, each in a process of its own, and writes `result.json` for each.

    Use it as a context manager: entering ends what a search that was killed here has left running, leaving ends the
    launcher and all that runs under it.

    Args:
        run_directory: The search's directory, which nobody else uses meanwhile; trial N lives in `trials/NNNN`.
        hardware: The device that trials run on, and whose memory must be back at its idle level after each.
        entry: ``module:function`` that a child runs; another one than the default is for tests.
        place: Which of several parts of the machine; all of `hardware` by default.
        stop: A file that becomes readable when a trial that runs in another thread is to be interrupted.

    Attributes:
        ends_at: `time.perf_counter()` until which the first trial has to begin: whatever runs before it is ended then.
    """

    takes_turns = True

    def __init__(
        self,
        run_directory: Path,
        hardware: Hardware,
        *,
        entry: str = DEFAULT_ENTRY,
        place: Place | None = None,
        stop: int | None = None,
    ) -> None:
        self._run_directory = run_directory.resolve()
        self._hardware = hardware
        self._entry = entry
        self._place = place or whole(hardware)
        self._stop = stop
        self._launcher: Launcher | None = None
        self._compiled: set[str] = set()
        self.ends_at = math.inf

    def __enter__(self) -> Self:
        end_what_was_left(self._run_directory)
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the launcher and, with it, a trial that still runs."""
        if self._launcher is not None:
            self._launcher.end()
            self._launcher = None

    def launch(self) -> Launcher:
        """Begin to start the launcher, whose seconds can be used otherwise until `start`."""
        if self._launcher is None:
            self._launcher = Launcher(self._run_directory, self._place, stop=self._stop)
        return self._launcher

    def run(self, request: TrialRequest) -> TrialResult:
        """Run one trial and write its result; raises as `run_in_turn` does."""
        return self.run_in_turn([request])[0]

    def run_in_turn(self, requests: Sequence[TrialRequest]) -> list[TrialResult]:
        """Run trials of one process each, all alive at once and computing in turn, and write their results.

        They run again, once, if one of them finds that others have filled the device; then it tells nothing of memory.

        Raises:
            InfrastructureError: The launcher can't be started, the run directory is gone, or its disk is full.
        """
        results = self._run_once(requests)
        if any(map(self._was_crowded_out, results)):
            again = "it ran again: other processes held memory of the device that the budget counts on"
            results = [r.model_copy(update={"warnings": (*r.warnings, again)}) for r in self._run_once(requests)]
            for place, result in enumerate(results):
                if self._was_crowded_out(result):
                    crash = result.outcome.model_copy(update={"status": TrialStatus.CRASHED})
                    results[place] = result.model_copy(update={"outcome": crash})
        for result in results:
            write_value(result, trial_directory(self._run_directory, result.request.number) / "result.json")
        return results

    def _was_crowded_out(self, result: TrialResult) -> bool:
        """Whether others held what was free when the search began; a larger budget never was."""
        failure, within = result.outcome, result.request.limits.memory_bytes <= self._hardware.free_bytes
        return failure.kind == "failure" and failure.crowded_out and within

    def _run_once(self, requests: Sequence[TrialRequest]) -> list[TrialResult]:
        check_place(self._run_directory)
        self.ends_at = math.inf
        directories = [trial_directory(self._run_directory, request.number) for request in requests]
        for request, directory in zip(requests, directories, strict=True):
            _make_empty(directory)
            write_value(request, directory / "request.json")
        self.start()  # its start is no part of the trials
        timeout_s = max(request.limits.timeout_s for request in requests)
        for request in requests:
            self._compile(request, timeout_s)  # nor is this
        idle_bytes, oom_kills = self._device_bytes(), host_oom_kills()
        started = time.monotonic()
        ending = self._ending(directories, self._entry, timeout_s, ranks=requests[0].ranks)
        ending = ending._replace(host_oom=host_oom_kills() > oom_kills)
        if any(map(operators_of, requests)):  # what is noted there was noted by a child of this process
            forget_ended_builder(self._run_directory / "operators")  # the trial may have gone on with it
        warnings = self._wait_until_idle(idle_bytes)
        if ending.unkillable:
            held = f"{ending.unkillable} process(es) of the trial can't be killed: a driver holds them in the kernel"
            warnings = (held, *warnings)
        duration_s, results = time.monotonic() - started, []
        for place, (request, directory) in enumerate(zip(requests, directories, strict=True)):
            in_turn = len(requests) > 1
            own = ending._replace(returncodes=ending.returncodes[place : place + 1]) if in_turn else ending
            outcome = merged_outcome(directory, own, request)
            if outcome.kind == "failure":
                check_place(self._run_directory)  # which would explain it
            shutil.rmtree(directory / "trainer", ignore_errors=True)
            result = TrialResult(
                request=request,
                outcome=outcome,
                duration_s=duration_s,
                warnings=warnings,
                began=_EPOCH_S + started,
                place=self._place.shown,
            )
            results.append(result)
        return results

    def describe(self, request: DescribeRequest, *, timeout_s: float = 600.0) -> Description:
        """Return what a child finds out about a workload.

        Raises:
            AutotuneError: The workload can't be used; the class is the one that the child raised.
            InfrastructureError: The child gave no answer.
        """
        return self._description(self.ask("describe", f"{_DESCRIBE}:run_describe", request, timeout_s=timeout_s))

    def examine(self, request: ExamineRequest, *, timeout_s: float = 600.0) -> Description:
        """Return what running steps of the user's loop shows; a note says so if the child gave no answer.

        Raises InputError if a step consumes another number of samples than it should.
        """
        directory = self.ask("examine", f"{_DESCRIBE}:run_examine", request, timeout_s=timeout_s)
        try:
            return self._description(directory)
        except InfrastructureError as error:  # it hung or died: the trial of the baseline will say of what
            note = f"samples of a step, and its gradient with another split, could not be looked at: {error}"
            return Description(facts=request.facts, notes=(note,))

    def _description(self, directory: Path) -> Description:
        try:
            answer = _ANSWERS.validate_json((directory / "description.json").read_bytes())
        except (OSError, ValidationError):
            check_place(self._run_directory)  # which would explain it
            logs = (directory / log_file(), self._run_directory / "launcher.log")  # the latter: it couldn't be forked
            tail = next(filter(None, (read_tail(log, lines=1) for log in logs)), None)
            self.check_time()
            raise InfrastructureError(f"the model could not be inspected: {tail or 'no answer'}") from None
        if isinstance(answer, Refusal):
            raise getattr(errors, answer.error, errors.InputError)(answer.message)
        return answer

    def ask(self, name: str, entry: str, request: Value, *, timeout_s: float) -> Path:
        """Have a child that touches no device answer `request` by `entry` in directory `name`, which is returned."""
        check_place(self._run_directory)
        self.check_time()
        directory = self._run_directory / name
        _make_empty(directory)
        write_value(request, directory / "request.json")
        self._ending([directory], entry, min(timeout_s, max(1.0, self.ends_at - time.perf_counter())))
        return directory

    def _compile(self, request: TrialRequest, limit_s: float) -> None:
        """Have the operators compiled that none of the earlier trials needed, for up to `limit_s`."""
        if not self._compiled.issuperset(operators_of(request)):
            directory = self.ask("operators", _COMPILE, request, timeout_s=min(COMPILE_LIMIT_S, limit_s))
            if not forget_ended_builder(directory):
                self._compiled.update(operators_of(request))

    def start(self) -> Launcher:
        """Return the launcher, started if there is none or if it has died; that takes seconds.

        Raises InfrastructureError if it can't be started.
        """
        if self._launcher is not None and self._launcher.has_died():
            self.close()
        launcher = self.launch()
        try:
            launcher.wait(max(1.0, self.ends_at - time.perf_counter()))
        except BaseException as error:
            self.close()
            if isinstance(error, InfrastructureError):
                self.check_time()
            raise
        return launcher

    def check_time(self) -> None:
        """Raise InfrastructureError if the time is over before the first trial has begun."""
        if time.perf_counter() > self.ends_at:
            raise InfrastructureError(
                "the time of the search was over before its first trial: importing libraries and looking at the model "
                "took all of it; a longer --max-time or an idle machine may help"
            )

    def _ending(self, directories: Sequence[Path], entry: str, timeout_s: float, *, ranks: int | None = None) -> Ending:
        """Have the launcher run a child, or so many ranks, in each directory; return how they ended.

        A launcher that dies before it takes the job is replaced once.
        """
        job = {"directories": [str(d) for d in directories], "entry": entry, "timeout_s": timeout_s, "ranks": ranks}
        for _ in range(2):
            launcher = self.start()
            try:
                reply = launcher.run(job, timeout_s + LAUNCHER_GRACE_S)
            except TimeoutError:
                self.close()
                return Ending(timed_out=True, launcher_died=True)
            except BaseException:  # Ctrl-C: the job is still running, and its reply would be taken for the next one's
                self.close()
                raise
            if reply is not None:
                return Ending(**reply)
            self.close()
            if (directories[0] / PROCESS_FILE).exists():
                break
        return Ending(launcher_died=True)

    def _device_bytes(self) -> list[int]:
        """Return the memory in use on each device; nothing is waited for where it is the host's memory."""
        if self._hardware.is_cpu:
            return []
        return [used for device in self._place.devices if (used := cuda_used_bytes(device)) is not None]

    def _wait_until_idle(self, idle_bytes: Sequence[int]) -> tuple[str, ...]:
        """Wait until the devices' memory is back where it was before the trial; return a warning if it isn't."""
        deadline = time.monotonic() + IDLE_LIMIT_S
        while True:
            grown = (now - idle for now, idle in zip(self._device_bytes(), idle_bytes, strict=True))
            if (excess := max(grown, default=0)) <= IDLE_TOLERANCE_BYTES:
                return ()
            if time.monotonic() > deadline:
                return (
                    f"{excess / 2**30:.1f} GiB more than before the trial are in use {IDLE_LIMIT_S:.0f} s after it: "
                    "another process took them, or the trial's memory was not given back",
                )
            time.sleep(0.1)


def _make_empty(directory: Path) -> None:
    shutil.rmtree(directory, ignore_errors=True)
    directory.parent.mkdir(exist_ok=True)  # and no folder above: a run directory that was removed isn't made again
    directory.mkdir()  # nothing in it is older, nor a link
