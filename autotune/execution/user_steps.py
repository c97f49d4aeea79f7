"""Runs the steps of a user's own training loop in a trial's process, timed as the Trainer's are.

The user's function sets up model, data and optimizer for a configuration and returns a function that does one whole
optimizer step. Memory guard, clock, limits and phases are those of every trial. What is inside a step can't be seen:
all its micro-batches are run, its wait for data isn't measured, and whether a knob took effect is taken on trust.
"""

from __future__ import annotations

import inspect
import math
import os
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from autotune.errors import InputError
from autotune.execution.measure import StepTimer, measurement_of
from autotune.execution.shortage import is_out_of_memory
from autotune.execution.trial import Trial
from autotune.execution.user_overlay import unpickled
from autotune.values.config import TrainConfig
from autotune.values.trial import Outcome
from autotune.values.user_code import ACCUMULATION, STEP_FILE, OwnStep

Step = Callable[[], Any]


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
