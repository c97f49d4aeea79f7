"""Finds out whether a loop of the user's own keeps to the global batch, and whether its split changes the gradient.

Entered by `launch` in a child process, once for a search, before its first trial: the user's function is called as a
trial calls it, and a step of what it returns is run under watch, at the baseline's micro-batch and at another one.
"""

from __future__ import annotations

import traceback
from pathlib import Path

from autotune.errors import InputError
from autotune.execution.consumed import Watched, watched
from autotune.execution.describe import ANSWER_FILE
from autotune.execution.splitting import ROUNDING, SHORT_ROUNDING, Gradient, Split, compared, seeded, split_told
from autotune.execution.user_steps import set_up, told
from autotune.value import read_value, write_value
from autotune.values.config import TrainConfig
from autotune.values.trial import Description, ExamineRequest, Refusal
from autotune.values.user_code import ACCUMULATION, STEP_FILE


def run_examine(directory: Path) -> None:
    """Answer the request in `directory`; the pickled function lies in the directory `data` beside it."""
    request = read_value(ExamineRequest, directory / "request.json")
    try:
        facts, notes = split_told(request.facts, _split(request, directory.parent / "data" / STEP_FILE), None)
        answer: Description | Refusal = Description(facts=facts, notes=notes)
    except InputError as error:
        answer = Refusal(error=type(error).__name__, message=str(error))
    write_value(answer, directory / ANSWER_FILE)


def _split(request: ExamineRequest, file: Path) -> Split:
    """Run the step at both splits, and return what its gradients tell.

    Raises:
        InputError: It consumes another number of samples than it should.
    """
    sizes = [s for s in (request.config.per_device_train_batch_size, request.other) if s is not None]
    runs = []
    for size in sizes:
        found = _run(request, size, file)
        if isinstance(found, str):
            return Split(unknown=found)
        _check_samples(request, size, found)
        runs.append(found)
    if len(runs) < 2:
        return Split()
    whole, split = runs
    if whole.gradient is None or split.gradient is None:
        return Split(unknown="no optimizer of torch's made a step")
    first = whole.gradient

    same = whole.is_like(split)

    def again() -> Gradient:
        found = _run(request, sizes[0], file, seeds=(0 if same else 1, 1))
        if isinstance(found, str) or found.gradient is None or (same and not found.is_like(whole)):
            return first
        return found.gradient

    rounding = SHORT_ROUNDING if whole.is_short or split.is_short else ROUNDING
    shapes = (_shape(request, sizes[0]), _shape(request, sizes[1]))
    return compared(first, again, split.gradient, shapes=shapes, rounding=rounding, same_samples=same)


def _run(request: ExamineRequest, size: int, file: Path, seeds: tuple[int, int] = (0, 0)) -> Watched | str:
    """Return what was seen of one step with a micro-batch of `size`; a text says why there was none.

    The first of the seeds is for what the function sets up, the second for the step.
    """
    config = request.config.model_copy(update={"per_device_train_batch_size": size})
    own = request.workload.own_step
    assert own is not None
    seeded(seeds[0])
    try:
        with watched() as found:
            step = set_up(own, config, request.workload.accumulation_steps(config), file)
            seeded(seeds[1])
            found.declared = told(step())[1]
    except Exception as error:  # whatever the user's code raises: the trial of the baseline tells of it, too
        traceback.print_exc()
        return f"with a micro-batch of {size} the step failed ({type(error).__name__}: {error})"
    return found


def _check_samples(request: ExamineRequest, size: int, found: Watched) -> None:
    """Refuse a step that consumed another number of samples than the configuration says.

    Raises:
        InputError: It did.
    """
    config = request.config.model_copy(update={"per_device_train_batch_size": size})
    own, expected = request.workload.own_step, request.workload.samples_per_step(config)
    assert own is not None
    if not found.counts or expected in found.counts:
        return
    steps = request.workload.accumulation_steps(config)
    seen = " or ".join(map(str, found.counts))
    remedy = (
        f"run {ACCUMULATION} micro-batches in each step"
        if own.takes_accumulation
        else f"have {own.name} take {ACCUMULATION}, and run as many micro-batches in each step"
    )
    raise InputError(
        f"step: with a micro-batch of {size} a step of {own.name} consumed {seen} samples, and {expected} are a step "
        f"({steps} x {size}): {remedy}; a step that can't be counted from outside returns (loss, samples)"
    )


def _shape(request: ExamineRequest, size: int) -> str:
    config: TrainConfig = request.config.model_copy(update={"per_device_train_batch_size": size})
    steps = request.workload.accumulation_steps(config)
    return f"{steps} micro-batch{'es' * (steps > 1)} of {size}"
