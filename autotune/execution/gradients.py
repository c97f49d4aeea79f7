"""Measures whether the gradient of an optimizer step depends on how its samples are split into micro-batches.

A loss that is a sum over the micro-batch needs another scale of accumulation than a mean, and one that compares the
samples of a micro-batch with each other is another loss with each split. Two gradients from the same weights and
samples show it, in one micro-batch and in several: a Trainer's by its own `training_step`, a loop's at the baseline's
micro-batch and at another one. Nothing is compiled meanwhile, gradients aren't clipped, samples are counted.

All known randomness is switched off: dropout modules have a rate `p`, others keep theirs in an attribute or read it
from the config at each call. If gradients still differ, the whole batch runs with another seed, to see chance alone.
"""

import dataclasses
import inspect
import math
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import numpy as np
import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook
from torch.utils._pytree import tree_leaves
from transformers import set_seed

from autotune.errors import InputError
from autotune.execution.environment import gathered, own_rank
from autotune.execution.outcome import is_out_of_memory
from autotune.execution.user_code import step_of
from autotune.execution.user_data import cut, first_batch, rows_of, view
from autotune.training.facts import is_rate
from autotune.training.loss import leaves_out_first_label, normalize_loss
from autotune.values.config import TrainConfig
from autotune.values.model import ModelFacts
from autotune.values.trial import ExamineRequest
from autotune.values.workload import ACCUMULATION

# Elements of each parameter's gradient that are compared one by one; its norm counts all of them.
_COMPARED = 1 << 16

# Relative distance of two gradients that is rounding. Seen on tiny random Llama, T5, BERT and ViT: up to 7e-7 in fp32,
# 9e-3 with weights in bf16, 2e-3 under autocast; there up to 4e-2 on ten layers without norms. A mean of means of texts
# of 8 to 60 tokens 0.47 to 0.57, a loss that isn't divided by the micro-batches 0.50 to 0.70.
_ROUNDING, _SHORT_ROUNDING = 5e-3, 0.05

# Samples of a Trainer's step whose gradients are compared, and of a micro-batch of it.
_SAMPLES, _SPLIT_SAMPLES = 4, 2


class Gradient(NamedTuple):
    """The gradient of an optimizer step."""

    norm: float  # of the whole
    elements: torch.Tensor  # the first ones of each parameter, fp32, on the host


class Split(NamedTuple):
    """How the split changes the gradient; both None: not at all."""

    changes: str | None = None  # in words, with the figures
    unknown: str | None = None  # why it could not be measured


