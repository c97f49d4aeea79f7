"""Traces a family of configurations and returns its profile.

The model is traced with few layers and extended, or whole where its layers don't repeat. Tensors are those of the meta
device; of a model that can't run there fake tensors, and where operators depend on values real ones, on the CPU.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from autotune.cost import quantized
from autotune.cost.autocast import seen_autocast
from autotune.cost.extend import Extended, NotLinear, Pair, extend, peaks, stretch, stretches
from autotune.cost.family import Family, Shape
from autotune.cost.kinds import CONTRACTION
from autotune.cost.layers import Layers, layers_of
from autotune.cost.parts import part_of
from autotune.cost.profile import Excerpt, ParameterGroup, Profile, Repeat
from autotune.cost.tensors import is_fake, quiet, tensors_of
from autotune.cost.trace import micro_step
from autotune.errors import InputError, one_line
from autotune.training.arguments import routing
from autotune.training.depth import Stack, shallower, stacks, without_chance
from autotune.values.adapters import is_new_weight
from autotune.values.estimate import TracedBy
from autotune.values.model import ModelSpec

# Micro-batches that are traced. Not 1: tensors of one sample are contiguous where others aren't.
SAMPLES = (2, 4)

# Weights of a model that is really run.
MOST_REAL_BYTES = 2 << 30

WAYS: tuple[TracedBy, ...] = ("meta", "fake", "run")

Change = Callable[[Any], Any]


class Untraceable(Exception):
    """The model doesn't run with this kind of tensors."""


@dataclass(frozen=True)
class Shallow:
    """What was traced of a model with few layers."""

    pair: Pair
    parameters: list[ParameterGroup]
    buffers_bytes: int
    layers: Layers


# What was traced, by family without its pipeline, depths and kind of tensors: stages of any depth share it.
Known = dict[tuple[object, ...], Shallow]


def profile(
    spec: ModelSpec,
    family: Family,
    shape: Shape,
    *,
    parameters: int | None = None,
    change: Change | None = None,
    known: Known | None = None,
) -> Profile:
    """Return the profile of `family` for inputs of `shape`.

    Args:
        spec: The model.
        family: What is run.
        shape: What it is fed with.
        parameters: The model's parameters, adapters left out, if known: what an extended trace has to come to.
        change: Makes the built model the one that is trained, before the adapter is put on; as for libraries of
            another time.
        known: What was traced of this model and shape before, to be used and added to.

    Raises:
        InputError: The model can't be built or traced.
    """
    reasons = []
    known = {} if known is None else known
    for way in WAYS:
        try:
            return _by(way, spec, family, shape, parameters, change, known)
        except Exception as error:  # fake and real tensors may raise anything where meta tensors could not run
            if way == "meta" and not isinstance(error, NotLinear | Untraceable):
                raise
            reasons.append(one_line(error))
    raise InputError(f"{spec.name}: can't be traced, so there is no prediction: {reasons[0]}")


def _by(
    way: TracedBy,
    spec: ModelSpec,
    family: Family,
    shape: Shape,
    parameters: int | None,
    change: Change | None,
    known: Known,
) -> Profile:
    """Return the profile as traced with one kind of tensors."""
    from autotune.training.build import build_config

    config = part_of(without_chance(build_config(spec, shape.task)), family)
    if (family.tensor_parallel, family.pipeline_parallel) != (1, 1):
        parameters = None  # those of the whole model
    found = stacks(config, family.checkpointed_every)
    if found and all(s.depth > s.base for s in found):
        with contextlib.suppress(NotLinear):
            extended = _extended(spec, config, found, family, shape, change, way, known)
            if parameters is None or _base_parameters(extended[1]) == parameters:
                return _profile(family, *extended, way, _hidden_bytes(config, family, shape))
    whole = _extended(spec, config, (), family, shape, change, way, {})
    return _profile(family, *whole, way, _hidden_bytes(config, family, shape))


