"""Traces a family of configurations and returns its profile.

The whole model runs at two micro-batches, by which every tensor is a line in the micro-batch. Tensors are those of the
meta device; of a model that can't run there fake tensors, and where operators depend on values real ones, on the CPU.
"""

from __future__ import annotations

import contextlib
import gc
import re
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from autotune.cost import quantized
from autotune.cost.family import Family, Shape
from autotune.cost.post_training import generation_of, scored
from autotune.cost.profile import (
    FUSED_ATTENTION,
    PRODUCTS,
    ForwardPass,
    Line,
    ParameterGroup,
    Profile,
    Storages,
    Vector,
    Work,
    layers_of,
)
from autotune.cost.tape import Tape
from autotune.cost.time import as_line, attends
from autotune.cost.trace import evaluation_step, make_inputs, micro_step
from autotune.cost.traced_model import Change, Untraceable, build, tensors_of
from autotune.errors import InputError, one_line
from autotune.training.build import build_config, without_chance
from autotune.values.estimate import TracedBy
from autotune.values.model import ModelSpec, Task
from autotune.values.techniques import is_new_weight

# Micro-batches that are traced. Not 1: tensors of one sample are contiguous where others aren't.
SAMPLES = (2, 4)

WAYS: tuple[TracedBy, ...] = ("meta", "fake", "run")

_NUMBER = re.compile(r"\.\d+(?=\.|$)")


class Pass(NamedTuple):
    """What the tapes of a pass at two micro-batches say of any."""

    storages: Storages
    work: tuple[Work, ...]
    needed: Line  # FLOP
    outputs: Line  # bytes
    attention: tuple[str, ...]


# The passes without gradients that were traced, None where they can't be: by family and kind of tensors.
Passes = dict[tuple[Family, TracedBy], Pass | None]


def profile(
    spec: ModelSpec, family: Family, shape: Shape, *, change: Change | None = None, known: Passes | None = None
) -> Profile:
    """Return the profile of `family` for inputs of `shape`.

    Args:
        spec: The model.
        family: How it is run.
        shape: Its inputs.
        change: Makes the built model the one that is trained, before the adapter is put on, as for libraries of another
            time.
        known: What was traced of this model and shape before; it is used and added to.

    Raises:
        InputError: The model can't be built or traced.
    """
    reasons = []
    shape = shape.part(family.sequence_parallel)
    for way in WAYS:
        try:
            return _traced(spec, family, shape, change, way, {} if known is None else known)
        except Exception as error:  # fake and real tensors may raise anything where meta tensors could not run
            if way == "meta" and not isinstance(error, Untraceable):
                raise
            reasons.append(one_line(error))
    raise InputError(f"{spec.name}: can't be traced, so there is no prediction: {reasons[0]}")


def _traced(
    spec: ModelSpec, family: Family, shape: Shape, change: Change | None, way: TracedBy, known: Passes
) -> Profile:
    """Return the profile by one kind of tensors."""
    config = without_chance(build_config(spec, shape.task))
    kind, key = shape.kind, (family.model_copy(update={"checkpointing": "none"}), way)  # which no evaluation has
    scores = kind is None or kind.generates or kind.scorings > 0
    with warnings.catch_warnings(action="ignore"), tensors_of(way), _uncollected():
        model = build(spec, config, family, shape, change, device="meta" if way == "meta" else "cpu")
        step = _pass(model, micro_step, family, shape)
        if scores and key not in known:
            try:
                known[key] = _pass(model, evaluation_step, family, shape)
            except Untraceable:
                known[key] = None
    made = _groups(model, has_unused=shape.task in (Task.IMAGE_TEXT_TO_TEXT, Task.CAUSAL_LM))
    names, counted = [name for name, _ in model.named_parameters()], Counter(made)
    places, (largest, outside, layers) = {group: at for at, group in enumerate(counted)}, layers_of(names, made)
    inputs = make_inputs(config, shape, shape.kind.sequences if shape.kind else 1).values()  # of a sample
    text = config.get_text_config()
    width = getattr(text, "hidden_size", None) or getattr(text, "d_model", None)
    traced = Profile(
        family=family,
        parameters=tuple(group.model_copy(update={"count": count}) for group, count in counted.items()),
        order=tuple(places[group] for group in made),
        names=tuple(names),
        buffers_bytes=sum(b.numel() * b.element_size() for b in model.buffers()),
        storages=step.storages,
        work=step.work,
        needed_flops=step.needed,
        attention=step.attention,
        traced_by=way,
        layer=largest,
        outside=outside,
        layers=max(1, layers),
        inputs_bytes=float(sum(tensor.nbytes for tensor in inputs)) if family.device == "cuda" else 0.0,
        hidden_bytes=float(shape.length * width * (2 if family.half else 4)) if isinstance(width, int) else 0.0,
    )
    forward = known[key] if scores else None
    if forward is None:
        if scores and kind is not None:
            raise Untraceable("the pass without gradients can't be traced")
        return traced
    if kind is None:
        found = ForwardPass(storages=forward.storages, outputs_bytes=forward.outputs, inputs_bytes=traced.inputs_bytes)
        return traced.model_copy(update={"evaluation": found})
    if kind.generates:
        how = generation_of(config, shape, traced, forward.work, forward.storages)
        traced = traced.model_copy(update={"generation": how})
    return scored(traced, kind, forward.work, forward.needed, forward.storages)


