"""Traces a family of configurations and returns its profile.

The model is traced with few layers and extended, or whole where its layers don't repeat. Tensors are those of the meta
device; of a model that can't run there fake tensors, and where operators depend on values real ones, on the CPU.
"""

from __future__ import annotations

import contextlib
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch

from autotune.cost import quantized
from autotune.cost.family import Family, Shape
from autotune.cost.full_depth import NotLinear, Pass, joined, line, order_of, storages_of, work_of
from autotune.cost.post_training import generation_of, scored
from autotune.cost.profile import ForwardPass, ParameterGroup, Profile, layers_of
from autotune.cost.tape import Tape
from autotune.cost.trace import evaluation_step, inputs_bytes, micro_step
from autotune.cost.traced_model import Change, Untraceable, build, tensors_of
from autotune.errors import InputError, one_line
from autotune.training.build import Stack, build_config, frozen_layers, shallower, stacks, without_chance
from autotune.values.estimate import TracedBy
from autotune.values.model import ModelSpec, Task
from autotune.values.techniques import CHECKPOINTING, is_new_weight

# Micro-batches that are traced. Not 1: tensors of one sample are contiguous where others aren't.
SAMPLES = (2, 4)

WAYS: tuple[TracedBy, ...] = ("meta", "fake", "run")


class Shallow(NamedTuple):
    """What was traced of a model with few layers."""

    step: Pass
    evaluation: Pass | None  # the forward pass without gradients; None: it can't be traced
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
        depths = {s.field: s.base + s.period for s in found}
        deep = self._traced(config, depths)
        lacking = [self._traced(config, {**depths, s.field: s.base}) for s in found]
        times = [round(s.more) - 1 for s in found]
        made = order_of(deep.parameters, [short.parameters for short in lacking], times)
        groups = Counter(deep.parameters[at] for at in made)
        counted = sum(count * group.elements for group, count in groups.items() if not group.adapter)
        if parameters not in (None, counted):
            raise NotLinear(f"{counted} parameters instead of {parameters}")
        layer, outside, count = layers_of(deep.names, deep.parameters)
        fewer = [layers_of(t.names, t.parameters)[2] for t in lacking]
        places = {group: at for at, group in enumerate(groups)}
        steps = deep.step, [short.step for short in lacking], times
        work, needed = work_of(*steps)
        traced = Profile(
            family=self.family,
            parameters=tuple(group.model_copy(update={"count": count}) for group, count in groups.items()),
            order=tuple(places[deep.parameters[at]] for at in made),
            names=tuple(deep.names[at] for at in made),
            buffers_bytes=deep.buffers_bytes
            + sum(n * (deep.buffers_bytes - short.buffers_bytes) for short, n in zip(lacking, times, strict=True)),
            storages=storages_of(*steps),
            work=work,
            needed_flops=needed,
            attention=deep.step.low.attention,
            traced_by=self.way,
            layer=layer,
            outside=outside,
            layers=max(1, count + sum(n * (count - less) for less, n in zip(fewer, times, strict=True))),
            inputs_bytes=inputs_bytes(config, self.shape) if self.family.device == "cuda" else 0.0,
            hidden_bytes=self._hidden_bytes(config),
        )
        return self._with_passes(traced, config, deep, lacking, times)

    def _with_passes(
        self, traced: Profile, config: Any, deep: Shallow, lacking: Sequence[Shallow], times: Sequence[int]
    ) -> Profile:
        """Return the profile with the passes without gradients: those that a recipe has, else an evaluation's.

        Raises:
            NotLinear: A recipe's can't be traced.
        """
        kind = self.shape.kind
        if kind is not None and not (kind.scorings or kind.generates):
            return traced
        passes = [one.evaluation for one in (deep, *lacking) if one.evaluation is not None]
        try:
            if len(passes) <= len(lacking):
                raise NotLinear("the pass without gradients can't be traced")
            one = passes[0], passes[1:], times
            storages, (work, needed) = storages_of(*one), work_of(*one)
        except NotLinear:
            if kind is not None:
                raise
            return traced
        if kind is None:
            outputs = line(passes[0].lines("outputs_bytes"))
            found = ForwardPass(storages=storages, outputs_bytes=outputs, inputs_bytes=traced.inputs_bytes)
            return traced.model_copy(update={"evaluation": found})
        if kind.generates:
            how = generation_of(config, self.shape, traced, work, storages)
            traced = traced.model_copy(update={"generation": how})
        return scored(traced, kind, work, needed, storages)

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
        with warnings.catch_warnings(action="ignore"), tensors_of(self.way):
            model = build(self.spec, config, self.family, self.shape, self.change, device=device)
            step = self._pass(model, micro_step)
            evaluation = None if like is None else like.evaluation
            with contextlib.suppress(NotLinear, Untraceable):
                evaluation = evaluation or self._pass(model, evaluation_step)
        return Shallow(
            step=step,
            evaluation=evaluation,
            parameters=_groups(model, has_unused=self.shape.task in (Task.IMAGE_TEXT_TO_TEXT, Task.CAUSAL_LM)),
            names=[name for name, _ in model.named_parameters()],
            buffers_bytes=sum(b.numel() * b.element_size() for b in model.buffers()),
        )

    def _pass(self, model: Any, step: Callable[[Any, Family, Shape, int], Tape]) -> Pass:
        try:
            low, high = (step(model, self.family, self.shape, samples) for samples in SAMPLES)
        # What torch (no kernel for these tensors, a value that isn't there) and models' own code raise without values.
        except (RuntimeError, NotImplementedError, ValueError, TypeError, AttributeError, LookupError) as error:
            raise Untraceable(one_line(error)) from error
        return joined(SAMPLES, low, high)

    def _hidden_bytes(self, config: Any) -> float:
        """Return the bytes of one sample's hidden states, 0 where the config doesn't say their width."""
        text = config.get_text_config()
        width = getattr(text, "hidden_size", None) or getattr(text, "d_model", None)
        return float(self.shape.length * width * (2 if self.family.half else 4)) if isinstance(width, int) else 0.0


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
