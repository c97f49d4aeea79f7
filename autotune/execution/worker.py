"""What happens inside a trial's process: train a few steps, and write the outcome.

Entered by `launch` once per process, which may be one of several ranks (see `ranks`). Whatever goes wrong becomes a
:class:`Failure` in the outcome file of that rank; a process that dies without one is judged by `outcome`.
"""

from __future__ import annotations

import traceback
from contextlib import nullcontext, suppress
from pathlib import Path

from autotune.errors import AutotuneError, NoEffectError
from autotune.execution.environment import choose_segments, cold_compile_cache, trial_device
from autotune.execution.failures import asked_bytes, first_line, is_out_of_memory, shortage
from autotune.execution.guard import MemoryGuard, memory_guard
from autotune.execution.outcome import outcome_file
from autotune.execution.ranks import meet, own_rank
from autotune.execution.token_ring import Turns
from autotune.value import read_value, write_value
from autotune.values.time_spent import Stopwatch
from autotune.values.trial import Failure, Outcome, Phases, TrialRequest, TrialStatus


def run_trial(directory: Path) -> None:
    """Run the request in `directory` and write the outcome beside it."""
    request = read_value(TrialRequest, directory / "request.json")
    if (turns := Turns.here(request.limits.timeout_s)) is not None:
        turns.begin()
    stopwatch, rank = Stopwatch("prepare_s"), own_rank().number
    with cold_compile_cache(directory, rank) if request.cold_compile else nullcontext():
        outcome = _guarded(request, directory, stopwatch, turns)
    laps = {**stopwatch.laps(), **({"waited_s": turns.waited_s} if turns is not None else {})}
    outcome = outcome.model_copy(update={"phases": Phases(**laps)})
    write_value(outcome, directory / outcome_file(rank))


def _guarded(request: TrialRequest, directory: Path, stopwatch: Stopwatch, turns: Turns | None) -> Outcome:
    """Run the trial under its memory budget and turn every error into a failure."""
    device, workload = trial_device(request.device), request.workload
    guard = memory_guard(device, request.limits.memory_bytes)
    try:
        import torch

        if device != "cpu":
            choose_segments(request.config.expandable_segments)
        torch.manual_seed(workload.seed)
        meet(device, timeout_s=request.limits.timeout_s)
        with guard:
            from autotune.execution.trial import Trial, run_named_model, run_user_code

            trial = Trial.begun(request, directory, stopwatch, guard, turns)
            if workload.own_step is not None:
                from autotune.execution.loop import run_steps

                return run_steps(trial, workload.own_step)
            if workload.own_code is not None:
                return run_user_code(trial, workload.own_code)
            return run_named_model(trial)
    except Exception as error:
        return _failure(error, guard, request.limits.memory_bytes)


def _failure(error: Exception, guard: MemoryGuard, budget_bytes: int) -> Failure:
    traceback.print_exc()  # into the trial's log
    memory, in_use = None, None
    with suppress(Exception):  # after a device error every question raises another
        memory, in_use = guard.peak(), guard.in_use_bytes()
    if is_out_of_memory(error):
        status, cause = TrialStatus.OUT_OF_MEMORY, shortage(error, in_use, budget_bytes)
        with suppress(Exception):
            if guard.is_crowded_out(asked_bytes(error)):
                cause = f"other processes hold memory of the device that the budget counts on: {cause}"
                return Failure(status=status, cause=cause, memory=memory, crowded_out=True)
    elif isinstance(error, NoEffectError | AutotuneError):
        status, cause = TrialStatus.INVALID, (str(error).strip() or type(error).__name__).splitlines()[0][:300]
    else:
        status, cause = TrialStatus.CRASHED, f"{type(error).__name__}: {first_line(error)}"
    return Failure(status=status, cause=cause, memory=memory)
