"""A trial as its process sees it, and its measured training by a Trainer, whoever has made that (`trainer_setup`)."""

from __future__ import annotations

import contextlib
import json
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, Self

from autotune.execution import checking, noise
from autotune.execution.effects import EffectsProbe
from autotune.execution.environment import trial_device
from autotune.execution.guard import MemoryGuard
from autotune.execution.job import PROCESS_FILE
from autotune.execution.measure import EXTRA_DISCARDED_STEPS, StepTimer, measurement_of
from autotune.execution.noise import CudaClock, HostClock
from autotune.execution.ranks import agree, own_rank
from autotune.execution.token_ring import Turns
from autotune.training.batches import STEPS_TO_PEAK
from autotune.values.budget import LossTask, SoakTask
from autotune.values.time_spent import Stopwatch
from autotune.values.trial import Failure, Outcome, TrialRequest, TrialStatus

# An fp16 scaler starts at 2^16 and halves at each overflow: it may skip that many steps before the first real one.
_SCALER_STEPS = 17

# Kept of a trial's time limit for what follows the measured steps: seconds, and the share of a short limit.
_CLOSING_S, _CLOSING_SHARE = 2.0, 0.1


class Trial(NamedTuple):
    """A request, and what its process has to answer it."""

    request: TrialRequest
    directory: Path
    stopwatch: Stopwatch
    guard: MemoryGuard
    timer: StepTimer

    @classmethod
    def begun(
        cls,
        request: TrialRequest,
        directory: Path,
        stopwatch: Stopwatch,
        guard: MemoryGuard,
        turns: Turns | None = None,
    ) -> Self:
        """Return the trial with the timer of its steps, which decides how many there are."""
        on_cpu, task, limits = request.device == "cpu", request.task, request.limits
        if task is None:
            # The longest samples, where they differ, are no part of what is timed.
            differ = request.workload.lengths is not None or request.workload.dataset is not None
            least = max(limits.discarded_steps, STEPS_TO_PEAK if differ else 1)
            limits = limits.model_copy(update={"discarded_steps": least})
        timer = StepTimer(
            limits,
            request.accumulation_steps,
            request.workload.accumulation_steps(request.config),
            clock=HostClock() if on_cpu else CudaClock(),
            started_at=stopwatch.started_at,
            ends_at=_ends_at(request, directory, stopwatch) if task is None else math.inf,
            stopwatch=stopwatch,
            watch=noise.watch(trial_device(request.device), ranks=own_rank().is_launched or turns is not None),
            afterwards="closing_s" if task is None else "check_s",
            # A soak looks at memory to its very end, and the losses of a loss run are what counts of it.
            relax=guard.relax if (on_cpu or turns) and not isinstance(task, SoakTask | LossTask) else None,
            step_ended=guard.step_ended,
            retries=guard.retries,
            agree=agree,
            turns=turns,
        )
        return cls(request, directory, stopwatch, guard, timer)

    @property
    def device(self) -> str:
        """The torch device of this process."""
        return trial_device(self.request.device)

    @property
    def data_directory(self) -> Path:
        """Where tokenized rows and pickled code lie, shared by all trials: <run>/data beside <run>/trials/NNNN."""
        return self.directory.parent.parent / "data"

    @property
    def max_steps(self) -> int:
        """The optimizer steps that it can need."""
        limits = self.request.limits
        return limits.discarded_steps + EXTRA_DISCARDED_STEPS + limits.measure_steps + _SCALER_STEPS

    @property
    def samples_per_step(self) -> int:
        """The samples of a step as it is run, those of all ranks: each reads every n-th of their batches."""
        config = self.request.config
        return self.request.accumulation_steps * config.per_device_train_batch_size * config.parallelism.data_parallel

    def not_trainable(self, cause: str) -> Failure:
        """Return the failure of a training whose steps are of no use."""
        return Failure(status=TrialStatus.INVALID, cause=cause, memory=self.guard.peak())

    def diverged(self, loss: float) -> Failure:
        """Return the failure of a training whose loss is no number."""
        return self.not_trainable(f"the loss became {loss}: not trainable like this")


def _ends_at(request: TrialRequest, directory: Path, stopwatch: Stopwatch) -> float:
    """Return when measuring has to end, so that a trial that is no check leaves its steps before it is killed.

    A process that isn't forked imports the libraries before the stopwatch begins, after its job has written a file.
    """
    limit_s, importing_s = request.limits.timeout_s, 0.0
    with contextlib.suppress(OSError, ValueError, KeyError):
        launched_s = time.monotonic() - json.loads((directory / PROCESS_FILE).read_bytes())["at"]
        importing_s = max(0.0, launched_s - (time.perf_counter() - stopwatch.started_at))
    return stopwatch.started_at - importing_s + limit_s - min(_CLOSING_S, _CLOSING_SHARE * limit_s)


def trained(
    trial: Trial, probe: EffectsProbe, trainer: Any, train: Callable[[], Any], reading: checking.Reading
) -> Outcome:
    """Train until the timer has enough, check what is to be checked, and return what was measured.

    `train` trains the Trainer, watched by the callbacks timer and `probe`; `reading` says how it reads samples.
    """
    request, timer, guard = trial.request, trial.timer, trial.guard
    losses = watch_losses(trainer)
    with checking.around_training(request.task, trainer, not_saved=reading.not_saved):
        loss = float(train().training_loss)
    effects = probe.verify(trainer)
    if not math.isfinite(total := losses()):
        return trial.diverged(total)
    if not timer.step_times_s():
        return trial.not_trainable(f"the loss scaler skipped the first {_SCALER_STEPS} steps and more")
    guard.check()
    found = checking.findings(request.task, trainer, reading, guard)
    found["padding_share"] = reading.padding_share(trainer.state.global_step)
    measurement = measurement_of(
        request, timer, guard.peak(), loss=loss, effects=effects, data_wait_share=timer.data_wait_share()
    )
    if timer.stopped_at is not None:
        own = (type(c) for c in trainer.callback_handler.callbacks)
        names = [kind.__name__ for kind in own if not kind.__module__.startswith(("transformers.", "autotune."))]
        said = (
            f"a callback of your code ({' or '.join(names)}) ends training after step {timer.stopped_at}; trials go on"
        )
        found["warnings"] = (*measurement.warnings, said)
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
