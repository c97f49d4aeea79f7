"""A loop of the user's own: set up and timed in a trial; one step of it is looked at before the search.

The user's function sets up model, data and optimizer for a configuration and returns a function that does one whole
optimizer step, which is timed as the Trainer's steps are. What is inside a step can't be seen: all its micro-batches
are run, its wait for data isn't measured, and whether a knob took effect is taken on trust.

Before the first trial a step is run at the baseline's micro-batch and at another one. The samples that models are given
are counted, and the gradients compared (`gradients`). Meanwhile nothing is compiled, gradients aren't clipped, and a
model draws nothing at random.
"""

from __future__ import annotations

import inspect
import math
import os
import statistics
import sys
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch import nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook
from transformers import set_seed

from autotune.errors import InputError
from autotune.execution.gradients import (
    ROUNDING,
    SHORT_ROUNDING,
    Gradient,
    Split,
    compared,
    gradient_of,
    is_short,
    reported_split,
    still,
)
from autotune.execution.measure import measurement_of
from autotune.execution.outcome import is_out_of_memory
from autotune.execution.trial import Trial
from autotune.execution.user_code import unpickled
from autotune.execution.user_data import rows_of
from autotune.values.config import TrainConfig
from autotune.values.trial import Description, ExamineRequest, Outcome
from autotune.values.workload import ACCUMULATION, STEP_FILE, OwnStep


def run_steps(trial: Trial, own: OwnStep) -> Outcome:
    """Set the user's training up and run its steps until enough is known."""
    timer, losses = trial.timer, []
    trial.stopwatch.enter("model_s")
    step = _set_up(own, trial.request.config, trial.request.accumulation_steps, trial.data_directory / STEP_FILE)
    trial.stopwatch.enter("trainer_s")
    # The timer looks at nothing of a Trainer but the number of the step, and whether training is to stop.
    state, control = SimpleNamespace(global_step=0), SimpleNamespace(should_training_stop=False)
    while not control.should_training_stop:
        timer.on_step_begin(None, state, control)
        loss = _loss_and_samples(step())[0]
        if isinstance(loss, torch.Tensor):
            loss = loss.detach() if loss.numel() == 1 else None  # read later, without its graph
        if isinstance(loss, int | float | torch.Tensor) and not isinstance(loss, bool):
            losses.append(loss)
        state.global_step += 1
        timer.on_step_end(None, state, control)
    timer.on_train_end(None, state, control)
    mean = statistics.fmean(map(float, losses)) if losses else None
    if mean is not None and not math.isfinite(mean):
        return trial.diverged(mean)
    trial.guard.check()
    return measurement_of(trial.request, timer, trial.guard.peak(), loss=mean, effects={}, data_wait_share=None)


def _set_up(own: OwnStep, config: TrainConfig, accumulation_steps: int, file: Path) -> Callable[[], Any]:
    """Return the step that the user's function makes, in the place where it was handed over.

    Raises InputError if the function can't be loaded, refuses the configuration, or returns no function.
    """
    sys.path.extend(entry for entry in own.search_path if entry not in sys.path)
    if Path(own.directory).is_dir():
        os.chdir(own.directory)
    make = unpickled(file, own.sha256, own.name)
    try:
        step = make(config, **({ACCUMULATION: accumulation_steps} if own.takes_accumulation else {}))
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


def _loss_and_samples(returned: Any) -> tuple[Any, int | None]:
    """Return what a step says of its loss and, if it returned (loss, samples), of the samples that it has consumed."""
    if isinstance(returned, tuple) and len(returned) == 2 and isinstance(returned[1], int):
        return returned
    return returned, None


class _Step:
    def __init__(self, micro_batch: int) -> None:
        self.micro_batch = micro_batch
        self.samples: Counter[int] = Counter()  # that were given to each outermost model
        self.rows: Counter[bytes] = Counter()  # that models were given, by their first values
        self.gradients: list[Gradient] = []  # of each optimizer of torch's that has stepped
        self.weights: list[torch.Tensor] = []  # the first ones of each of its parameters
        self.is_short = False  # some of the weights, or of what is computed, have less than 32 bits

    @property
    def gradient(self) -> Gradient:
        return Gradient(math.hypot(*(g.norm for g in self.gradients)), torch.cat([g.elements for g in self.gradients]))

    def is_like(self, other: _Step) -> bool:
        """Whether both begin from the same weights and are given the same samples."""
        is_same = len(self.weights) == len(other.weights) and all(map(torch.equal, self.weights, other.weights))
        return is_same and self.rows == other.rows


def examined(request: ExamineRequest, file: Path) -> Description:
    """Return what a step of the function pickled in `file` shows; a wrong number of samples is an InputError."""
    facts, notes = reported_split(request.facts, _split(request, file), None)
    return Description(facts=facts, notes=notes)


