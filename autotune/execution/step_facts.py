"""Whether a loop of the user's own keeps to the global batch, and whether its split changes the gradient: measured.

Before the first trial of a search, the user's function is called as a trial calls it, and a step of what it returns is
run under watch, at the baseline's micro-batch and at another one. Samples are counted in three ways: those that data
loaders draw, rows of what they hand out, and rows of the first tensor that a model is given. A batch whose first
dimension is time, or that is a list, is known by the first alone. While a step is watched nothing is compiled,
gradients aren't clipped, and a model draws nothing at random.
"""

from __future__ import annotations

import traceback
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping, Sized
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook
from torch.utils.data import dataloader

from autotune.errors import InputError
from autotune.execution.gradients import (
    ROUNDING,
    SHORT_ROUNDING,
    Gradient,
    Split,
    compared,
    gradient_of,
    is_short,
    randomness_off,
    reported_split,
    seeded,
    still_batch_norm,
)
from autotune.execution.trial import loss_and_samples, set_up
from autotune.values.config import TrainConfig
from autotune.values.trial import Description, ExamineRequest
from autotune.values.workload import ACCUMULATION, OwnStep

# Values of a row by which it is recognised: the first ones, which padding on the right leaves alone.
_KNOWN_BY = 8

# Kinds of devices for which autocast, under which gradients are rounded to 16 bits, is switched on by itself.
_DEVICES = ("cpu", "cuda")


class Watched:
    """What was seen of a step."""

    def __init__(self) -> None:
        self.drawn: Counter[int] = Counter()  # samples by data set, as loaders draw them
        self.read: Counter[int] = Counter()  # rows by data set
        self.seen: Counter[int] = Counter()  # rows by outermost model
        self.rows: Counter[bytes] = Counter()  # that models were given, as far as they are looked at
        self.declared: int | None = None  # samples, as the step says itself
        self.gradient: Gradient | None = None  # of all that is stepped; None: no optimizer of torch's was
        self.weights: Gradient | None = None  # the values of the same
        self.is_short = False  # some of them, or of what is computed, have less than 32 bits

    @property
    def counts(self) -> tuple[int, ...]:
        """The samples of the step, by every way of counting that saw some; as the step says, if it says so."""
        if self.declared is not None:
            return (self.declared,)
        return tuple(dict.fromkeys((*self.drawn.values(), *self.read.values(), *self.seen.values())))

    def is_like(self, other: Watched) -> bool:
        """Whether both steps begin from the same weights and are given the same samples."""
        if self.weights is None or other.weights is None or self.rows != other.rows:
            return False
        return torch.equal(self.weights.elements, other.weights.elements)


def examined(request: ExamineRequest, file: Path) -> Description:
    """Return what a step of the function pickled in `file` shows; a wrong number of samples is an InputError."""
    facts, notes = reported_split(request.facts, _split(request, file), None)
    return Description(facts=facts, notes=notes)


def _split(request: ExamineRequest, file: Path) -> Split:
    """Run the step at both splits, and compare its gradients."""
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
    first, same = whole.gradient, whole.is_like(split)

    def again() -> Gradient:
        found = _run(request, sizes[0], file, seeds=(0 if same else 1, 1))
        if isinstance(found, str) or found.gradient is None or (same and not found.is_like(whole)):
            return first
        return found.gradient

    rounding = SHORT_ROUNDING if whole.is_short or split.is_short else ROUNDING
    shapes = (_shape(request, sizes[0]), _shape(request, sizes[1]))
    return compared(first, again, split.gradient, shapes=shapes, rounding=rounding, same_samples=same)


def _run(request: ExamineRequest, size: int, file: Path, seeds: tuple[int, int] = (0, 0)) -> Watched | str:
    """Return what was seen of one step with a micro-batch of `size`, or why there was none.

    The first of the seeds is for what the function sets up, the second for the step.
    """
    config = _sized(request, size)
    seeded(seeds[0])
    try:
        with _watched() as found:
            step = set_up(_own(request), config, request.workload.accumulation_steps(config), file)
            seeded(seeds[1])
            found.declared = loss_and_samples(step())[1]
    except Exception as error:  # whatever the user's code raises: the trial of the baseline tells of it, too
        traceback.print_exc()
        return f"with a micro-batch of {size} the step failed ({type(error).__name__}: {error})"
    return found


def _check_samples(request: ExamineRequest, size: int, found: Watched) -> None:
    """Refuse a step that consumed another number of samples than the configuration says."""
    config, own = _sized(request, size), _own(request)
    expected, steps = request.workload.samples_per_step(config), request.workload.accumulation_steps(config)
    if not found.counts or expected in found.counts:
        return
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
    steps = request.workload.accumulation_steps(_sized(request, size))
    return f"{steps} micro-batch{'es' * (steps > 1)} of {size}"


