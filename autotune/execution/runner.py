"""Runs trials in child processes and says how they ended.

A :class:`Runner` is given requests and gives back results; :class:`LocalRunner` keeps one launcher process (see
`launch`) that forks the children of all its places, and blocks while a child is being timed.
"""

import abc
import contextlib
import json
import math
import re
import shutil
import sys
import time
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import NamedTuple, Self

from pydantic import TypeAdapter, ValidationError

from autotune import errors
from autotune.errors import InfrastructureError, MachineError, RunDirectoryError, resuming
from autotune.execution.environment import COMPILE, COMPILE_LIMIT_S, COMPILED_FILE, operators_of, visible
from autotune.execution.job import END_LIMIT_S, Job, end_marked
from autotune.execution.launch import DEFAULT_ENTRY, FAULT_FILE, LOG_FILE, MARK_FILE, TRY_DEVICES, Launcher
from autotune.execution.outcome import Ending, host_oom_kills, log_file, merged_outcome, read_tail
from autotune.execution.places import Place, check_disk, whole
from autotune.value import Value, write_value
from autotune.values.hardware import Hardware, sharing_of
from autotune.values.trial import (
    DescribeRequest,
    Description,
    Inquiry,
    Measurement,
    Outcome,
    Refusal,
    Rendezvous,
    TrialRequest,
    TrialResult,
    TrialStatus,
)

LAUNCHER_GRACE_S = END_LIMIT_S + 40.0  # to kill and reap after the trial's own time limit
IDLE_LIMIT_S = 10.0
DESCRIBE_LIMIT_S = 600.0

# Of the monotonic clock, in seconds since 1970: by it trials of a search keep their order when the clock is set.
_EPOCH_S = time.time() - time.monotonic()


class Runner(contextlib.AbstractContextManager["Runner"]):
    """Turns requests into results, whatever happens on the way; InfrastructureError: no trial can be run at all.

    A search begins a trial at each free place and waits for the next that ends. By default one place runs it in `wait`.
    """

    takes_turns: bool = False  # whether several trials can be alive at once and compute in turn
    _begun: TrialRequest | None = None

    def __exit__(self, *_: object) -> None:
        """End all that runs."""

    def free(self) -> int:
        return int(self._begun is None)

    def begin(self, request: TrialRequest) -> None:
        self._begun = request

    def wait(self) -> TrialResult:
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
    return run_directory / "trials" / f"{number:04d}"


def end_left_behind(run_directory: Path) -> None:
    with contextlib.suppress(OSError, ValueError, TypeError, KeyError):  # no search, or none that was killed
        mark = bytes.fromhex(json.loads((run_directory / MARK_FILE).read_text())["mark"])
        end_marked(mark.hex())  # digits alone, as it names a folder that is removed


class _Running(NamedTuple):
    """A job that runs at a place."""

    job: Job
    where: Place  # with the devices that the job uses alone
    requests: Sequence[TrialRequest]  # of its trials; empty: it trains nothing
    started: float
    deadline: float
    idle_bytes: Sequence[int]  # of each device, before it began
    oom_kills: int
    again: str  # why the trials run a second time; empty: they don't

    def wait_until_idle(self) -> tuple[str, ...]:
        deadline = time.monotonic() + IDLE_LIMIT_S
        while True:
            grown = (now - idle for now, idle in zip(self.where.used_bytes(), self.idle_bytes, strict=True))
            if (excess := max(grown, default=0)) <= 128 << 20:  # a desktop's GPU memory moves by tens of MiB
                return ()
            if time.monotonic() > deadline:
                return (
                    f"{excess / 2**30:.1f} GiB more than before the trial are in use {IDLE_LIMIT_S:.0f} s after it: "
                    "another process took them, or the trial's memory was not given back",
                )
            time.sleep(0.1)


