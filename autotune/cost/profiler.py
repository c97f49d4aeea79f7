"""Traces a family of configurations and returns its profile.

The model is traced with few layers and extended, or whole where its layers don't repeat. Tensors are those of the meta
device; of a model that can't run there fake tensors, and where operators depend on values real ones, on the CPU.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from autotune.cost import quantized
from autotune.cost.extend import Extended, NotLinear, Pair, extend, line, peaks, stretch, stretches
from autotune.cost.family import Family, Shape
from autotune.cost.post_training import generation_of, scored
from autotune.cost.profile import PRODUCTS, Excerpt, ForwardPass, ParameterGroup, Profile, Repeat, layers_of
from autotune.cost.tape import ACTIVATION, Tape
from autotune.cost.trace import evaluation_step, inputs_bytes, micro_step
from autotune.cost.traced_model import Change, Untraceable, build, quiet, tensors_of
from autotune.errors import InputError, one_line
from autotune.training.build import build_config, frozen_layers
from autotune.training.depth import Stack, shallower, stacks, without_chance
from autotune.values.adapters import is_new_weight
from autotune.values.estimate import TracedBy
from autotune.values.model import ModelSpec, Task
from autotune.values.techniques import CHECKPOINTING

# Micro-batches that are traced. Not 1: tensors of one sample are contiguous where others aren't.
SAMPLES = (2, 4)

WAYS: tuple[TracedBy, ...] = ("meta", "fake", "run")


@dataclass(frozen=True)
class Shallow:
    """What was traced of a model with few layers."""

    pair: Pair
    evaluation: Pair | None
    parameters: list[ParameterGroup]
    names: list[str]
    buffers_bytes: int


# What was traced, by family, depths and kind of tensors.
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
        family: How it is run.
        shape: Its inputs.
        parameters: Number of the model's parameters without adapters, which an extended trace has to come to; None:
            not known.
        change: Makes the built model the one that is trained, before the adapter is put on, as for libraries of another
            time.
        known: What was traced of this model and shape before; it is used and added to.

    Raises:
        InputError: The model can't be built or traced.
    """
    reasons = []
    shape = shape.part(family.sequence_parallel)
    known = {} if known is None else known
    for way in WAYS:
        try:
            return _Profiler(spec, family, shape, change, way, known).profile(parameters)
        except Exception as error:  # fake and real tensors may raise anything where meta tensors could not run
            if way == "meta" and not isinstance(error, NotLinear | Untraceable):
                raise
            reasons.append(one_line(error))
    raise InputError(f"{spec.name}: can't be traced, so there is no prediction: {reasons[0]}")


