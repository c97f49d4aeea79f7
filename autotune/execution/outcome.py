"""Says how a trial ended, from what it left behind: its outcome file first, then its exit code, signal and log.

Of several ranks, each has left its own; `merging` makes one of them.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from pydantic import TypeAdapter, ValidationError

from autotune.execution.guard import is_out_of_memory_log
from autotune.execution.logtail import read_tail
from autotune.execution.outcome_files import log_file, outcome_file
from autotune.units import show_memory
from autotune.values.trial import Failure, Measurement, Outcome, TrialRequest, TrialStatus

OUTCOME_FILE, LOG_FILE = outcome_file(), log_file()

_OUTCOMES: TypeAdapter[Outcome] = TypeAdapter(Outcome)
_DEEP_LINES, _DEEP_BYTES = 1000, 1 << 16  # where a library's last words are looked for, tracebacks coming after them

# csrc/ops.cuh: what bitsandbytes prints before it leaves the process by exit(1), no exception raised.
_BITSANDBYTES_OUT_OF_MEMORY = re.compile(r"^Error out of memory at line \d+ in file ", re.MULTILINE)


class Ending(NamedTuple):
    """How a trial's process ended."""

    returncode: int | None = None  # None: it could not be ended, or nobody was left to see it
    timed_out: bool = False
    launcher_died: bool = False
    host_oom: bool = False  # the host's out-of-memory killer ended some process meanwhile
    unkillable: int = 0  # processes that a driver holds in the kernel
    returncodes: Sequence[int | None] = ()  # of each rank, of a trial of several
    failed_at: Sequence[float | None] = ()  # when each rank was noticed to have failed by itself; None: it hasn't


def outcome_of(directory: Path, ending: Ending, request: TrialRequest, *, rank: int = 0) -> Outcome:
    """Return the own outcome of a trial's process, or what its end without one means."""
    path, log = directory / outcome_file(rank), directory / log_file(rank)
    tail, out_of_memory = read_tail(log), _is_out_of_memory(log)
    try:
        outcome = _OUTCOMES.validate_json(path.read_bytes())
    except FileNotFoundError:
        return _death(ending, request, tail, out_of_memory=out_of_memory)
    except (OSError, ValidationError):
        return Failure(status=TrialStatus.CRASHED, cause="the trial's outcome file is garbage", log_tail=tail)
    if isinstance(outcome, Measurement):
        return _within_budget(outcome, request)
    if outcome.status is TrialStatus.CRASHED and out_of_memory:
        # A data-loader worker says so on its way out; the trial itself only sees it gone.
        outcome = outcome.model_copy(update={"status": TrialStatus.OUT_OF_MEMORY})
    return outcome.model_copy(update={"log_tail": tail})


def _is_out_of_memory(log: Path) -> bool:
    return is_out_of_memory_log(read_tail(log, lines=_DEEP_LINES, size=_DEEP_BYTES))


def _within_budget(outcome: Measurement, request: TrialRequest) -> Outcome:
    """Return a measurement that kept the budget; memory that no cap covers (paged states) is seen only here."""
    budget = request.limits.memory_bytes
    if outcome.memory.peak_bytes <= budget:
        return outcome
    cause = f"peaked at {show_memory(outcome.memory.peak_bytes)}, beyond the budget of {show_memory(budget)}"
    return Failure(status=TrialStatus.OUT_OF_MEMORY, cause=cause, memory=outcome.memory)


def _death(ending: Ending, request: TrialRequest, tail: str, *, out_of_memory: bool) -> Failure:
    status = TrialStatus.CRASHED
    if ending.timed_out:
        status, cause = TrialStatus.TIMED_OUT, f"no result within {request.limits.timeout_s:.0f} s"
    elif ending.launcher_died:
        cause = "the process that runs trials died with it"
    elif ending.returncode == -signal.SIGKILL and ending.host_oom:
        status, cause = TrialStatus.OUT_OF_MEMORY, "killed by the host's out-of-memory killer"
    elif out_of_memory or (ending.returncode == 1 and _BITSANDBYTES_OUT_OF_MEMORY.search(tail)):
        status, cause = TrialStatus.OUT_OF_MEMORY, f"died of a failed allocation ({_exit(ending.returncode)})"
    elif ending.returncode is not None and ending.returncode < 0:
        cause = _exit(ending.returncode)
    else:
        cause = f"ended without a result ({_exit(ending.returncode)})"
    return Failure(status=status, cause=cause, log_tail=tail)


def _exit(returncode: int | None) -> str:
    if returncode is None:
        return "it could not be ended"
    if returncode >= 0:
        return f"exit code {returncode}"
    try:
        return f"killed by {signal.Signals(-returncode).name}"
    except ValueError:  # a real-time signal
        return f"killed by signal {-returncode}"


def host_oom_kills(vmstat: Path = Path("/proc/vmstat")) -> int:
    """Return how many processes the host's out-of-memory killer has ended since boot."""
    try:
        for line in vmstat.read_text().splitlines():
            if line.startswith("oom_kill "):
                return int(line.split()[1])
    except OSError:
        pass
    return 0
