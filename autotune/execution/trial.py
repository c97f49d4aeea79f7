"""A trial as its process sees it, and its measured training: that of a Trainer, or the steps of a user's own loop.

:func:`trained` is the same for every Trainer (`trainer_setup`). Of a loop of their own, the user's function sets up
model, data and optimizer for a configuration and returns a function that does one whole optimizer step; it is timed as
the Trainer's steps are. Memory guard, clock, limits and phases are those of every trial. What is inside a step can't be
seen: all its micro-batches are run, its wait for data isn't measured, and whether a knob took effect is taken on trust.
"""

from __future__ import annotations

import contextlib
import inspect
import json
import math
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple, Self

from autotune.errors import InputError
from autotune.execution import checking, noise
from autotune.execution.effects import EffectsProbe
from autotune.execution.environment import trial_device
from autotune.execution.failures import is_out_of_memory
from autotune.execution.guard import MemoryGuard
from autotune.execution.job import PROCESS_FILE
from autotune.execution.measure import EXTRA_DISCARDED_STEPS, StepTimer, measurement_of
from autotune.execution.noise import CudaClock, HostClock
from autotune.execution.ranks import agree, own_rank
from autotune.execution.turns import Turns
from autotune.execution.user_overlay import unpickled
from autotune.training.batches import STEPS_TO_PEAK
from autotune.values.budget import LossTask, SoakTask
from autotune.values.config import TrainConfig
from autotune.values.time_spent import Stopwatch
from autotune.values.trial import Failure, Outcome, TrialRequest, TrialStatus
from autotune.values.workload import ACCUMULATION, STEP_FILE, OwnStep

# An fp16 scaler starts at 2^16 and halves at each overflow: it may skip that many steps before the first real one.
_SCALER_STEPS = 17

# Kept of a trial's time limit for what follows the measured steps: seconds, and the share of a short limit.
_CLOSING_S, _CLOSING_SHARE = 2.0, 0.1


Step = Callable[[], Any]


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
    with checking.around_training(request.task, trainer, not_saved=reading.not_saved) as found:
        loss = float(train().training_loss)
    effects = probe.verify(trainer)
    if not math.isfinite(total := losses()):
        return trial.diverged(total)
    if not timer.step_times_s():
        return trial.not_trainable(f"the loss scaler skipped the first {_SCALER_STEPS} steps and more")
    guard.check()
    found.update(checking.findings(request.task, trainer, reading, guard))
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


def run_steps(trial: Trial, own: OwnStep) -> Outcome:
    """Set the user's training up and run its steps until enough is known."""
    request, timer = trial.request, trial.timer
    trial.stopwatch.enter("model_s")
    step = set_up(own, request.config, request.accumulation_steps, trial.data_directory / STEP_FILE)
    trial.stopwatch.enter("trainer_s")
    losses = [float(loss) for loss in _train(step, timer) if loss is not None]
    loss = statistics.fmean(losses) if losses else None
    if loss is not None and not math.isfinite(loss):
        return trial.diverged(loss)
    trial.guard.check()
    return measurement_of(request, timer, trial.guard.peak(), loss=loss, effects={}, data_wait_share=None)


def set_up(own: OwnStep, config: TrainConfig, accumulation_steps: int, file: Path) -> Step:
    """Return the step that the user's function makes, in the place where it was handed over.

    Raises:
        InputError: The function can't be loaded, refuses the configuration, or returns no function.
    """
    sys.path.extend(entry for entry in own.search_path if entry not in sys.path)
    if Path(own.directory).is_dir():
        os.chdir(own.directory)
    make = unpickled(file, own.sha256, own.name)
    more = {ACCUMULATION: accumulation_steps} if own.takes_accumulation else {}
    try:
        step = make(config, **more)
    except (ValueError, NotImplementedError) as error:  # its way to say that it can't do this
        if is_out_of_memory(error):
            raise
        raise InputError(f"{own.name} refuses it: {error}") from error
    if not callable(step):
        raise InputError(
            f"{own.name} returned {type(step).__name__}; it has to return a function that does one optimizer step"
        )
    if inspect.iscoroutinefunction(step) or inspect.isgeneratorfunction(step):
        raise InputError(f"{own.name} returned a generator or coroutine, whose call does nothing; return a function")
    return step  # type: ignore[no-any-return]


def _train(step: Step, timer: StepTimer) -> list[Any]:
    """Run steps until the timer has enough; return what each says of its loss."""
    # The timer looks at nothing of a Trainer but the number of the step, and whether training is to stop.
    state, control = SimpleNamespace(global_step=0), SimpleNamespace(should_training_stop=False)
    losses = []
    while not control.should_training_stop:
        timer.on_step_begin(None, state, control)
        losses.append(_loss(loss_and_samples(step())[0]))
        state.global_step += 1
        timer.on_step_end(None, state, control)
    timer.on_train_end(None, state, control)
    return losses


def loss_and_samples(returned: Any) -> tuple[Any, int | None]:
    """Return what a step says of its loss and, if it returned (loss, samples), of the samples that it has consumed."""
    if isinstance(returned, tuple) and len(returned) == 2 and isinstance(returned[1], int):
        return returned
    return returned, None


def _loss(returned: Any) -> Any:
    """Return a loss that can be read later without holding on to its graph; None if the step returned no number."""
    if isinstance(returned, int | float) and not isinstance(returned, bool):
        return float(returned)
    if getattr(returned, "numel", None) is None or returned.numel() != 1:
        return None
    return returned.detach()