@dataclass(frozen=True)
class _Profiler:
    """Traces one family with one kind of tensors."""

    spec: ModelSpec
    family: Family
    shape: Shape
    change: Change | None
    way: TracedBy
    known: Known

    def profile(self, parameters: int | None) -> Profile:
        """Return the profile, extended from few layers if that comes to so many parameters, else traced whole."""
        config = without_chance(build_config(self.spec, self.shape.task))
        if self.family.tensor_parallel > 1:
            parameters = None  # those of the whole model
        found = stacks(config, self.family.checkpointed_every, frozen_layers(self.spec.frozen))
        if found and all(s.depth > s.base for s in found):
            with contextlib.suppress(NotLinear):
                return self._extended(config, found, parameters)
        return replace(self, known={})._extended(config, (), None)

    def _extended(self, config: Any, found: tuple[Stack, ...], parameters: int | None) -> Profile:
        """Return the profile at full depth, from traces with few layers of each stack; no stacks: traced whole.

        Raises:
            NotLinear: The traces don't agree, or don't come to so many parameters.
        """
        base = {s.field: s.base for s in found}
        traced = [
            self._traced(config, depth) for depth in (base, *({**base, s.field: s.base + s.period} for s in found))
        ]
        more = [round(s.more) for s in found]
        deeper, lacking = traced[0], []
        if found and self.family.device == "cuda":  # of a CPU's allocator nothing is replayed
            deepest = {s.field: s.base + s.period for s in found}
            deeper = self._traced(config, deepest)
            lacking = [self._traced(config, {**deepest, s.field: s.base}) for s in found]
        lacks = list(zip(lacking, more, strict=False))
        excerpt = _excerpt(deeper, [_repeat(one, deeper, n - 1) for one, n in lacks])
        groups = [Counter(t.parameters) for t in traced]
        found_layers = [layers_of(t.names, t.parameters) for t in traced]
        total, buffers_bytes, layers = groups[0].copy(), traced[0].buffers_bytes, found_layers[0].count
        for times, group, deep, its_layers in zip(more, groups[1:], traced[1:], found_layers[1:], strict=True):
            for key in group.keys() | groups[0].keys():
                total[key] += times * (group[key] - groups[0][key])
            buffers_bytes += times * (deep.buffers_bytes - traced[0].buffers_bytes)
            layers += times * (its_layers.count - found_layers[0].count)
        counted = sum(count * group.elements for group, count in total.items() if not group.adapter)
        if parameters not in (None, counted):
            raise NotLinear(f"{counted} parameters instead of {parameters}")
        step = extend(traced[0].pair, [t.pair for t in traced[1:]], more)
        made = Profile(
            family=self.family,
            parameters=tuple(g.model_copy(update={"count": count}) for g, count in total.items() if count),
            buffers_bytes=buffers_bytes,
            peaks_first=peaks(step, accumulated=False),
            peaks_later=peaks(step, accumulated=True),
            work=step.work,
            excerpt=excerpt,
            needed_flops=step.needed_flops,
            attention=step.attention,
            traced_by=self.way,
            evaluation=None if self.shape.recipe else self._forward_pass(config, traced, more, (deeper, lacks)),
            layer=found_layers[0].largest,
            outside=found_layers[0].outside,
            layers=max(1, layers),
            inputs_bytes=inputs_bytes(config, self.shape) if self.family.device == "cuda" else 0.0,
            hidden_bytes=self._hidden_bytes(config),
        )
        return self._scored(made, config, step, traced, more, (deeper, lacks))

    def _scored(
        self,
        made: Profile,
        config: Any,
        step: Extended,
        traced: Sequence[Shallow],
        more: Sequence[int],
        excerpted: tuple[Shallow, list[tuple[Shallow, int]]],
    ) -> Profile:
        """Return the profile with the passes without gradients that a recipe has."""
        kind = self.shape.kind
        if kind is None or not (kind.scorings or kind.generates):
            return made
        base, *more_layers = (_passing(one) for one in traced)
        one = extend(base.pair, [other.pair for other in more_layers], more)
        excerpt = _pass_excerpt(*excerpted)
        saved = line(step.live[traced[0].pair.tapes[0].forward_end - 1, ACTIVATION])
        moments = peaks(one, accumulated=False)
        if kind.generates:
            how = generation_of(config, self.shape, made, one, moments)
            made = made.model_copy(update={"generation": how})
        return scored(made, kind, saved, one, moments, excerpt)

    def _forward_pass(
        self,
        config: Any,
        traced: Sequence[Shallow],
        more: Sequence[int],
        excerpted: tuple[Shallow, list[tuple[Shallow, int]]],
    ) -> ForwardPass | None:
        """Return the forward pass of an evaluation at full depth, None where the traces don't agree."""
        on_cuda = self.family.device == "cuda"
        with contextlib.suppress(NotLinear):
            base, *deeper = (_passing(one).pair for one in traced)
            step = extend(base, deeper, more)
            return ForwardPass(
                peaks=peaks(step, accumulated=False),
                outputs_bytes=line(base.lines("outputs_bytes")),
                excerpt=_pass_excerpt(*excerpted) if on_cuda else None,
                inputs_bytes=inputs_bytes(config, self.shape) if on_cuda else 0.0,
            )
        return None

    def _traced(self, config: Any, depth: dict[str, int]) -> Shallow:
        """Return what is traced at a depth of each stack, now or before."""
        family = self.family
        rest = (tuple(depth.items()), self.way)
        if (family, *rest) not in self.known:
            others = (family.model_copy(update={"checkpointing": kind}) for kind in ("none", *CHECKPOINTING))
            like = next((found for other in others if (found := self.known.get((other, *rest)))), None)
            self.known[family, *rest] = self._shallow(shallower(config, depth), like)
        return self.known[family, *rest]

    def _shallow(self, config: Any, like: Shallow | None) -> Shallow:
        """Trace the model of a config; `like`: what differs in checkpointing, which no evaluation has."""
        device = "meta" if self.way == "meta" else "cpu"
        with quiet(), tensors_of(self.way):
            model = build(self.spec, config, self.family, self.shape, self.change, device=device)
            pair = self._pair(model, micro_step)
            evaluation = None if like is None else like.evaluation
            with contextlib.suppress(NotLinear, Untraceable):
                evaluation = evaluation or self._pair(model, evaluation_step)
        return Shallow(
            pair=pair,
            evaluation=evaluation,
            parameters=_groups(model, has_unused=self.shape.task in (Task.IMAGE_TEXT_TO_TEXT, Task.CAUSAL_LM)),
            names=[name for name, _ in model.named_parameters()],
            buffers_bytes=sum(b.numel() * b.element_size() for b in model.buffers()),
        )

    def _pair(self, model: Any, step: Callable[[Any, Family, Shape, int], Tape]) -> Pair:
        try:
            low, high = (step(model, self.family, self.shape, samples) for samples in SAMPLES)
        # What torch (no kernel for these tensors, a value that isn't there) and models' own code raise without values.
        except (RuntimeError, NotImplementedError, ValueError, TypeError, AttributeError, LookupError) as error:
            raise Untraceable(one_line(error)) from error
        return Pair(samples=SAMPLES, tapes=(low, high))

    def _hidden_bytes(self, config: Any) -> float:
        """Return the bytes of one sample's hidden states, 0 where the config doesn't say their width."""
        text = config.get_text_config()
        width = getattr(text, "hidden_size", None) or getattr(text, "d_model", None)
        half = self.family.autocast is not None or self.family.dtype != "float32"
        return float(self.shape.length * width * (2 if half else 4)) if isinstance(width, int) else 0.0


