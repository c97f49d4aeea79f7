"""How a trial ended, from the files of its process or its ranks: an outcome file and a log each.

The outcome file counts first; without one, exit code, signal and log decide. The step times of several ranks are those
of the rank with the longest sum, since the longest of each single step would count delays that the next step makes up
for. Memory is that of the worst rank, the loss the mean. A rank that fails takes the others with it: the cause is the
failure noticed first; of two noticed at once, one that speaks of a lost peer is the consequence.
"""

import contextlib
import json
import math
import re
import signal
import statistics
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import TypeAdapter, ValidationError

from autotune.stand_in.device import is_rehearsal
from autotune.units import parse_memory, show_memory
from autotune.value import read_value
from autotune.values.conditions import Conditions, highest
from autotune.values.statistics import rate_interval
from autotune.values.trial import Failure, Measurement, Memory, Outcome, TrialRequest, TrialResult, TrialStatus

# Libraries' words when an allocation fails: all of the host's were seen under RLIMIT_DATA. oneDNN hides that of its
# scratchpad, compilers wrap Python's, CUDA's driver speaks for expandable segments, and making a handle takes memory.
_ALLOCATION_FAILED = re.compile(
    r"can't allocate memory|cannot allocate memory|\[errno 12\]|std::bad_alloc|memoryerror"
    r"|could not (execute|create) a primitive|(cuda|cuda( driver)? error:|triton error \[cuda\]:) out of memory"
    r"|cuda failure (2 )?'out of memory'|_alloc_failed|_allocation_failed|cublas_status_not_initialized",
    re.IGNORECASE,
)

# Errors of CUDA (cudaGetErrorString) that are a device's, its driver's or other processes': another process has the
# device to itself, it is lost (unknown error), or a client's fault has ended the server of MPS.
_DEVICE_FAILED = re.compile(
    "machineerror: |busy or unavailable|cuda error: unknown error|no cuda-capable device is detected|gpu is lost"
    "|mps (client|server)|uncorrectable (ecc|nvlink) error|or a hardware error|system not yet initialized",
    re.IGNORECASE,
)

# Last words of processes that end without an exception, seen under the same limit.
_DIED_OF_MEMORY = re.compile(
    "libgomp: thread creation failed: resource temporarily unavailable"
    "|cannot allocate memory for thread-local data: abort|throwing an instance of 'std::bad_alloc'",
    re.IGNORECASE,
)

# torch's CUDA allocator says '2.00 GiB', the one of the CPU '8388608 bytes', numpy 'Unable to allocate 2.00 GiB'.
_ASKED = re.compile(r"(?:tried|unable) to allocate ([\d.]+ [KMGT]iB|\d+ bytes)", re.IGNORECASE)

OUTCOMES: TypeAdapter[Outcome] = TypeAdapter(Outcome)

# Words of gloo, NCCL and torch when the other end of a connection is gone.
_LOST_PEER = re.compile(
    "connection (closed by peer|reset by peer|was likely closed|refused)|broken pipe|socket timeout"
    "|remote process exited|nccl communicator was aborted|distnetworkerror|distbackenderror",
    re.IGNORECASE,
)


class Ending(NamedTuple):
    """How a trial's processes ended."""

    returncodes: Sequence[int | None] = ()  # of each process; None: it could not be ended; empty: nobody saw
    timed_out: bool = False
    launcher_died: bool = False
    host_oom: bool = False  # the host's out-of-memory killer ended some process meanwhile
    failed_at: Sequence[float | None] = ()  # when each rank was noticed to have failed by itself; None: it hasn't


def outcome_file(rank: int = 0) -> str:
    return f"rank-{rank}.json"


def log_file(rank: int = 0) -> str:
    return f"log-{rank}.txt" if rank else "log.txt"


def has_failed(outcome: Path, has_ended: bool) -> bool:
    try:
        return bool(json.loads(outcome.read_bytes())["kind"] == "failure")
    except (OSError, ValueError, TypeError, KeyError) as error:
        return has_ended or not isinstance(error, FileNotFoundError)


def merged_outcome(directory: Path, ending: Ending, request: TrialRequest) -> Outcome:
    if request.ranks is None:
        return outcome_of(directory, ending, request)
    ranks = range(1) if is_rehearsal() else request.ranks
    outcomes = {rank: outcome_of(directory, ending, request, rank=rank) for rank in ranks}
    measurements = [outcome for outcome in outcomes.values() if isinstance(outcome, Measurement)]
    if len(measurements) == len(outcomes):
        return _merged(measurements, request)
    failures = {rank: outcome for rank, outcome in outcomes.items() if isinstance(outcome, Failure)}
    noticed = {rank: ending.failed_at[rank - ranks.start] if ending.failed_at else None for rank in failures}
    culprits = [r for r, f in failures.items() if noticed[r] is not None and not _lost_peer(f)] or list(failures)
    rank = min(culprits, key=lambda rank: (math.inf if (at := noticed[rank]) is None else at, rank))
    failure = failures[rank]
    if ending.launcher_died or failure.status is TrialStatus.TIMED_OUT:
        return failure
    return failure.model_copy(update={"cause": f"rank {rank}: {failure.cause}"})


