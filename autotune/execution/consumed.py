"""Watches one optimizer step of a loop that isn't ours: the samples that it consumes, the gradient that it steps by.

Samples are counted in three ways: those that data loaders draw, rows of what they hand out, and rows of the first
tensor that a model is given. A batch whose first dimension is time, or that is a list, is known by the first alone.
While a step is watched nothing is compiled, gradients aren't clipped, and a model draws nothing at random.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping, Sized
from contextlib import ExitStack, contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook
from torch.utils.data import dataloader

from autotune.execution.randomness import randomness_off
from autotune.execution.splitting import Gradient, gradient_of, is_short, still_batch_norm

# Values of a row by which it is known again: the first ones, which padding on the right leaves alone.
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


@contextmanager
def watched() -> Iterator[Watched]:
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
    """Count the samples of batches, and their rows, as loaders hand them out; workers are told of some before."""
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

    kind.__next__ = following  # type: ignore[method-assign, assignment]
    kind._next_index = drawn  # type: ignore[method-assign]
    try:
        yield
    finally:
        kind.__next__ = original  # type: ignore[method-assign]
        kind._next_index = drawing  # type: ignore[method-assign]


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

    nn.Module.__call__ = called  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Module.__call__ = original  # type: ignore[method-assign]


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

    handle = register_optimizer_step_pre_hook(about_to_step)
    try:
        yield
    finally:
        handle.remove()


@contextmanager
def _unclipped() -> Iterator[None]:
    """Have torch's functions that clip gradients leave them as they are: clipped, a wrong scale couldn't be seen."""
    utils, original = torch.nn.utils, torch.nn.utils.clip_grad_norm_
    by_value = utils.clip_grad_value_

    def norm(parameters: Any, max_norm: float, *args: Any, **kwargs: Any) -> torch.Tensor:
        return original(parameters, float("inf"), *args, **kwargs)

    def value(parameters: Any, *args: Any, **kwargs: Any) -> None:
        return None

    places = [(place, name) for place in (utils, utils.clip_grad) for name in ("clip_grad_norm_", "clip_grad_value_")]
    try:
        for place, name in places:
            setattr(place, name, norm if name == "clip_grad_norm_" else value)
        yield
    finally:
        for place, name in places:
            setattr(place, name, original if name == "clip_grad_norm_" else by_value)


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
