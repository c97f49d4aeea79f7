"""Traces a family of configurations and returns its profile.

Tensors are those of the meta device; of compiled steps see `compiled`. The model is traced with few layers and extended
to its full depth (`full_depth`), or whole where its layers don't repeat. In the micro-batch every tensor is a line.
"""

import contextlib
import functools
import warnings
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch

from autotune.cost import full_depth
from autotune.cost.family import Family, Shape
from autotune.cost.own_training import OwnTraining
from autotune.cost.post_training import cached_elements, completions_of, scored
from autotune.cost.profile import ForwardPass, ParameterGroup, Profile, layers_of
from autotune.cost.tape import Tape
from autotune.cost.trace import evaluation_step, make_inputs, micro_step
from autotune.cost.traced_model import Change, Untraceable, build
from autotune.errors import InputError, one_line
from autotune.training.build import Stack, build_config, frozen_layers, shallower, stacks, without_chance
from autotune.training.random_weights import quantized_layers
from autotune.values.model import ModelSpec, Task
from autotune.values.techniques import CHECKPOINTING, is_new_weight


class Shallow(NamedTuple):
    """A model with few layers, as traced."""

    step: full_depth.Pass
    evaluation: full_depth.Pass | None  # the forward pass without gradients; None: it can't be traced
    parameters: list[ParameterGroup]
    names: list[str]
    buffers_bytes: int


# The share of operators in which compiled layers differ, above which a few checkpointed ones tell little of many:
# inductor may compute all layers again before it needs the first, as OPT's.
_UNLIKE = 0.08

# By family and depths.
Known = dict[tuple[object, ...], Shallow]