def _passing(traced: Shallow) -> Shallow:
    """Return what was traced with the pass without gradients in place of the micro-step.

    Raises:
        NotLinear: That pass can't be traced.
    """
    if traced.evaluation is None:
        raise NotLinear("the pass without gradients can't be traced")
    return replace(traced, pair=traced.evaluation)


def _pass_excerpt(deeper: Shallow, lacks: Sequence[tuple[Shallow, int]]) -> Excerpt:
    """Return the excerpt of the pass without gradients."""
    last = _passing(deeper)
    return _excerpt(last, [_repeat(_passing(lack), last, n - 1) for lack, n in lacks])


def _repeat(shallow: Shallow, deeper: Shallow, times: int) -> Repeat:
    """Return where `deeper` has the layer that `shallow` lacks."""
    forward, backward = stretches(shallow.pair.tapes[0], deeper.pair.tapes[0])
    parameters = stretch(shallow.parameters, deeper.parameters)
    return Repeat(forward=forward, backward=backward, parameters=parameters, times=times)


def _excerpt(traced: Shallow, repeats: list[Repeat]) -> Excerpt:
    pair = traced.pair
    tape = pair.tapes[0]
    made, freed, _, gradient, columns = tape.storages.T
    if pair.tapes[1].storages.shape != tape.storages.shape:
        raise NotLinear("the tensors change with the micro-batch")
    sizes = pair.lines("storages")[:, 2]
    places, kinds = (made.astype(int), freed.astype(int)), (gradient > 0, columns.astype(int))
    rows = zip(*places, sizes[:, 0], sizes[:, 1], *kinds, strict=True)
    products = np.flatnonzero(np.isin(tape.kinds, PRODUCTS))
    origins = {origin: at for at, origin in enumerate(dict.fromkeys(tape.origins))}
    firsts = [products[products < tape.forward_end][:1], products[products >= tape.forward_end][:1]]
    return Excerpt(
        storages=tuple(rows),
        parameters=tuple(traced.parameters),
        repeats=tuple(sorted(repeats, key=lambda r: r.forward)),
        workspaces=tuple(int(p) for p in np.concatenate(firsts)),
        forward_end=tape.forward_end,
        origins=tuple(origins),
        origin=tuple(origins[o] for o in tape.origins),
        names=tuple(traced.names),
    )


def _groups(model: Any, *, has_unused: bool) -> list[ParameterGroup]:
    """Return the parameters of a traced model in the order they were made.

    With `has_unused` those that get no gradient have no optimizer states either, as CLIP's last layer in LLaVA, or the
    vision part of a model that is shown texts alone.
    """
    tables = {id(m.weight) for m in model.modules() if isinstance(m, torch.nn.Embedding)}
    packed = {id(m.weight): found for m in model.modules() if (found := quantized.weight_of(m)) is not None}
    return [
        ParameterGroup(
            shape=packed.get(id(p), (tuple(p.shape), 0))[0],
            element_bytes=packed.get(id(p), ((), p.element_size()))[1],
            trained=p.requires_grad and not (has_unused and p.grad is None),
            embedding=id(p) in tables,
            adapter=is_new_weight(name),
            count=1,
        )
        for name, p in model.named_parameters()
    ]