@contextlib.contextmanager
def _uncollected() -> Iterator[None]:
    """Collect no garbage inside: of many small values, which a trace makes, it takes a quarter of the time."""
    before = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if before:
            gc.enable()


def _pass(model: Any, step: Callable[[Any, Family, Shape, int], Tape], family: Family, shape: Shape) -> Pass:
    try:
        low, high = (step(model, family, shape, samples) for samples in SAMPLES)
    # What torch (no kernel for these tensors, a value that isn't there) and models' own code raise without values.
    except (RuntimeError, NotImplementedError, ValueError, TypeError, AttributeError, LookupError) as error:
        raise Untraceable(one_line(error)) from error
    return joined(SAMPLES, low, high)


def joined(samples: tuple[int, int], low: Tape, high: Tape) -> Pass:
    """Return the tapes of two micro-batches as one pass.

    Raises:
        Untraceable: They don't run the same operators or don't make as many tensors.
    """
    if low.names != high.names or low.storages.shape != high.storages.shape:
        raise Untraceable("operators or tensors change with the micro-batch")

    def lines(name: str) -> Vector:
        """Return an array of the tapes as lines: the last axis is (constant, per sample)."""
        one, other = (np.asarray(getattr(tape, name), dtype=float) for tape in (low, high))
        slope = (other - one) / (samples[1] - samples[0])
        return np.stack([one - slope * samples[0], slope], axis=-1)

    flops, products = lines("flops"), np.isin(low.kinds, PRODUCTS)
    counted = np.concatenate([flops, lines("moved_bytes")], axis=1).tolist()
    rows = zip(low.kinds.tolist(), low.half.tolist(), map(tuple, counted), low.calls, high.calls, strict=True)
    work = tuple(
        Work(
            kind=kind, half=half, flops=_line(found[:2]), moved_bytes=_line(found[2:]), count=count,
            attends=kind == FUSED_ATTENTION or attends(one, other), call=as_line(one, other, samples),
        )
        for (kind, half, found, one, other), count in Counter(rows).items()
    )  # fmt: skip
    made_by = [(_NUMBER.sub(".*", module), operator) for module, operator in low.origins]  # in layers alike
    origins = {origin: at for at, origin in enumerate(dict.fromkeys(made_by))}
    at, end = np.flatnonzero(products), low.forward_end
    storages = Storages.of(
        np.column_stack(
            [low.storages[:, :2], lines("storages")[:, 2], low.storages[:, 3:], [origins[one] for one in made_by]]
        ),
        forward_end=end,
        workspaces=tuple(int(first) for part in (at[at < end], at[at >= end]) for first in part[:1]),
        origins=tuple(origins),
    )
    needed = flops[products & ~low.recomputed].sum(axis=0)
    return Pass(storages, work, _line(needed), _line(lines("outputs_bytes")), low.attention)


def _line(values: Sequence[float] | Vector) -> Line:
    return Line(constant=float(values[0]), per_sample=float(values[1]))


def _groups(model: Any, *, has_unused: bool) -> list[ParameterGroup]:
    """Return the parameters of a traced model in the order they were made.

    With `has_unused` those that get no gradient have no optimizer states either, as CLIP's last layer in LLaVA, or the
    vision part of a model that is shown texts alone.
    """
    tables = {id(m.weight) for m in model.modules() if isinstance(m, torch.nn.Embedding)}
    packed = {id(m.weight): found for m in model.modules() if (found := quantized.weight_of(m)) is not None}
    groups = []
    for name, p in model.named_parameters():
        shape, width = packed.get(id(p), (tuple(p.shape), p.element_size()))
        trained = p.requires_grad and not (has_unused and p.grad is None)
        is_table, is_new = id(p) in tables, is_new_weight(name)
        groups.append(
            ParameterGroup(
                shape=shape, element_bytes=width, trained=trained, embedding=is_table, adapter=is_new, count=1
            )
        )
    return groups