def outcome_of_nodes(outcomes: Mapping[int, Outcome], request: TrialRequest) -> Outcome:
    """Return the outcome of a trial on several nodes from that of each, by its rank, in the order of their ends.

    Some may be missing: the nodes that would have waited for one that had failed.
    """
    failures = [outcome for outcome in outcomes.values() if isinstance(outcome, Failure)]
    if not failures:
        return _merged([found for _, found in sorted(outcomes.items()) if isinstance(found, Measurement)], request)
    return next((failure for failure in failures if not _lost_peer(failure)), failures[0])


def _lost_peer(failure: Failure) -> bool:
    """Return whether a rank failed because another one had."""
    return failure.status is TrialStatus.CRASHED and _LOST_PEER.search(failure.cause) is not None


def recovered(directory: Path) -> TrialResult | None:
    """Return the result of a trial that had ended when the search was killed, but wasn't written; None of others."""
    # Its start and end are the times of its files. A crash isn't recovered: the end of the search may have caused it.
    try:
        request = read_value(TrialRequest, directory / "request.json")
        began = (directory / "request.json").stat().st_mtime
        ended = max((directory / outcome_file(rank)).stat().st_mtime for rank in request.ranks or (0,))
    except (OSError, ValidationError):
        return None
    if request.number != int(directory.name):  # a copy of another's folder
        return None
    outcome = merged_outcome(directory, Ending(), request)
    result = TrialResult(request=request, outcome=outcome, duration_s=max(0.0, ended - began), began=began)
    return None if result.status is TrialStatus.CRASHED or result.is_excused else result


def outcome_of(directory: Path, ending: Ending, request: TrialRequest, *, rank: int = 0) -> Outcome:
    log = read_tail(directory / log_file(rank), lines=1000, size=1 << 16)  # tracebacks may follow the cause
    try:
        outcome = OUTCOMES.validate_json((directory / outcome_file(rank)).read_bytes())
    except FileNotFoundError:
        first = 0 if request.ranks is None else request.ranks.start
        code = ending.returncodes[rank - first] if ending.returncodes else None
        # Python's faulthandler has ended the process, which kept the token of those that run in turn (`token_ring`).
        if code == 1 and request.in_turn_with and re.search(r"^Timeout \(\d+:\d\d:\d\d[.\d]*\)!$", log, re.MULTILINE):
            cause = "a step took too long, and kept the others that ran in turn waiting; its log has the stack"
            return Failure(status=TrialStatus.TIMED_OUT, cause=cause)
        return _death(ending, code, request, log)
    except (OSError, ValidationError):
        return Failure(status=TrialStatus.CRASHED, cause="the trial's outcome file is garbage")
    if isinstance(outcome, Measurement):
        peak, budget = outcome.memory.peak_bytes, request.limits.memory_bytes
        if peak <= budget:  # no cap covers paged states, which are judged here alone
            return outcome
        cause = f"peaked at {show_memory(peak)}, beyond the budget of {show_memory(budget)}"
        return Failure(status=TrialStatus.OUT_OF_MEMORY, cause=cause, memory=outcome.memory)
    if outcome.status is TrialStatus.CRASHED and _DIED_OF_MEMORY.search(log):
        # A data-loader worker says so on its way out; the trial only sees that it is gone.
        return outcome.model_copy(update={"status": TrialStatus.OUT_OF_MEMORY})
    return outcome


def _death(ending: Ending, code: int | None, request: TrialRequest, log: str) -> Failure:
    if code is not None and code < 0:
        names = {int(number): number.name for number in signal.Signals}  # real-time signals have none
        how = cause = f"killed by {names.get(-code, f'signal {-code}')}"
    else:
        how = "it could not be ended" if code is None else f"exit code {code}"
        cause = f"ended without a result ({how})"
    status = TrialStatus.CRASHED
    # csrc/ops.cuh: bitsandbytes prints this before it leaves the process by exit(1), no exception raised.
    last = "\n".join(log.splitlines()[-15:])
    ran_short = code == 1 and re.search(r"^Error out of memory at line \d+ in file ", last, re.MULTILINE)
    if ending.timed_out:
        status, cause = TrialStatus.TIMED_OUT, f"no result within {request.limits.timeout_s:.0f} s"
    elif ending.launcher_died:
        cause = "the process that runs trials died with it"
    elif code == -signal.SIGKILL and ending.host_oom:
        status, cause = TrialStatus.OUT_OF_MEMORY, "killed by the host's out-of-memory killer"
    elif ran_short or _DIED_OF_MEMORY.search(log):
        status, cause = TrialStatus.OUT_OF_MEMORY, f"died of a failed allocation ({how})"
    is_devices = status is TrialStatus.CRASHED and _DEVICE_FAILED.search(log) is not None
    return Failure(status=status, cause=cause, device_failed=is_devices)