def _sized(request: ExamineRequest, size: int) -> TrainConfig:
    return request.config.model_copy(update={"per_device_train_batch_size": size})


def _own(request: ExamineRequest) -> OwnStep:
    assert request.workload.own_step is not None
    return request.workload.own_step


@contextmanager
def _watched() -> Iterator[Watched]:
    """Watch what is done inside: make a model, run one step."""
    found = Watched()
    with ExitStack() as stack:
        stack.enter_context(torch.compiler.set_stance("force_eager"))
        stack.enter_context(_unclipped())
        stack.enter_context(_reading(found))
        stack.enter_context(_calling(found, stack))
        stack.enter_context(_stepping(found))
        yield found


@contextmanager
def _reading(found: Watched) -> Iterator[None]:
    """Count the samples of batches, and their rows, as loaders hand them out; their workers draw some ahead."""
    kind = dataloader._BaseDataLoaderIter
    original, drawing = kind.__next__, kind._next_index
    ahead: WeakKeyDictionary[Any, deque[int]] = WeakKeyDictionary()

    def drawn(iterator: Any) -> Any:
        index = drawing(iterator)  # type: ignore[no-untyped-call]
        if isinstance(index, Sized):  # otherwise the data set makes the batches
            ahead.setdefault(iterator, deque()).append(len(index))
        return index

    def following(iterator: Any) -> Any:
        batch = original(iterator)
        if ahead.get(iterator):
            found.drawn[id(iterator._dataset)] += ahead[iterator].popleft()
        tensor = _first_tensor(batch)
        if tensor is not None:
            found.read[id(iterator._dataset)] += len(tensor)
        return batch

    with patch.object(kind, "__next__", following), patch.object(kind, "_next_index", drawn):
        yield


@contextmanager
def _calling(found: Watched, stack: ExitStack) -> Iterator[None]:
    """Count the rows that outermost models are given; nothing is drawn at random in them from their first call on."""
    original = nn.Module.__call__
    depth, known = 0, set()

    def called(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        nonlocal depth
        if depth == 0 and next(module.parameters(), None) is not None:
            if id(module) not in known:
                known.add(id(module))
                stack.enter_context(randomness_off(module))
                stack.enter_context(still_batch_norm(module))
            tensor = _first_tensor((args, kwargs))
            if tensor is not None and torch.is_grad_enabled():
                found.seen[id(module)] += len(tensor)
                found.rows.update(_known_by(tensor))
        found.is_short |= any(map(torch.is_autocast_enabled, _DEVICES))
        depth += 1
        try:
            return original(module, *args, **kwargs)
        finally:
            depth -= 1

    with patch.object(nn.Module, "__call__", called):
        yield


@contextmanager
def _stepping(found: Watched) -> Iterator[None]:
    """Read the gradient when an optimizer first steps by it; of several optimizers the gradients stand in a row."""
    stepped: set[int] = set()

    def about_to_step(optimizer: Optimizer, *_: Any) -> None:
        if id(optimizer) in stepped:
            return
        stepped.add(id(optimizer))
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        found.gradient = _joined(found.gradient, gradient_of(parameters))
        found.weights = _joined(found.weights, gradient_of(parameters, of=lambda p: p))
        found.is_short |= is_short(parameters)

    with register_optimizer_step_pre_hook(about_to_step):
        yield


@contextmanager
def _unclipped() -> Iterator[None]:
    """Have torch's functions that clip gradients leave them as they are: clipped, a wrong scale couldn't be seen."""
    original = nn.utils.clip_grad_norm_

    def norm(parameters: Any, max_norm: float, *args: Any, **kwargs: Any) -> torch.Tensor:
        return original(parameters, float("inf"), *args, **kwargs)

    with ExitStack() as stack:
        for place in (nn.utils, nn.utils.clip_grad):
            stack.enter_context(patch.object(place, "clip_grad_norm_", norm))
            stack.enter_context(patch.object(place, "clip_grad_value_", lambda *args, **kwargs: None))
        yield


def _first_tensor(value: Any) -> torch.Tensor | None:
    """Return the first tensor with rows in a batch, or in the arguments of a call."""
    if isinstance(value, torch.Tensor):
        return value if value.ndim else None
    items: Iterable[Any] = ()
    if isinstance(value, Mapping):
        items = value.values()
    elif isinstance(value, list | tuple):
        items = value
    return next((t for item in items if (t := _first_tensor(item)) is not None), None)


def _known_by(tensor: torch.Tensor) -> list[bytes]:
    rows = tensor.detach().reshape(len(tensor), -1)[:, :_KNOWN_BY].double().cpu()
    return [row.numpy().tobytes() for row in rows]


def _joined(one: Gradient | None, other: Gradient) -> Gradient:
    if one is None:
        return other
    return Gradient((one.norm**2 + other.norm**2) ** 0.5, torch.cat((one.elements, other.elements)))
