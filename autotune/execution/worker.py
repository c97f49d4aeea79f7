"""What happens inside a trial's process: build, train a few steps with the real Trainer, write the outcome.

Entered by `launch` in a forked child, once per process, which may be one of several ranks (see `ranks`). Whatever goes
wrong becomes a :class:`Failure` in the outcome file of that rank; a process that dies without one is judged by the
runner.
"""

from __future__ import annotations

import functools
import math
import traceback
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from autotune.errors import AutotuneError
from autotune.execution.environment import cold_compile_cache
from autotune.execution.guard import MemoryGuard, memory_guard
from autotune.execution.outcome import outcome_file
from autotune.execution.ranks import agree, meet, own_rank
from autotune.execution.shortage import first_line, is_out_of_memory, shortage
from autotune.execution.trainer_setup import (
    SCALER_STEPS,
    device_of,
    longest_first_of,
    most_steps,
    padding_share_of,
    trainer_of,
)
from autotune.value import read_value, write_value
from autotune.values.checks import LossTask, SoakTask
from autotune.values.hardware import detect
from autotune.values.stopwatch import Stopwatch
from autotune.values.trial import Failure, Memory, Outcome, Phases, TrialRequest, TrialStatus

if TYPE_CHECKING:
    from autotune.execution.checking import Reading
    from autotune.execution.effects import EffectsProbe
    from autotune.execution.measure import StepTimer


class _Refused(Exception):
    """A library refuses the configuration before training starts."""


def run_trial(directory: Path) -> None:
    """Run the request in `directory` and write the outcome beside it."""
    stopwatch, rank = Stopwatch("prepare_s"), own_rank().number
    request = read_value(TrialRequest, directory / "request.json")
    with cold_compile_cache(directory, rank) if request.cold_compile else nullcontext():
        outcome = _guarded(request, directory, stopwatch)
    outcome = outcome.model_copy(update={"phases": Phases(**stopwatch.laps())})
    write_value(outcome, directory / outcome_file(rank))


def _guarded(request: TrialRequest, directory: Path, stopwatch: Stopwatch) -> Outcome:
    """Run the trial under its memory budget and turn every error into a failure."""
    device = device_of(request)
    guard = memory_guard(device, request.limits.memory_bytes)
    try:
        import torch

        torch.manual_seed(request.workload.seed)
        meet(device, timeout_s=request.limits.timeout_s)
        with guard:
            return _measure(request, directory, stopwatch, guard)
    except Exception as error:
        return _failure(error, guard, request.limits.memory_bytes)


def _failure(error: Exception, guard: MemoryGuard, budget_bytes: int) -> Failure:
    from autotune.errors import NoEffectError

    traceback.print_exc()  # into the trial's log
    memory, in_use = _memory_of(guard)
    if is_out_of_memory(error):
        status, cause = TrialStatus.OUT_OF_MEMORY, shortage(error, in_use, budget_bytes)
    elif isinstance(error, NoEffectError | _Refused | AutotuneError):
        status, cause = TrialStatus.INVALID, (str(error).strip() or type(error).__name__).splitlines()[0][:300]
    else:
        status, cause = TrialStatus.CRASHED, f"{type(error).__name__}: {first_line(error)}"
    return Failure(status=status, cause=cause, memory=memory)


def _memory_of(guard: MemoryGuard) -> tuple[Memory | None, int | None]:
    """Return the peak and what is in use; after a device error every question raises another."""
    try:
        return guard.peak(), guard.in_use_bytes()
    except Exception:
        return None, None


def _measure(request: TrialRequest, directory: Path, stopwatch: Stopwatch, guard: MemoryGuard) -> Outcome:
    timer = _timer(request, stopwatch, guard)
    if request.workload.own_step is not None:
        from autotune.execution.user_steps import run_steps

        return run_steps(request, request.workload.own_step, directory, timer, stopwatch, guard)
    return _with_trainer(request, directory, timer, stopwatch, guard)