def _split(request: ExamineRequest, file: Path) -> Split:
    """Run the step at both splits, and compare its gradients."""
    sizes = (request.config.per_device_train_batch_size, request.other)
    configs = [request.config.model_copy(update={"per_device_train_batch_size": n}) for n in sizes if n is not None]
    runs = []
    for config in configs:
        found = _run(request, config, file)
        if isinstance(found, str):
            return Split(unknown=found)
        runs.append(found)
    if len(runs) < 2:
        return Split()
    whole, split = runs
    if not whole.gradients or not split.gradients:
        return Split(unknown="no optimizer of torch's made a step")
    same = whole.is_like(split)

    def again() -> Gradient:
        found = _run(request, configs[0], file, seeds=(0 if same else 1, 1))
        if isinstance(found, str) or not found.gradients or (same and not found.is_like(whole)):
            return whole.gradient
        return found.gradient

    counts = [request.workload.accumulation_steps(config) for config in configs]
    one, other = (f"{n} micro-batch{'es' * (n > 1)} of {s.micro_batch}" for n, s in zip(counts, runs, strict=True))
    rounding = SHORT_ROUNDING if whole.is_short or split.is_short else ROUNDING
    return compared(whole.gradient, again, split.gradient, shapes=(one, other), rounding=rounding, same_samples=same)


def _run(request: ExamineRequest, config: TrainConfig, file: Path, seeds: tuple[int, int] = (0, 0)) -> _Step | str:
    """Return what was seen of one step, or why there was none; another number of samples than asked for is refused.

    The first of the seeds is for what the function sets up, the second for the step.
    """
    own, steps = request.workload.own_step, request.workload.accumulation_steps(config)
    assert own is not None
    found = _Step(config.per_device_train_batch_size)
    set_seed(seeds[0])
    try:
        with _watched(found):
            step = _set_up(own, config, steps, file)
            set_seed(seeds[1])
            said = _loss_and_samples(step())[1]
    except Exception as error:  # whatever the user's code raises: the trial of the baseline tells of it, too
        traceback.print_exc()
        return f"with a micro-batch of {found.micro_batch} the step failed ({type(error).__name__}: {error})"
    counts = dict.fromkeys(found.samples.values() if said is None else [said])
    expected = request.workload.samples_per_step(config)
    if not counts or expected in counts:
        return found
    remedy = "run" if own.takes_accumulation else f"have {own.name} take {ACCUMULATION}, and run"
    raise InputError(
        f"step: with a micro-batch of {found.micro_batch} a step of {own.name} consumed "
        f"{' or '.join(map(str, counts))} samples, and {expected} are a step ({steps} x {found.micro_batch}): {remedy} "
        f"{ACCUMULATION} micro-batches in each step; a step that can't be counted from outside returns (loss, samples)"
    )


@contextmanager
def _watched(found: _Step) -> Iterator[None]:
    """Watch what is done inside: make a model, run one step."""
    call, clip = nn.Module.__call__, nn.utils.clip_grad_norm_
    depth, known, stepped = 0, set(), set()

    def called(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        nonlocal depth
        if depth == 0 and next(module.parameters(), None) is not None:
            if id(module) not in known:
                known.add(id(module))
                stack.enter_context(still(module))
            given = _first_tensor((args, kwargs))
            if given is not None and torch.is_grad_enabled():
                found.samples[id(module)] += rows_of({"": given}, found.micro_batch) or found.micro_batch
                # A row is known by its first values, which padding on the right leaves alone.
                values = given.detach().reshape(len(given), -1)[:, :8].double().cpu()
                found.rows.update(row.numpy().tobytes() for row in values)
        found.is_short |= any(map(torch.is_autocast_enabled, ("cpu", "cuda")))
        depth += 1
        try:
            return call(module, *args, **kwargs)
        finally:
            depth -= 1

    def about_to_step(optimizer: Optimizer, *_: Any) -> None:
        if id(optimizer) in stepped:
            return
        stepped.add(id(optimizer))
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        found.gradients.append(gradient_of(parameters))
        found.weights.append(gradient_of(parameters, of=lambda p: p).elements)
        found.is_short |= is_short(parameters)

    def norm(parameters: Any, max_norm: float, *args: Any, **kwargs: Any) -> torch.Tensor:
        return clip(parameters, float("inf"), *args, **kwargs)  # clipped, a wrong scale couldn't be seen

    with ExitStack() as stack:
        stack.enter_context(torch.compiler.set_stance("force_eager"))
        for place in (nn.utils, nn.utils.clip_grad):
            stack.enter_context(patch.object(place, "clip_grad_norm_", norm))
            stack.enter_context(patch.object(place, "clip_grad_value_", lambda *args, **kwargs: None))
        stack.enter_context(patch.object(nn.Module, "__call__", called))
        stack.enter_context(register_optimizer_step_pre_hook(about_to_step))
        yield


def _first_tensor(value: Any) -> torch.Tensor | None:
    if isinstance(value, torch.Tensor):
        return value if value.ndim else None
    items = value.values() if isinstance(value, Mapping) else value if isinstance(value, list | tuple) else ()
    return next((tensor for item in items if (tensor := _first_tensor(item)) is not None), None)
