"""Whether the gradient of an optimizer step depends on how its samples are split into micro-batches: measured.

A loss that is a sum or a mean over the micro-batch may need another scale of accumulation than it gets, and one that
compares the samples of a micro-batch with each other is another loss with each split. What code says of itself doesn't
tell; two gradients from the same weights and the same samples do, all in one micro-batch and in several.

Everything that is known to be random is switched off and batch norm keeps its running figures. Where the two differ all
the same, the whole batch is run a second time with another seed: what differs then, differs for another reason.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from autotune.execution.randomness import randomness_off
from autotune.execution.shortage import is_out_of_memory
from autotune.execution.user_data import first_batch, view
from autotune.training.loss import leaves_out_first_label, normalize_loss
from autotune.values.model import ModelFacts

# Samples of a Trainer's step that is looked at, and of a micro-batch of it.
SAMPLES, SPLIT_SAMPLES = 4, 2

# Elements of each parameter's gradient that are compared one by one; its norm counts all of them.
_COMPARED = 1 << 16

# Relative distance of two gradients that is rounding. Seen on tiny random Llama, T5, BERT and ViT, 4 samples whole and
# in twos: up to 7e-7 in fp32, 9e-3 with weights in bf16, 2e-3 under autocast; there up to 4e-2 on ten layers without
# norms, 64 samples in twos and ones. A mean of means of texts of 8 to 60 tokens 0.47 to 0.57, a loss that isn't divided
# by the micro-batches 0.50 to 0.70.
ROUNDING, SHORT_ROUNDING = 5e-3, 0.05

# A router's loss looks at all tokens of a micro-batch: what it may move (as the first loss in `loss_guard`).
ROUTER = 0.1

# Of gradients of different samples the norms alone are compared. A loop that feeds one micro-batch again and again has
# half as many different samples with a micro-batch half as large: its gradient may be 1.4 times as long.
OTHER_SAMPLES = 0.4

# Multiples of what another seed changes that the split may change: a single pair tells chance but roughly.
_SPREADS = 3.0


class Gradient(NamedTuple):
    """What an optimizer step gets."""

    norm: float  # of the whole
    elements: torch.Tensor  # the first ones of each parameter, fp32, on the host


class Split(NamedTuple):
    """What the measurement showed; both None: the split changes nothing."""

    changes: str | None = None  # how the gradient differs, with the figures
    unknown: str | None = None  # why it could not be measured


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
    """Hold the gradient of a split step against the whole one's.

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
    distance = _distance if same_samples else _distance_of_norms
    apart, allowed = distance(whole, split), rounding if same_samples else OTHER_SAMPLES
    if apart > allowed:
        allowed += _SPREADS * distance(whole, again())
    if apart <= allowed:
        return Split() if same_samples else Split(unknown="other samples are read with another split")
    return Split(
        changes=f"the gradient of a step changes with the split of its samples: its norm is {whole.norm:.4g} in "
        f"{shapes[0]} and {split.norm:.4g} in {shapes[1]}, {apart:.0%} apart where {allowed:.1%} could be rounding and "
        "chance"
    )


def split_told(facts: ModelFacts, split: Split, whose: str | None) -> tuple[ModelFacts, tuple[str, ...]]:
    """Return the facts with what the measurement showed, and what the user is told of it.

    Args:
        facts: Of the model.
        split: What the measurement showed.
        whose: Whose loss it is, as 'the loss is ...', where that is a reason to doubt it; None if it isn't.
    """
    if split.changes is not None:
        line = f"{split.changes}: another micro-batch is another training, tried with --allow method alone"
        return facts.model_copy(update={"split_changes": split.changes}), (line,)
    if split.unknown is not None:
        coupled = facts.batch_coupled or (f"{whose}, over the micro-batch perhaps" if whose else None)
        line = f"whether the gradient depends on how a step's samples are split could not be measured: {split.unknown}"
        return facts.model_copy(update={"batch_coupled": coupled}), (line,)
    return facts, ()


def is_short(parameters: Iterable[torch.Tensor]) -> bool:
    """Return whether any of the weights has less than 32 bits, or their products are TF32, of 10 bits as fp16's."""
    of_16_bits = any(p.is_floating_point() and p.element_size() < 4 for p in parameters)
    return of_16_bits or (torch.cuda.is_available() and torch.backends.cuda.matmul.fp32_precision == "tf32")