def _timer(request: TrialRequest, stopwatch: Stopwatch, guard: MemoryGuard) -> StepTimer:
    from autotune.execution import noise
    from autotune.execution.measure import CudaClock, HostClock, StepTimer

    return StepTimer(
        request.limits,
        request.accumulation_steps,
        request.workload.accumulation_steps(request.config),
        clock=HostClock() if request.device == "cpu" else CudaClock(),
        started_at=stopwatch.started_at,
        stopwatch=stopwatch,
        watch=noise.watch(device_of(request), ranks=own_rank().is_launched),
        afterwards="closing_s" if request.task is None else "check_s",
        # A soak looks at memory to its very end, and the losses of a loss run are what counts of it.
        relax=guard.relax if request.device == "cpu" and not isinstance(request.task, SoakTask | LossTask) else None,
        step_ended=guard.step_ended,
        retries=guard.retries,
        agree=agree,
    )


def _with_trainer(
    request: TrialRequest, directory: Path, timer: StepTimer, stopwatch: Stopwatch, guard: MemoryGuard
) -> Outcome:
    """Train with the real Trainer, ours or that of the user's own code, until the timer has enough."""
    from autotune.execution.checking import Reading
    from autotune.execution.effects import EffectsProbe

    code = request.workload.own_code
    probe = EffectsProbe(
        request.config, detect(device_of(request)), theirs=frozenset(code.held) if code is not None else frozenset()
    )
    watching = _Watching(timer, probe, guard)
    if code is not None:
        from autotune.execution.user_trial import run_own

        stopwatch.enter("trainer_s")
        return run_own(
            request,
            code,
            directory,
            device=device_of(request),
            max_steps=most_steps(request),
            callbacks=[probe, timer],
            measure=functools.partial(_trained, request, watching),
        )
    try:
        trainer = trainer_of(request, directory, [probe, timer], stopwatch)
    except (ValueError, ImportError, TypeError) as error:
        if is_out_of_memory(error):
            raise
        raise _Refused(f"{type(error).__name__}: {error}") from error
    longest = longest_first_of(request, directory, trainer.model.config)
    reading = Reading(longest, lambda steps: padding_share_of(request, trainer, steps))
    return _trained(request, watching, trainer, trainer.train, reading)


class _Watching(NamedTuple):
    """What watches a training."""

    timer: StepTimer
    probe: EffectsProbe
    guard: MemoryGuard


def _trained(
    request: TrialRequest, watching: _Watching, trainer: Any, train: Callable[[], Any], reading: Reading
) -> Outcome:
    """Train, check what is to be checked, and return what was measured."""
    from autotune.execution import checking
    from autotune.execution.measure import measurement_of

    timer, probe, guard = watching
    losses = watch_losses(trainer)
    with checking.around_training(request.task, trainer, not_saved=reading.not_saved) as found:
        loss = float(train().training_loss)
    effects = probe.verify(trainer, trainer.model)
    if not math.isfinite(total := losses()):
        return Failure(
            status=TrialStatus.INVALID,
            cause=f"the loss became {total}: not trainable like this",
            memory=guard.peak(),
        )
    if not timer.step_times_s():
        return Failure(
            status=TrialStatus.INVALID,
            cause=f"the loss scaler skipped the first {SCALER_STEPS} steps and more",
            memory=guard.peak(),
        )
    guard.check()
    found.update(checking.findings(request.task, trainer, reading.longest, guard))
    found["padding_share"] = reading.padding_share(trainer.state.global_step)
    measurement = measurement_of(
        request, timer, guard.peak(), loss=loss, effects=effects, data_wait_share=timer.data_wait_share()
    )
    return measurement.model_copy(update=found)


def watch_losses(trainer: Any) -> Callable[[], float]:
    """Add up what `trainer.training_step` returns from now on; return what reads the sum, NaN or Inf if one loss was.

    The Trainer's own filter leaves such losses out of what it logs. The sum stays on the device, in fp32, so that
    nothing waits for it before training is over.
    """
    original, total = trainer.training_step, [0.0]

    def training_step(*args: Any, **kwargs: Any) -> Any:
        loss = original(*args, **kwargs)
        total[0] += loss.float()
        return loss

    trainer.training_step = training_step
    return lambda: float(total[0])