def speed_of(step_times_s: Sequence[float], request: TrialRequest) -> dict[str, Any]:
    samples = request.workload.samples_per_step(request.config)
    return {
        "step_times_s": tuple(step_times_s),
        "samples_per_second": samples / statistics.fmean(step_times_s),
        "samples_per_second_interval": rate_interval(list(step_times_s), samples),
    }


def _merged(ranks: Sequence[Measurement], request: TrialRequest) -> Outcome:
    first = ranks[0]
    for number, rank in enumerate(ranks):
        for knob, seen in first.effects.items():
            if rank.effects.get(knob) != seen:
                cause = f"rank 0 ran with {knob} {seen}, rank {number} with {rank.effects.get(knob)}"
                return Failure(status=TrialStatus.INVALID, cause=cause)
        if len(rank.step_times_s) != len(first.step_times_s):
            cause = f"rank 0 measured {len(first.step_times_s)} steps, rank {number} {len(rank.step_times_s)}"
            return Failure(status=TrialStatus.CRASHED, cause=cause)
    longest = {name: highest(ranks, name) for name in ("startup_s", "first_step_s", "data_wait_share", "alloc_retries")}
    losses = [rank.loss for rank in ranks if rank.loss is not None]
    return first.model_copy(
        update={
            **speed_of(max((rank.step_times_s for rank in ranks), key=sum), request),
            **longest,
            "memory": Memory.worst_of([rank.memory for rank in ranks]),
            "loss": statistics.fmean(losses) if losses else None,
            "warnings": tuple(dict.fromkeys(line for rank in ranks for line in rank.warnings)),
            "conditions": Conditions.worst_of([rank.conditions for rank in ranks if rank.conditions is not None]),
        }
    )


def host_oom_kills(vmstat: Path = Path("/proc/vmstat")) -> int:
    with contextlib.suppress(OSError):
        for line in vmstat.read_text().splitlines():
            if line.startswith("oom_kill "):
                return int(line.split()[1])
    return 0


def _is_one(error: BaseException | None, words: re.Pattern[str]) -> bool:
    """Return whether `error`, or one that caused it, has these words in its name or message."""
    chain: dict[int, str] = {}
    while error is not None and id(error) not in chain:
        chain[id(error)] = f"{type(error).__name__}: {error}"
        error = error.__cause__ or error.__context__
    return any(map(words.search, chain.values()))


def is_out_of_memory(error: BaseException) -> bool:
    return _is_one(error, _ALLOCATION_FAILED)


def is_of_device(error: BaseException) -> bool:
    return _is_one(error, _DEVICE_FAILED)


def first_line(error: BaseException) -> str:
    """Return the first line of an error; of a failed allocation, how much was asked for."""
    text = str(error).strip()
    if (asked := _ASKED.search(text)) is not None:
        amount = asked[1]
        return f"{show_memory(int(amount.split()[0])) if amount.endswith('bytes') else amount} were asked for"
    worded = (line for line in text.splitlines() if any(map(str.isalnum, line)))  # some libraries frame their messages
    return textwrap.shorten(next(worded, type(error).__name__), 200, placeholder=" ...")


def asked_bytes(error: BaseException) -> int:
    """Return how much a failed allocation asked for; 0: it doesn't say."""
    asked = _ASKED.search(str(error))
    return parse_memory(asked[1].removesuffix(" bytes")) if asked is not None else 0


def shortage(error: BaseException, in_use_bytes: int | None, budget_bytes: int) -> str:
    said = first_line(error)
    if "budget" in said:
        return said
    in_use = "" if in_use_bytes is None else f" with {show_memory(in_use_bytes)} in use"
    return f"{said}{in_use}; the budget is {show_memory(budget_bytes)}"


def read_tail(path: Path, *, lines: int, size: int = 8192) -> str:
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - size))
            text = file.read().decode("utf-8", errors="replace")
    except OSError:
        return ""
    plain = text.replace("\r", "\n").replace("\t", "    ")  # a progress bar returns to the start of its line
    printable = "".join(c if c.isprintable() or c == "\n" else "\N{REPLACEMENT CHARACTER}" for c in plain)
    return "\n".join([line for line in printable.split("\n") if line.strip()][-lines:])