def gradient_of(
    parameters: Iterable[torch.Tensor], *, of: Callable[[torch.Tensor], torch.Tensor | None] = lambda p: p.grad
) -> Gradient:
    """Return the gradient of parameters, or another value that `of` reads; None counts as zero."""
    squares, elements = [], [torch.zeros(0)]
    for parameter in parameters:
        if (found := of(parameter)) is None:
            elements.append(torch.zeros(min(_COMPARED, parameter.numel())))
            continue
        values = (found.to_dense() if found.is_sparse else found).detach().flatten()
        squares.append(float(torch.linalg.vector_norm(values, dtype=torch.float32)) ** 2)
        elements.append(values[:_COMPARED].float().cpu())
    return Gradient(math.sqrt(math.fsum(squares)), torch.cat(elements))


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

    `again` returns the whole's with another seed; `shapes` are the names of the two, as '1 micro-batch of 4'; a
    relative distance up to `rounding` is no difference.
    """
    if not math.isfinite(whole.norm + split.norm):
        return Split(unknown="a gradient is not a number")
    if max(whole.norm, split.norm) == 0.0:
        return Split(unknown="all gradients are zero")
    if whole.elements.shape != split.elements.shape:
        return Split(unknown="other weights get gradients with another split")

    def distance(one: Gradient, other: Gradient) -> float:  # relative to the longer one
        largest = max(float(one.elements.norm()), float(other.elements.norm()))
        if same_samples and largest:
            return float((one.elements - other.elements).norm()) / largest
        return abs(one.norm - other.norm) / max(one.norm, other.norm)

    # Gradients of different samples are compared by their norms alone. A loop that feeds one micro-batch again and
    # again has half as many different samples with a micro-batch half as large: its gradient may be 1.4 times as long.
    apart, allowed = distance(whole, split), rounding if same_samples else 0.4
    if apart > allowed:  # a single pair shows only roughly how much chance changes
        allowed += 3.0 * distance(whole, again())
    if apart <= allowed:
        return Split() if same_samples else Split(unknown="other samples are read with another split")
    norms = f"its norm is {whole.norm:.4g} in {shapes[0]} and {split.norm:.4g} in {shapes[1]}"
    told = f"{norms}, {apart:.0%} apart where {allowed:.1%} could be rounding and chance"
    return Split(changes=f"the gradient of a step changes with the split of its samples: {told}")


def reported_split(facts: ModelFacts, split: Split, whose: str | None) -> tuple[ModelFacts, tuple[str, ...]]:
    """Return the facts with what was measured, and a note; `whose`: why the loss is doubted, 'the loss is ...'."""
    if split.changes is not None:
        line = f"{split.changes}: another micro-batch is another training, tried with --allow method alone"
        return facts.model_copy(update={"split_changes": split.changes}), (line,)
    if split.unknown is not None:
        coupled = facts.batch_coupled or (f"{whose}, over the micro-batch perhaps" if whose else None)
        line = f"whether the gradient depends on how a step's samples are split could not be measured: {split.unknown}"
        return facts.model_copy(update={"batch_coupled": coupled}), (line,)
    return facts, ()


def split_of_trainer(trainer: Any, *, normalizes: bool, lengths: Any, reorders: bool, batch_coupled: bool) -> Split:
    """Measure with a few samples of a Trainer, by its own `training_step` and its count of the step's labels.

    `normalizes`: trials put `normalize_loss` on its model, which it has afterwards; `reorders`: they set the order of
    the samples, whose `lengths` may be None; `batch_coupled`: the model has routers or batch norm.
    """
    if isinstance(getattr(trainer, "loss", None), Mapping):  # of sentence-transformers
        return Split(unknown="each of its data sets has a loss of its own, and a batch is of one data set")
    try:
        whole, splits = _batches(trainer, lengths, reorders=reorders)
    except Exception as error:  # whatever the user's data raise
        return Split(unknown=f"no batch of {_SAMPLES} samples could be made ({type(error).__name__}: {error})")
    if not splits:
        return Split(unknown="its batches have no rows that could be split")
    model, args = trainer.model, trainer.args
    if normalizes:
        normalize_loss(model)
        trainer.model_accepts_loss_kwargs = True
        trainer._loss_shifts_labels = leaves_out_first_label(model)
    computes_short = trainer.accelerator.mixed_precision != "no" or is_short(model.parameters())
    rounding = _SHORT_ROUNDING if computes_short else _ROUNDING
    if batch_coupled:  # a router's loss looks at all tokens of a micro-batch (as the first loss in `loss_check`)
        rounding = 0.1

    def gradient(batches: list[Any], seed: int = 0) -> Gradient:  # as the Trainer's loop accumulates it
        model.zero_grad(set_to_none=True)
        set_seed(seed)
        trainer.current_gradient_accumulation_steps = len(batches)
        with patch.object(args, "gradient_accumulation_steps", len(batches)):
            count = trainer._get_num_items_in_batch(batches, args.device)
            for batch in batches:
                trainer.training_step(model, dict(batch), count)
        return gradient_of(p for p in model.parameters() if p.requires_grad)

    shapes = (f"1 micro-batch of {_SAMPLES}", f"{_SAMPLES // _SPLIT_SAMPLES} of {_SPLIT_SAMPLES}")
    found = Split()
    try:
        with still(model):
            one = gradient([whole])
            while splits and found == Split():
                other = gradient(splits.pop(0))
                found = compared(one, lambda: gradient([whole], 1), other, shapes=shapes, rounding=rounding)
        return found
    except Exception as error:  # whatever the user's code raises
        if is_out_of_memory(error):
            return Split(unknown=f"{_SAMPLES} samples do not fit the memory")
        return Split(unknown=f"a step of {_SAMPLES} samples failed ({type(error).__name__}: {error})")
    finally:
        model.zero_grad(set_to_none=True)


def _batches(trainer: Any, lengths: Any, *, reorders: bool) -> tuple[Any, list[list[Any]]]:
    """Return a batch of a few samples, and the same split in two ways: both parts of one may have as many boxes."""
    # The samples differ in length and aren't the longest. A batch is split by its rows, since a collator may draw at
    # random; one that has no rows (a packed one) is collated anew in parts, if the order of the samples can be set.
    samples, order = trainer.train_dataset, None
    if reorders:
        order = np.arange(len(samples)) if lengths is None else np.argsort(lengths, kind="stable")
        order = np.resize(order[:: max(1, len(samples) // _SAMPLES)][:_SAMPLES], _SAMPLES).astype(np.int64)
    whole = first_batch(trainer, samples if order is None else view(samples, order), _SAMPLES)
    if not isinstance(whole, Mapping):
        return whole, []
    halves = (slice(0, _SPLIT_SAMPLES), slice(_SPLIT_SAMPLES, None)), (slice(0, None, 2), slice(1, None, 2))
    rows = [[cut(whole, part) for part in half] for half in halves if rows_of(whole, _SAMPLES) == _SAMPLES]
    if order is None:
        return whole, rows
    parts = [[first_batch(trainer, view(samples, order[p]), _SPLIT_SAMPLES) for p in half] for half in halves]
    # A part with as many rows as the whole has another dimension first, of time for example.
    return whole, rows if rows and rows_of(parts[0][0], _SPLIT_SAMPLES) == _SPLIT_SAMPLES else parts


@dataclasses.dataclass
class _Step:  # of a loop, as it was seen
    micro_batch: int
    samples: Counter[int] = dataclasses.field(default_factory=Counter)  # that were given to each outermost model
    # That models were given, by their first values, without those that another model, or a stage of one, has made.
    rows: set[bytes] = dataclasses.field(default_factory=set)
    gradients: list[Gradient] = dataclasses.field(default_factory=list)  # of each optimizer of torch's that stepped
    weights: list[torch.Tensor] = dataclasses.field(default_factory=list)  # the first ones of each of its parameters
    is_short: bool = False  # some weights or products have less than 32 bits

    @property
    def gradient(self) -> Gradient:
        return Gradient(math.hypot(*(g.norm for g in self.gradients)), torch.cat([g.elements for g in self.gradients]))

    def is_like(self, other: "_Step") -> bool:  # both begin from the same weights and are given the same samples
        is_same = len(self.weights) == len(other.weights) and all(map(torch.equal, self.weights, other.weights))
        return is_same and self.rows == other.rows and (bool(self.rows) or not self.samples)


def split_of_loop(request: ExamineRequest, file: Path) -> Split:
    """Measure a pickled loop at the baseline's micro-batch and at another; InputError: it takes other samples."""
    sizes = (request.config.per_device_train_batch_size, request.other)
    configs = [request.config.model_copy(update={"per_device_train_batch_size": n}) for n in sizes if n is not None]
    runs = []
    for config in configs:
        if isinstance(found := _run(request, config, file), str):
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
    rounding = _SHORT_ROUNDING if whole.is_short or split.is_short else _ROUNDING
    return compared(whole.gradient, again, split.gradient, shapes=(one, other), rounding=rounding, same_samples=same)


