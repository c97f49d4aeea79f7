"""Whether the gradient of an optimizer step depends on how its samples are split into micro-batches: compared.

A loss that is a sum or a mean over the micro-batch may need another scale of accumulation than it gets, and one that
compares the samples of a micro-batch with each other is another loss with each split. What code says of itself doesn't
show that; two gradients from the same weights and the same samples do, all in one micro-batch and in several.

Everything that is known to be random is switched off meanwhile, and batch norm keeps its running statistics. Dropout
modules have a rate `p`; others keep theirs in an attribute or read it from the config at each call. Randomness of
another kind, in a model's own code, is not found: so where the two gradients differ, the whole batch is run a second
time with another seed, and what differs then differs for another reason.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple
from unittest.mock import patch

import numpy as np
import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from autotune.training.facts import is_rate
from autotune.values.model import ModelFacts

# Elements of each parameter's gradient that are compared one by one; its norm counts all of them.
_COMPARED = 1 << 16

# Relative distance of two gradients that is rounding. Seen on tiny random Llama, T5, BERT and ViT, 4 samples whole and
# in twos: up to 7e-7 in fp32, 9e-3 with weights in bf16, 2e-3 under autocast; there up to 4e-2 on ten layers without
# norms, 64 samples in twos and ones. A mean of means of texts of 8 to 60 tokens 0.47 to 0.57, a loss that isn't divided
# by the micro-batches 0.50 to 0.70.
ROUNDING, SHORT_ROUNDING = 5e-3, 0.05

# Of gradients of different samples the norms alone are compared. A loop that feeds one micro-batch again and again has
# half as many different samples with a micro-batch half as large: its gradient may be 1.4 times as long.
OTHER_SAMPLES = 0.4

# Multiples of what another seed changes that the split may change: a single pair shows chance but roughly.
_SPREADS = 3.0


class Gradient(NamedTuple):
    """The gradient of an optimizer step."""

    norm: float  # of the whole
    elements: torch.Tensor  # the first ones of each parameter, fp32, on the host


class Split(NamedTuple):
    """What the measurement showed; all None: the split changes nothing."""

    changes: str | None = None  # how the gradient differs, with the figures
    unknown: str | None = None  # why it could not be measured
    remark: str | None = None  # what is wrong with the gradient whatever the split


def gradient_of(
    parameters: Iterable[torch.Tensor], *, of: Callable[[torch.Tensor], torch.Tensor | None] = lambda p: p.grad
) -> Gradient:
    """Return the gradient of parameters, or what else `of` reads of them; of those that have none it is zero."""
    squares, elements = [], []
    for parameter in parameters:
        found = of(parameter)
        if found is None:
            elements.append(torch.zeros(min(_COMPARED, parameter.numel())))
            continue
        values = (found.to_dense() if found.is_sparse else found).detach().flatten()
        squares.append(float(torch.linalg.vector_norm(values, dtype=torch.float32)) ** 2)
        elements.append(values[:_COMPARED].float().cpu())
    return Gradient(math.sqrt(math.fsum(squares)), torch.cat(elements) if elements else torch.zeros(0))


def compared(
    whole: Gradient,
    again: Callable[[], Gradient],
    split: Gradient,
    *,
    shapes: tuple[str, str],
    rounding: float,
    same_samples: bool = True,
) -> Split:
    """Compare the gradient of a step in several micro-batches with that of the whole step.

    Args:
        whole: The gradient of the step.
        again: Gives the same with another seed, where chance has to be known.
        split: The same samples in other micro-batches.
        shapes: What the first and the last are called: '1 micro-batch of 4'.
        rounding: The relative distance that is none.
        same_samples: Whether both read the same samples; otherwise their norms alone are compared.
    """
    if not math.isfinite(whole.norm + split.norm):
        return Split(unknown="a gradient is not a number")
    if max(whole.norm, split.norm) == 0.0:
        return Split(unknown="all gradients are zero")
    if whole.elements.shape != split.elements.shape:
        return Split(unknown="other weights get gradients with another split")
    measure = distance if same_samples else _distance_of_norms
    apart, allowed = measure(whole, split), rounding if same_samples else OTHER_SAMPLES
    if apart > allowed:
        allowed += _SPREADS * measure(whole, again())
    if apart <= allowed:
        return Split() if same_samples else Split(unknown="other samples are read with another split")
    return Split(
        changes=f"the gradient of a step changes with the split of its samples: its norm is {whole.norm:.4g} in "
        f"{shapes[0]} and {split.norm:.4g} in {shapes[1]}, {apart:.0%} apart where {allowed:.1%} could be rounding and "
        "chance"
    )


def distance(one: Gradient, other: Gradient) -> float:
    """Return how far two gradients are apart, relative to the longer one."""
    largest = max(float(one.elements.norm()), float(other.elements.norm()))
    return float((one.elements - other.elements).norm()) / largest if largest else _distance_of_norms(one, other)


def weighted(gradients: Sequence[Gradient], weights: Sequence[float]) -> Gradient:
    """Return the weighted sum of gradients."""
    elements = sum((w * g.elements for w, g in zip(weights, gradients, strict=True)), torch.tensor(0.0))
    return Gradient(float(elements.norm()), elements)


def diagnosed(
    whole: Gradient, split: Gradient, alone: Sequence[Gradient], labels: Sequence[float], rounding: float
) -> str:
    """Return how the micro-batches' own gradients make that of the split step, with '; ' before; '' if none is seen.

    Args:
        whole: The gradient of the step in one micro-batch.
        split: In several.
        alone: Of each of those as a step of its own.
        labels: How many labels each of them has; empty: none.
        rounding: The relative distance that is none.
    """
    if any(g.elements.shape != whole.elements.shape for g in (split, *alone)):
        return ""
    count, all_labels = len(alone), sum(labels)
    total, mean = weighted(alone, [1.0] * count), weighted(alone, [1 / count] * count)
    last = alone[-1]  # whatever its scale: its labels may have been divided by the step's count
    if last.norm and distance(split, weighted([last], [split.norm / last.norm])) <= rounding:
        return "; only the last micro-batch of a step counts: the others are not accumulated"
    if distance(split, total) <= rounding:
        return "; the gradients of micro-batches are added up: the loss is not divided by their number"
    if distance(split, mean) <= rounding and distance(whole, total) <= rounding:
        return "; the loss is a sum over the micro-batch, and divided by the number of micro-batches all the same"
    if distance(split, mean) <= rounding and all_labels:
        by_labels = weighted(alone, [n / all_labels for n in labels])
        if distance(whole, by_labels) <= rounding:
            return (
                "; the loss is a mean over each micro-batch, however many labels that has: divide the sum over its "
                "labels by num_items_in_batch"
            )
    return ""


def _distance_of_norms(one: Gradient, other: Gradient) -> float:
    return abs(one.norm - other.norm) / max(one.norm, other.norm)


def reported_split(facts: ModelFacts, split: Split, whose: str | None) -> tuple[ModelFacts, tuple[str, ...]]:
    """Return the facts with what the measurement showed, and the note for the user.

    `whose` says whose loss it is, as 'the loss is ...', where that is a reason to doubt it.
    """
    if split.changes is not None:
        line = f"{split.changes}: another micro-batch is another training, tried with --allow method alone"
        return facts.model_copy(update={"split_changes": split.changes}), (line,)
    if split.unknown is not None:
        coupled = facts.batch_coupled or (f"{whose}, over the micro-batch perhaps" if whose else None)
        line = f"whether the gradient depends on how a step's samples are split could not be measured: {split.unknown}"
        return facts.model_copy(update={"batch_coupled": coupled}), (line,)
    return facts, (split.remark,) if split.remark is not None else ()


def is_short(parameters: Iterable[torch.Tensor]) -> bool:
    """Return whether a weight has less than 32 bits, or products are TF32, whose mantissa has 10 bits as fp16's."""
    of_16_bits = any(p.is_floating_point() and p.element_size() < 4 for p in parameters)
    return of_16_bits or (torch.cuda.is_available() and torch.backends.cuda.matmul.fp32_precision == "tf32")