def _extended(
    spec: ModelSpec,
    config: Any,
    found: tuple[Stack, ...],
    family: Family,
    shape: Shape,
    change: Change | None,
    way: TracedBy,
    known: Known,
) -> tuple[Extended, Counter[ParameterGroup], int, Excerpt, Layers]:
    """Return the micro-step, the parameters and the bytes of buffers at full depth, an excerpt and the layers."""
    base = {s.field: s.base for s in found}
    depths = [base, *({**base, s.field: s.base + s.period} for s in found)]

    def traced_at(depth: dict[str, int]) -> Shallow:
        which = (family.model_copy(update={"pipeline_parallel": 1}), tuple(depth.items()), way)
        if which not in known:
            known[which] = _shallow(spec, shallower(config, depth), family, shape, change, way)
        return known[which]

    traced = [traced_at(depth) for depth in depths]
    more = [round(s.more) for s in found]
    excerpt = _excerpt(traced[0], [])
    if found:
        deepest = {s.field: s.base + s.period for s in found}
        deeper = traced_at(deepest)
        lacking = [traced_at({**deepest, s.field: s.base}) for s in found]
        excerpt = _excerpt(deeper, [_repeat(one, deeper, n - 1) for one, n in zip(lacking, more, strict=True)])
    groups = [Counter(t.parameters) for t in traced]
    total, buffer_bytes, layers = groups[0].copy(), traced[0].buffers_bytes, traced[0].layers
    for times, group, deep in zip(more, groups[1:], traced[1:], strict=False):
        for key in group.keys() | groups[0].keys():
            total[key] += times * (group[key] - groups[0][key])
        buffer_bytes += times * (deep.buffers_bytes - traced[0].buffers_bytes)
        layers = layers.with_more(times * (deep.layers.count - traced[0].layers.count))
    step = extend(traced[0].pair, [t.pair for t in traced[1:]], more)
    return step, total, buffer_bytes, excerpt, layers


def _shallow(
    spec: ModelSpec, config: Any, family: Family, shape: Shape, change: Change | None, way: TracedBy
) -> Shallow:
    """Trace a model."""
    with quiet(), tensors_of(way):
        model = build(spec, config, family, shape, change, device="meta" if way == "meta" else "cpu")
        pair = _pair(model, family, shape)
    parameters = _groups(model)
    return Shallow(
        pair=pair,
        parameters=parameters,
        buffers_bytes=sum(b.numel() * b.element_size() for b in model.buffers()),
        layers=layers_of([name for name, _ in model.named_parameters()], parameters),
    )


def _pair(model: Any, family: Family, shape: Shape) -> Pair:
    try:
        with seen_autocast(family):
            low, high = (micro_step(model, family, shape, samples) for samples in SAMPLES)
    # What torch (no kernel for these tensors, a value that isn't there) and models' own code raise without values.
    except (RuntimeError, NotImplementedError, ValueError, TypeError, AttributeError, KeyError, IndexError) as error:
        raise Untraceable(one_line(error)) from error
    return Pair(samples=SAMPLES, tapes=(low, high))


def build(
    spec: ModelSpec, config: Any, family: Family, shape: Shape, change: Change | None, *, device: str = "meta"
) -> Any:
    """Return the model on a device, its adapter put on.

    Raises:
        Untraceable: It is too large to be made of real tensors.
    """
    from autotune.training.build import build_model

    flash = (family.attn_implementation or "").startswith("flash_attention")
    if device != "meta" and not is_fake():
        _check_size(build(spec, config, family, shape, change))
    model = build_model(
        spec,
        shape.task,
        dtype=family.dtype,
        attn_implementation="sdpa" if flash else family.attn_implementation,
        device=device,
        experts_implementation=family.experts_implementation,
        config=config,
        **routing(family.experts_per_token, family.expert_capacity),
    )
    model.config.use_cache = False
    if flash:  # not asked of the library, which refuses what isn't installed
        model.config._attn_implementation = "flash_attention_2"
    if change is not None:
        model = change(model)
    if family.quantization is not None:
        if device != "meta":
            raise Untraceable(f"layers of {family.quantization} weights are traced on the meta device alone")
        quantized.pack(model, family, shape.task)
    if family.adapter is not None:
        from autotune.training.adapters import adapter_arguments, put_on

        try:
            model = put_on(model, adapter_arguments(family.adapter, shape.task))
        except ValueError as error:
            raise InputError(f"{spec.name}: the adapter can't be put on: {one_line(error)}") from error
    return model