def _run(request: ExamineRequest, config: TrainConfig, file: Path, seeds: tuple[int, int] = (0, 0)) -> _Step | str:
    """Run one seeded step; return what was seen, or why there was none; InputError: it takes other samples."""
    own, steps = request.workload.own_step, request.workload.accumulation_steps(config)
    assert own is not None
    found = _Step(config.per_device_train_batch_size)
    set_seed(seeds[0])
    try:
        with _watched(found):
            step = step_of(own, config, steps, file)
            set_seed(seeds[1])
            said = loss_and_samples(step())[1]
            if config.parallelism.model_parallel > 1:  # torch's pipelines first run a micro-batch more, for its shapes
                rows = set(found.rows)
                found.samples.clear()
                step()
                found.rows = rows
    except Exception as error:  # whatever the user's code raises: the trial of the baseline tells of it, too
        if own_rank().is_launched:  # with it the others end, which may wait for this one
            raise
        traceback.print_exc()
        return f"with a micro-batch of {found.micro_batch} the step failed ({type(error).__name__}: {error})"
    counts = dict.fromkeys(found.samples.values() if said is None else [said])
    expected = steps * found.micro_batch  # by each rank, of its own samples or those that it shares
    if not counts or expected in counts:
        whole, *others = gathered(found)  # what all ranks saw, so that they come to the same decisions
        for other in others:
            whole.rows.update(other.rows)
            whole.gradients += other.gradients
            whole.weights += other.weights
            whole.is_short |= other.is_short
        return whole
    remedy = "run" if own.takes_accumulation else f"have {own.name} take {ACCUMULATION}, and run"
    raise InputError(
        f"step: with a micro-batch of {found.micro_batch} a step of {own.name} consumed "
        f"{' or '.join(map(str, counts))} samples, and {expected} are a step ({steps} x {found.micro_batch}): {remedy} "
        f"{ACCUMULATION} micro-batches in each step; a step that can't be counted from outside returns (loss, samples)"
    )