def seeded(seed: int) -> None:
    """Seed whatever draws."""
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def split_of_trainer(trainer: Any, *, normalizes: bool, lengths: Any, reorders: bool, batch_coupled: bool) -> Split:
    """Return whether the gradient of a Trainer's step depends on the split, tried with a few of its samples.

    The Trainer's own `training_step` computes it, with its count of the step's labels. Afterwards the model has the
    normalised loss, if that is what trials give it, and no gradients.

    Args:
        trainer: When it is about to train.
        normalizes: Whether trials put `normalize_loss` on its model.
        lengths: Of the samples; None if they have none.
        reorders: Whether trials set the order of the samples.
        batch_coupled: Whether the model has routers or batch norm.
    """
    try:
        whole, parts = _batches(trainer, lengths, reorders=reorders)
    except Exception as error:  # whatever the user's data raise
        return Split(unknown=f"no batch of {SAMPLES} samples could be made ({type(error).__name__}: {error})")
    if parts is None:
        return Split(unknown="its batches have no rows that could be split")
    if normalizes:
        normalize_loss(trainer.model)
        trainer.model_accepts_loss_kwargs = True
        trainer._loss_shifts_labels = leaves_out_first_label(trainer.model)
    computes_short = trainer.accelerator.mixed_precision != "no" or is_short(trainer.model.parameters())
    rounding = SHORT_ROUNDING if computes_short else ROUNDING
    if batch_coupled:
        rounding = ROUTER
    shapes = (f"1 micro-batch of {SAMPLES}", f"{len(parts)} of {SPLIT_SAMPLES}")
    try:
        with randomness_off(trainer.model), still_batch_norm(trainer.model):
            one, other = _gradient(trainer, [whole], 0), _gradient(trainer, parts, 0)
            found = compared(one, lambda: _gradient(trainer, [whole], 1), other, shapes=shapes, rounding=rounding)
            if found.changes is None or not hasattr(type(trainer), "loss_is_scaled_for_ga"):
                return found
            return found._replace(changes=f"{found.changes}{_remedy(trainer, one, parts, rounding)}")
    except Exception as error:  # whatever the user's code raises
        if is_out_of_memory(error):
            return Split(unknown=f"{SAMPLES} samples do not fit the memory")
        return Split(unknown=f"a step of {SAMPLES} samples failed ({type(error).__name__}: {error})")
    finally:
        trainer.model.zero_grad(set_to_none=True)


def _remedy(trainer: Any, whole: Gradient, parts: list[Any], rounding: float) -> str:
    """Return what would make both gradients equal, where that was seen; otherwise nothing."""
    own = trainer.loss_is_scaled_for_ga
    for value in (False, True):
        trainer.loss_is_scaled_for_ga = value
        try:
            split = _gradient(trainer, parts, 0)
        finally:
            trainer.loss_is_scaled_for_ga = own
        if whole.elements.shape == split.elements.shape and _distance(whole, split) <= rounding:
            return f"; with loss_is_scaled_for_ga = {value} on your Trainer it does not"
    return ""


def _gradient(trainer: Any, batches: list[Any], seed: int) -> Gradient:
    """Return the gradient of one step of these micro-batches, as the Trainer's loop accumulates it."""
    args, model = trainer.args, trainer.model
    before = args.gradient_accumulation_steps
    model.zero_grad(set_to_none=True)
    seeded(seed)
    try:
        args.gradient_accumulation_steps = trainer.current_gradient_accumulation_steps = len(batches)
        count = trainer._get_num_items_in_batch(batches, args.device)
        for batch in batches:
            trainer.training_step(model, dict(batch), count)
    finally:
        args.gradient_accumulation_steps = before
    return gradient_of(p for p in model.parameters() if p.requires_grad)


def _batches(trainer: Any, lengths: Any, *, reorders: bool) -> tuple[Any, list[Any] | None]:
    """Return a batch of a few samples and the same in parts; None if they can't be had.

    Rows of one batch are the same samples whatever a collator draws. A batch that has no rows (a packed one) is
    collated anew in parts, where the order of the samples can be set.
    """
    samples = trainer.train_dataset
    order = _spread(lengths, len(samples)) if reorders else None
    whole = first_batch(trainer, samples if order is None else view(samples, order), SAMPLES)
    starts = range(0, SAMPLES, SPLIT_SAMPLES)
    rows = (
        [_rows(whole, slice(start, start + SPLIT_SAMPLES)) for start in starts] if _has_rows(whole, SAMPLES) else None
    )
    if order is None:
        return whole, rows
    parts = [
        first_batch(trainer, view(samples, order[start : start + SPLIT_SAMPLES]), SPLIT_SAMPLES) for start in starts
    ]
    # What has as many rows all the same has another dimension first, of time for example.
    return whole, rows if rows and _has_rows(parts[0], SPLIT_SAMPLES) else parts


def _spread(lengths: Any, count: int) -> Any:
    """Return the numbers of samples of different lengths, none of them among the longest."""
    order = np.arange(count) if lengths is None else np.argsort(lengths, kind="stable")
    return np.resize(order[:: max(1, count // SAMPLES)][:SAMPLES], SAMPLES).astype(np.int64)


def _has_rows(batch: Mapping[str, Any], count: int) -> bool:
    tensors = [v for v in batch.values() if isinstance(v, torch.Tensor) and v.ndim]
    return bool(tensors) and all(len(t) == count for t in tensors)


def _rows(batch: Mapping[str, Any], rows: slice) -> dict[str, Any]:
    return {n: v[rows] if isinstance(v, torch.Tensor) and v.ndim else v for n, v in batch.items()}


@contextmanager
def still_batch_norm(model: nn.Module) -> Iterator[None]:
    """Have batch norm go by its running figures while entered, whoever calls `train`."""
    layers = [m for m in model.modules() if isinstance(m, _BatchNorm)]
    before = [layer.training for layer in layers]
    for layer in layers:
        layer.eval()
        layer.train = _stays(layer)  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        for layer, training in zip(layers, before, strict=True):
            del layer.train
            layer.train(training)


def _stays(layer: nn.Module) -> Callable[..., nn.Module]:
    return lambda mode=True: layer


def _distance(one: Gradient, other: Gradient) -> float:
    largest = max(float(one.elements.norm()), float(other.elements.norm()))
    return float((one.elements - other.elements).norm()) / largest if largest else _distance_of_norms(one, other)


def _distance_of_norms(one: Gradient, other: Gradient) -> float:
    return abs(one.norm - other.norm) / max(one.norm, other.norm)