def profile(
    spec: ModelSpec,
    family: Family,
    shape: Shape,
    *,
    parameters: int | None = None,
    change: Change | None = None,
    known: Known | None = None,
    own: OwnTraining | None = None,
) -> Profile:
    """Return the profile of `family` for inputs of `shape`, or raise an InputError if the model can't be traced.

    An extended trace has to come to so many `parameters` without adapters, if that is known. `change` makes the built
    model the one that is trained, before the adapter is put on. `known`: earlier traces of this model and shape, which
    are used and added to. `own`: the user's own training, whose batches and loss are traced, or its module as a whole.
    """
    shape = shape.model_copy(update={"length": shape.length // family.sequence_parallel})
    profiler = _Profiler(spec, family, shape, change, {} if known is None else known, own)
    try:
        if shape.task is Task.OWN:
            return profiler.extended(None, (), None)
        config = without_chance(build_config(spec, shape.task))
        found = stacks(config, family.checkpointed_every, frozen_layers(spec.frozen))
        if found and all(s.depth > s.base for s in found):
            expected = parameters if family.tensor_parallel == 1 else None
            with contextlib.suppress(full_depth.NotLinear, InputError):  # Gemma 3n has no fewer layers than share keys
                traced = profiler.extended(config, found, expected)
                if family.compiled and family.checkpointing != "none" and traced.unlike > _UNLIKE:
                    deeper = tuple(s.deeper() for s in found)
                    few = all(s.depth <= s.base + s.period for s in deeper)
                    traced = profiler.extended(config, () if few else deeper, expected)
                return traced
            if family.compiled:  # as a whole it would take minutes
                raise full_depth.NotLinear("layers are compiled to programs that differ")
        return replace(profiler, known={}).extended(config, (), None)
    except (full_depth.NotLinear, Untraceable) as error:
        raise InputError(f"{spec.name}: can't be traced, so there is no prediction: {one_line(error)}") from error


@dataclass(frozen=True)
class _Profiler:
    spec: ModelSpec
    family: Family
    shape: Shape
    change: Change | None
    known: Known
    own: OwnTraining | None

    def extended(self, config: Any, found: tuple[Stack, ...], parameters: int | None) -> Profile:
        """Return the profile at full depth, from traces with few layers of each stack; no stacks: traced whole."""
        depths = {s.field: s.base + s.period for s in found}
        deep = self._traced(config, depths)
        lacking = [self._traced(config, {**depths, s.field: s.base}) for s in found]
        times = [round((s.depth - s.base) / s.period) - 1 for s in found]
        made = full_depth.order_of(deep.parameters, [short.parameters for short in lacking], times)
        groups = Counter(deep.parameters[at] for at in made)
        counted = sum(count * group.elements for group, count in groups.items() if not group.adapter)
        if parameters not in (None, counted):
            raise full_depth.NotLinear(f"{counted} parameters instead of {parameters}")
        layer, outside, count = layers_of(deep.names, deep.parameters)
        fewer = [layers_of(short.names, short.parameters)[2] for short in lacking]
        places = {group: at for at, group in enumerate(groups)}
        steps = deep.step, [short.step for short in lacking], times
        work, needed = full_depth.work_of(*steps)
        text = config and config.get_text_config()
        width = getattr(text, "hidden_size", None) or getattr(text, "d_model", None)
        inputs: Iterable[torch.Tensor] = ()
        if self.family.device == "cuda":
            inputs = make_inputs(config, self.shape, 1).values() if self.own is None else self.own.inputs(1)
        of_tokens = self.shape.length * (2 if self.family.half else 4)
        traced = Profile(
            family=self.family,
            parameters=tuple(group.model_copy(update={"count": count}) for group, count in groups.items()),
            order=tuple(places[deep.parameters[at]] for at in made),
            names=tuple(deep.names[at] for at in made),
            buffers_bytes=deep.buffers_bytes
            + sum(n * (deep.buffers_bytes - short.buffers_bytes) for short, n in zip(lacking, times, strict=True)),
            storages=full_depth.storages_of(*steps, exact=not self.family.compiled),
            unlike=max((full_depth.unlike_share(deep.step.low, short.step.low) for short in lacking), default=0.0),
            work=work,
            needed_flops=needed,
            layer=layer,
            outside=outside,
            layers=max(1, count + sum(n * (count - less) for less, n in zip(fewer, times, strict=True))),
            inputs_bytes=sum(tensor.nbytes for tensor in inputs),
            hidden_bytes=float(of_tokens * width) if isinstance(width, int) else 0.0,
            keys_bytes=float(of_tokens * cached_elements(config) if self.family.context_parallel > 1 else 0),
        )
        kind = self.shape.kind  # whose passes without gradients come now, else an evaluation's
        if kind is not None and not (kind.scorings or kind.generates):
            return traced
        passes = [one.evaluation for one in (deep, *lacking) if one.evaluation is not None]
        try:
            if len(passes) <= len(lacking):
                raise full_depth.NotLinear("the pass without gradients can't be traced")
            one = passes[0], passes[1:], times
            storages, (work, needed) = full_depth.storages_of(*one), full_depth.work_of(*one)
        except full_depth.NotLinear:
            if kind is not None:
                raise
            return traced
        if kind is None:
            outputs = full_depth.line(passes[0].lines("outputs_bytes"))
            forward = ForwardPass(storages=storages, outputs_bytes=outputs, inputs_bytes=traced.inputs_bytes)
            return traced.model_copy(update={"evaluation": forward})
        if kind.generates:
            generation = completions_of(config, self.shape, traced, work, storages)
            traced = traced.model_copy(update={"generation": generation})
        return scored(traced, kind, work, needed, storages)

    def _traced(self, config: Any, depth: dict[str, int]) -> Shallow:
        family, depths = self.family, tuple(depth.items())
        if (family, depths) in self.known:
            return self.known[family, depths]
        # A family that differs in checkpointing alone has the same evaluation.
        others = (family.as_written.model_copy(update={"checkpointing": kind}) for kind in ("none", *CHECKPOINTING))
        evaluation = next((found.evaluation for other in others if (found := self.known.get((other, depths)))), None)
        with warnings.catch_warnings(action="ignore"):
            if self.own is not None and self.shape.task is Task.OWN:
                model = self.own.model
            else:
                model = build(self.spec, shallower(config, depth), family, self.shape, self.change)
                with contextlib.suppress(full_depth.NotLinear, Untraceable):
                    evaluation = evaluation or self._pass(model, evaluation_step)
            as_written = None if family.compiled else self._pass(model, functools.partial(micro_step, own=self.own))
            step = as_written or self._compiled(model)  # which leaves the model without tensors of the meta device
        self.known[family, depths] = traced = Shallow(
            step=step,
            evaluation=evaluation,
            parameters=_groups(model),
            names=[name for name, _ in model.named_parameters()],
            buffers_bytes=sum(b.nbytes for b in model.buffers()) + (self.own.beside_bytes if self.own else 0),
        )
        return traced

    def _compiled(self, model: Any) -> full_depth.Pass:
        from autotune.cost.compiled import compiled_step

        try:
            return full_depth.Pass.of(*compiled_step(model, self.family, self.shape, full_depth.SAMPLES))
        except Exception as error:  # of whatever kind: a compiler is large
            raise Untraceable(one_line(error)) from error

    def _pass(self, model: Any, step: Callable[[Any, Family, Shape, int], Tape]) -> full_depth.Pass:
        try:
            low, high = (step(model, self.family, self.shape, samples) for samples in full_depth.SAMPLES)
        # Raised by torch (no kernel for these tensors, a value that isn't there) and by models' code without values.
        except Exception as error:
            raise Untraceable(one_line(error)) from error
        return full_depth.Pass.of(low, high)


def _groups(model: Any) -> list[ParameterGroup]:
    """Return the parameters of a traced model in the order they were made."""
    tables = {id(m.weight) for m in model.modules() if isinstance(m, torch.nn.Embedding)}
    packed = {}  # shapes before packing, and bytes an element
    for _, layer in quantized_layers(model):
        shape = (layer.out_features, layer.in_features)
        packed[id(layer.weight)] = shape, layer.weight.numel() / (shape[0] * shape[1])
    groups = []
    for name, p in model.named_parameters():
        shape, width = packed.get(id(p), (tuple(p.shape), p.element_size()))
        # No gradient, no states: CLIP's last layer in LLaVA, Longformer's global projections, SigLIP's pooling head.
        trained = p.requires_grad and p.grad is not None
        kind = {"trained": trained, "embedding": id(p) in tables, "adapter": is_new_weight(name)}
        groups.append(ParameterGroup(shape=shape, element_bytes=width, count=1, **kind))
    return groups