def loss_and_samples(returned: Any) -> tuple[Any, int | None]:
    """Return the loss that a step has returned and, if it returned (loss, samples), the samples."""
    if inspect.isgenerator(returned) or inspect.iscoroutine(returned):
        returned.close()
        raise InputError("the step made a generator or coroutine, which does nothing; have it do an optimizer step")
    if isinstance(returned, tuple) and len(returned) == 2 and isinstance(returned[1], int):
        return returned
    return returned, None


@contextmanager
def _watched(found: _Step) -> Iterator[None]:
    call, clip = nn.Module.__call__, nn.utils.clip_grad_norm_
    depth, known, stepped = 0, set(), set()

    def called(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        nonlocal depth
        if depth == 0 and next(module.parameters(), None) is not None:
            if id(module) not in known:
                known.add(id(module))
                stack.enter_context(still(module))
            inputs = tree_leaves([[dict(v) if isinstance(v, Mapping) else v for v in (*args, *kwargs.values())]])
            given = next((value for value in inputs if isinstance(value, torch.Tensor) and value.ndim), None)
            if given is not None and torch.is_grad_enabled():
                found.samples[id(module)] += rows_of({"": given}, found.micro_batch) or found.micro_batch
                # A row is known by its first values, which padding on the right leaves alone.
                values = given.detach().reshape(len(given), -1)[:, :8].double().cpu()
                found.rows.update(row.numpy().tobytes() for row in values if not given.requires_grad)
        found.is_short |= any(map(torch.is_autocast_enabled, ("cpu", "cuda")))
        depth += 1
        try:
            return call(module, *args, **kwargs)
        finally:
            depth -= 1

    def about_to_step(optimizer: Optimizer, *_: Any) -> None:
        if id(optimizer) not in stepped:
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


def is_short(parameters: Iterable[torch.Tensor]) -> bool:
    """Return whether a weight has less than 32 bits, or products are TF32, whose mantissa has 10 bits as fp16's."""
    of_16_bits = any(p.is_floating_point() and p.element_size() < 4 for p in parameters)
    return of_16_bits or (torch.cuda.is_available() and torch.backends.cuda.matmul.fp32_precision == "tf32")


@contextmanager
def randomness_off(model: nn.Module) -> Iterator[bool]:
    """Set every rate of `model` to zero while entered; yield whether there is any above."""
    modules = list(model.modules())
    configs = {id(c): c for m in modules if (c := getattr(m, "config", None)) is not None and hasattr(c, "to_dict")}
    holders = [*modules, *configs.values()]
    rates = [(h, name, value) for h in holders for name, value in vars(h).items() if is_rate(h, name, value)]
    with ExitStack() as stack:
        for holder, name, value in rates:
            stack.enter_context(patch.object(holder, name, type(value)(0)))
        yield bool(rates)


@contextmanager
def still(model: nn.Module) -> Iterator[None]:
    """Keep every rate at zero and batch norm at its running statistics while entered, whoever calls `train`."""
    with randomness_off(model), ExitStack() as stack:
        for layer in (m for m in model.modules() if isinstance(m, _BatchNorm)):
            stack.callback(layer.train, layer.training)
            stack.enter_context(patch.object(layer.eval(), "train", lambda mode=True, layer=layer: layer))
        yield