def seeded(seed: int) -> None:
    """Seed Python's, numpy's and torch's generators."""
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


@contextmanager
def randomness_off(model: nn.Module) -> Iterator[None]:
    """Set every rate of `model` to zero while entered."""
    with ExitStack() as stack:
        for holder, name, value in _rates(model):
            stack.enter_context(patch.object(holder, name, type(value)(0)))
        yield


def is_random(model: nn.Module) -> bool:
    """Whether any rate of `model` is above zero."""
    return bool(_rates(model))


def _rates(model: nn.Module) -> list[tuple[Any, str, float]]:
    """Return the rates above zero, with what holds them and their names."""
    modules = list(model.modules())
    configs = {id(c): c for m in modules if (c := getattr(m, "config", None)) is not None and hasattr(c, "to_dict")}
    holders = [*modules, *configs.values()]
    return [(h, name, value) for h in holders for name, value in vars(h).items() if is_rate(h, name, value)]


@contextmanager
def still_batch_norm(model: nn.Module) -> Iterator[None]:
    """Have batch norm use its running statistics while entered, whoever calls `train`."""
    with ExitStack() as stack:
        for layer in (m for m in model.modules() if isinstance(m, _BatchNorm)):
            stack.callback(layer.train, layer.training)
            stack.enter_context(patch.object(layer.eval(), "train", lambda mode=True, layer=layer: layer))
        yield