class LocalRunner(Runner):
    """Runs trials on this machine, each in a process of its own, and writes `result.json` for each.

    A context manager: entering ends what a search that was killed here has left running, leaving ends the launcher and
    all that runs under it. Each of the `places`, by default one that is the whole machine, offers a trial the
    `hardware`. Trial N lives in `trials/NNNN` of the run directory. Tests have a child run another `entry`.
    """

    def __init__(
        self, run_directory: Path, hardware: Hardware, *, entry: str = DEFAULT_ENTRY, places: Sequence[Place] = ()
    ) -> None:
        self._run_directory, self._hardware, self._entry = run_directory.resolve(), hardware, entry
        self.python = sys.executable  # which runs the trials; another one has this autotune too
        self._places = places or (whole(hardware),)
        sharing = frozenset() if hardware.is_cpu else sharing_of(hardware.device)
        self._is_by_mps = "MPS" in sharing  # a fault of one process ends all
        self.takes_turns = not sharing & {"one", "MPS"}
        self._launcher: Launcher | None = None
        self._running: dict[int, _Running] = {}  # by the number of the place
        self._endings: dict[int, Ending] = {}  # of jobs that have ended, until somebody asks for them
        self._compiled: set[str] = set()
        self._asked = Ending()  # of the child that was asked last
        self.ends_at = math.inf  # `time.perf_counter()` at which all is ended that runs before the first trial

    def __enter__(self) -> Self:
        end_left_behind(self._run_directory)
        return self

    def close(self, *_: object) -> None:
        self._running, self._endings = {}, {}
        if self._launcher is not None:
            self._launcher.end()
            self._launcher = None

    __exit__ = close

    def free(self) -> int:
        return len(self._places) - len(self._running)

    def begin(self, request: TrialRequest) -> None:
        self._begin(next(place for place in range(len(self._places)) if place not in self._running), [request])

    def wait(self) -> TrialResult:
        return self._ended()[0]

    def run(self, request: TrialRequest) -> TrialResult:
        return self.run_in_turn([request])[0]

    def run_in_turn(self, requests: Sequence[TrialRequest]) -> list[TrialResult]:
        assert not self._running, "trials that are run alone have to be alone"
        self._begin(0, requests)
        return self._ended()

    def _begin(self, place: int, requests: Sequence[TrialRequest], *, again: str = "") -> None:
        check_disk(self._run_directory)
        self.ends_at = math.inf
        directories = [trial_directory(self._run_directory, request.number) for request in requests]
        for request, directory in zip(requests, directories, strict=True):
            _begin_in(directory, request)
        self.start()
        timeout_s = max(request.limits.timeout_s for request in requests)
        for request in requests:
            if not self._compiled.issuperset(needed := operators_of(request)):
                self.ask("operators", COMPILE, request, timeout_s=min(COMPILE_LIMIT_S, timeout_s), place=place)
                if (self._run_directory / "operators" / COMPILED_FILE).exists():
                    self._compiled.update(needed)
        job = Job(
            place=place, directories=tuple(directories), entry=self._entry, timeout_s=timeout_s,
            ranks=None if (ranks := requests[0].ranks) is None else len(ranks), rendezvous=requests[0].rendezvous,
        )  # fmt: skip
        self._send(job, requests, again=again)

    def _ended(self) -> list[TrialResult]:
        """Wait for a job; run its trials again, once, if others filled the device, or it or the launcher failed."""
        place, running, ending = self._wait_for(tuple(self._running))
        ending = ending._replace(host_oom=host_oom_kills() > running.oom_kills)
        fault, warnings = "", [f"it ran again: {running.again}"] if running.again else []
        try:
            warnings += running.wait_until_idle()
        except MachineError as error:
            fault = str(error)
        again, results, duration_s = "", [], time.monotonic() - running.started
        for number, (request, directory) in enumerate(zip(running.requests, running.job.directories, strict=True)):
            codes = ending.returncodes if request.ranks is not None else ending.returncodes[number : number + 1]
            outcome = merged_outcome(directory, ending._replace(returncodes=codes), request)
            if outcome.kind == "failure":
                check_disk(self._run_directory)  # which would explain it
                by_another = self._is_by_mps and outcome.status is TrialStatus.CRASHED and _may_be_the_devices(outcome)
                if outcome.device_failed or by_another:
                    again = "the device had failed" + ", or another process that shares it by MPS" * self._is_by_mps
                elif ending.launcher_died and outcome.status is TrialStatus.CRASHED:
                    again = "the process that runs trials had died"
                # Others held memory that was free when the search began: it isn't the configuration's.
                elif outcome.crowded_out and request.limits.memory_bytes <= self._hardware.free_bytes:
                    again = "other processes held memory of the device that the budget counts on"
                    outcome = outcome.model_copy(update={"status": TrialStatus.CRASHED})
            result = TrialResult(
                request=request, outcome=outcome, duration_s=duration_s, began=_EPOCH_S + running.started,
                place=self._places[place].shown, warnings=tuple(warnings),
            )  # fmt: skip
            results.append(result)
            shutil.rmtree(directory / "trainer", ignore_errors=True)
        if running.again or running.requests[0].rendezvous is not None:  # of which several machines would have to
            again = ""
        if not fault and any(_may_be_the_devices(result.outcome) for result in results):
            fault = self._fault_of(place, running)
        for result, directory in zip(results, running.job.directories, strict=True):
            if result.measurement is not None or not (fault or again):  # others will run again
                write_value(result, directory / "result.json")
        if fault:
            raise self._gone(running.where, fault)
        if again:
            self._begin(place, running.requests, again=again)
            return self._ended()
        return results

    def _fault_of(self, place: int, running: _Running) -> str:
        """Try a place's devices in a fresh process; return why they don't compute; empty: they do."""
        if (devices := running.where.devices)[0] == "cpu":
            return ""
        request, limit_s = running.requests[0], 120.0
        directory = self.ask("device", TRY_DEVICES, request, timeout_s=limit_s, place=place, devices=len(devices))
        try:
            return (directory / FAULT_FILE).read_text()
        except OSError:
            return read_tail(directory / log_file(), lines=1) or f"a product took more than {limit_s:.0f} s"

    def _gone(self, where: Place, fault: str) -> InfrastructureError:
        why = f"{fault.partition('; ')[0]}; `nvidia-smi` and the kernel's log (Xid) may tell why"
        kept = f"All measured trials are kept: {resuming(self._run_directory)} goes on once it computes"
        return InfrastructureError(f"{', '.join(where.devices)}: doesn't compute: {why}. {kept}")

    def describe(self, request: Inquiry) -> Description:
        """Return what a child finds out about a workload, or raise what it raised; InfrastructureError: no answer."""
        name, ranks, entry = "describe", None, "autotune.execution.describe:run_describe"
        if not isinstance(request, DescribeRequest):
            name, ranks = "examine", request.config.parallelism.ranks
        directory = self.ask(name, entry, request, timeout_s=DESCRIBE_LIMIT_S, ranks=ranks)
        try:
            answers: TypeAdapter[Description | Refusal] = TypeAdapter(Description | Refusal)
            answer = answers.validate_json((directory / "description.json").read_bytes())
        except (OSError, ValidationError):
            check_disk(self._run_directory)  # which would explain it
            self.check_time()
            logs = (directory / log_file(), self._run_directory / LOG_FILE)  # the latter: it couldn't be forked
            tail = next(filter(None, (read_tail(log, lines=1) for log in logs)), None) or "no answer"
            if isinstance(request, DescribeRequest):
                own, code = request.workload.own_code, next(iter(self._asked.returncodes), None) or 0
                if own is not None and code > 0:  # by `os._exit`, say
                    said = f"ended with exit code {code} before it trained (its output: {logs[0]})"
                    raise errors.InputError(f"{own.file}: {said}") from None
                raise InfrastructureError(f"the model could not be inspected: {tail}") from None
            # It hung or died; the trial of the baseline will tell why.
            note = f"samples of a step, and its gradient with another split, could not be looked at: {tail}"
            return Description(facts=request.facts, notes=(note,))
        if isinstance(answer, Refusal):
            raise getattr(errors, answer.error, errors.InputError)(answer.message)
        return answer

    def ask(
        self,
        name: str,
        entry: str,
        request: Value,
        *,
        timeout_s: float,
        place: int = 0,
        devices: int = 1,
        ranks: range | None = None,
        rendezvous: Rendezvous | None = None,
    ) -> Path:
        """Have a child that trains nothing, or `ranks` as a trial's, answer `request` by `entry`; return its directory.

        That is `name` in the run directory.
        """
        check_disk(self._run_directory)
        self.check_time()
        directory = self._run_directory / name
        _begin_in(directory, request)
        limit_s = min(timeout_s, max(1.0, self.ends_at - time.perf_counter()))
        job = Job(
            place=place, directories=(directory,), entry=entry, timeout_s=limit_s,
            ranks=None if ranks is None else len(ranks), rendezvous=rendezvous,
        )  # fmt: skip
        self._send(job, devices=devices)
        self._asked = self._wait_for((place,))[2]
        return directory

    def launch(self) -> Launcher:
        """Begin to start the launcher, if none lives; `start` waits for it."""
        if self._launcher is not None and self._launcher.has_died() and not self._running:
            self.close()
        if self._launcher is None:
            devices = dict.fromkeys(device for place in self._places for device in place.devices)
            self._launcher = Launcher(self._run_directory, list(devices), python=self.python)
        return self._launcher

    def start(self) -> Launcher:
        """Return the launcher, which takes seconds to start; InfrastructureError: it can't be started."""
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
        if time.perf_counter() > self.ends_at:
            raise InfrastructureError(
                "the time of the search was over before its first trial: importing libraries and looking at the model "
                "took all of it; a longer --max-time or an idle machine may help"
            )

    def _send(self, job: Job, requests: Sequence[TrialRequest] = (), *, again: str = "", devices: int = 1) -> None:
        """Have the launcher run a job on the first `devices` of its place, or one for each rank."""
        launcher, where = self.start(), self._places[job.place]
        where = where.model_copy(update={"devices": where.devices[: job.ranks or devices]})
        job = job.model_copy(update={"visible": visible(where.devices)})
        try:
            idle_bytes, started, oom_kills = where.used_bytes(), time.monotonic(), host_oom_kills()
        except MachineError as error:
            raise self._gone(where, str(error)) from None
        deadline = started + job.timeout_s + LAUNCHER_GRACE_S
        self._running[job.place] = _Running(job, where, requests, started, deadline, idle_bytes, oom_kills, again)
        launcher.send(job)

    def _wait_for(self, places: Collection[int]) -> tuple[int, _Running, Ending]:
        """Wait until a job at one of `places` has ended, and return how; with the launcher, all jobs end."""
        while not (ended := self._endings.keys() & places):
            assert self._launcher is not None
            try:
                first = min(running.deadline for running in self._running.values())
                reply = self._launcher.reply(first - time.monotonic())
            except TimeoutError:
                self._end_all(time.monotonic())
            except BaseException:  # Ctrl-C
                self.close()
                raise
            else:
                if reply is None:
                    self._end_all(-math.inf)
                else:
                    self._endings[reply[0]] = reply[1]
        place = min(ended)
        return place, self._running.pop(place), self._endings.pop(place)

    def _end_all(self, now: float) -> None:
        """End the launcher, which is silent or dead, and all jobs; those with a deadline by `now` timed out."""
        running, endings = self._running, self._endings
        self.close()
        lost = {n: Ending(timed_out=each.deadline <= now, launcher_died=True) for n, each in running.items()}
        self._running, self._endings = running, {**lost, **endings}


def _may_be_the_devices(outcome: Outcome) -> bool:
    if isinstance(outcome, Measurement) or outcome.status not in (TrialStatus.CRASHED, TrialStatus.TIMED_OUT):
        return False
    # An error that Python raised is the configuration's, unless it speaks of the device.
    return outcome.phases is None or re.search("cu(da|dnn|blas)|nccl|nvidia", outcome.cause, re.IGNORECASE) is not None


def _begin_in(directory: Path, request: Value) -> None:
    """Make a directory anew, which holds the request alone; RunDirectoryError: it is there, and not of a search."""
    if any(directory.glob("*")) and not any(directory.glob("*request.json*")):  # of the user's, under `--run-dir .`
        raise RunDirectoryError(f"{directory}: is in the way, and no search made it; name another --run-dir")
    shutil.rmtree(directory, ignore_errors=True)
    directory.parent.mkdir(exist_ok=True)  # but not a run directory that was removed
    directory.mkdir()
    write_value(request, directory / "request.json")