def _check_size(model: Any) -> None:
    nbytes = sum(p.numel() * p.element_size() for p in model.parameters())
    if nbytes > MOST_REAL_BYTES:
        raise Untraceable(f"its operators depend on values, and {nbytes / 2**30:.1f} GiB are too much for a real run")


def _repeat(shallow: Shallow, deeper: Shallow, times: int) -> Repeat:
    """Return where `deeper` has the layer that `shallow` lacks."""
    forward, backward = stretches(shallow.pair.tapes[0], deeper.pair.tapes[0])
    parameters = stretch(shallow.parameters, deeper.parameters)
    return Repeat(forward=forward, backward=backward, parameters=parameters, times=times)


def _excerpt(traced: Shallow, repeats: list[Repeat]) -> Excerpt:
    pair = traced.pair
    tape = pair.tapes[0]
    made, freed, _, gradient = tape.storages.T
    if pair.tapes[1].storages.shape != tape.storages.shape:
        raise NotLinear("the tensors change with the micro-batch")
    sizes = pair.lines("storages")[:, 2]
    rows = zip(made.astype(int), freed.astype(int), sizes[:, 0], sizes[:, 1], gradient > 0, strict=True)
    products = np.flatnonzero(tape.kinds == CONTRACTION)
    firsts = [products[products < tape.forward_end][:1], products[products >= tape.forward_end][:1]]
    return Excerpt(
        storages=tuple(rows),
        parameters=tuple(traced.parameters),
        repeats=tuple(sorted(repeats, key=lambda r: r.forward)),
        workspaces=tuple(int(p) for p in np.concatenate(firsts)),
        forward_end=tape.forward_end,
    )


def _groups(model: Any) -> list[ParameterGroup]:
    """Return the parameters in the order they were made."""
    tables = {id(m.weight) for m in model.modules() if isinstance(m, torch.nn.Embedding)}
    packed = {id(m.weight): found for m in model.modules() if (found := quantized.weight_of(m)) is not None}
    return [
        ParameterGroup(
            shape=packed.get(id(p), (tuple(p.shape), 0))[0],
            element_bytes=packed.get(id(p), ((), p.element_size()))[1],
            trained=p.requires_grad,
            embedding=id(p) in tables,
            adapter=is_new_weight(name),
            count=1,
        )
        for name, p in model.named_parameters()
    ]


def _base_parameters(groups: Counter[ParameterGroup]) -> int:
    return sum(g.elements * count for g, count in groups.items() if not g.adapter)


def _profile(
    family: Family,
    step: Extended,
    groups: Counter[ParameterGroup],
    buffers_bytes: int,
    excerpt: Excerpt,
    layers: Layers,
    way: TracedBy,
    hidden_bytes: float,
) -> Profile:
    return Profile(
        family=family,
        parameters=tuple(g.model_copy(update={"count": count}) for g, count in groups.items() if count),
        buffers_bytes=buffers_bytes,
        peaks_first=peaks(step, accumulated=False),
        peaks_later=peaks(step, accumulated=True),
        work=step.work,
        excerpt=excerpt,
        needed_flops=step.needed_flops,
        attention=step.attention,
        traced_by=way,
        layer=layers.largest,
        outside=layers.outside,
        layers=max(1, layers.count),
        hidden_bytes=hidden_bytes,
    )


def _hidden_bytes(config: Any, family: Family, shape: Shape) -> float:
    """Return the bytes of one sample's hidden states, 0 where the config doesn't say their width."""
    width = getattr(config, "hidden_size", None) or getattr(config, "d_model", None)
    half = family.autocast is not None or family.dtype != "float32"
    return float(shape.length * width * (2 if half else 4)) if isinstance(width, int) else 0.0
