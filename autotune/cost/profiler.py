"""Traces a family of configurations and returns its profile.

Tensors are those of the meta device; of compiled steps see `compiled`. The model is traced with few layers and extended
to its full depth, or whole where its layers don't repeat.

A model of equal layers runs the same operators once more for each layer. The tapes of a model with k and with k + 1
layers therefore agree but for one stretch in the forward and one in the backward pass, which is repeated. A storage of
the repeated layer is there once for each of them; those of layers before and after it, and of operators around the
layers, once. The layer that comes first in the forward pass comes last in the backward pass. The corresponding storage
of the layer before decides whether one ends with its layer or with something that comes once, as the cast weights that
autocast holds until the end of the forward pass. In the micro-batch every tensor is a line. Where tapes don't agree so,
:class:`NotLinear` is raised and the model is traced whole.
"""

import contextlib
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from autotune.cost.family import Family, Shape
from autotune.cost.post_training import generation_of, scored
from autotune.cost.profile import ForwardPass, Line, ParameterGroup, Profile, Storages, Vector, Work, layers_of
from autotune.cost.tape import Tape
from autotune.cost.time import as_line, attends
from autotune.cost.trace import evaluation_step, make_inputs, micro_step
from autotune.cost.traced_model import Change, Untraceable, build, weight_of
from autotune.errors import InputError, one_line
from autotune.training.build import Stack, build_config, frozen_layers, shallower, stacks, without_chance
from autotune.values.model import ModelSpec, Task
from autotune.values.techniques import CHECKPOINTING, is_new_weight

# The two micro-batches of a trace; not of 1 sample, whose tensors are contiguous where others aren't.
_SAMPLES = (2, 4)


class NotLinear(Exception):
    """Tapes of different depths or micro-batches don't agree."""


class Pass(NamedTuple):
    """Tapes of the same pass at two micro-batches, as lines in the micro-batch."""

    low: Tape
    high: Tape

    def lines(self, name: str) -> Vector:
        """Return an array of the tapes as lines: the last axis is (constant, per sample)."""
        low, high = (np.asarray(getattr(tape, name), dtype=float) for tape in (self.low, self.high))
        slope = (high - low) / (_SAMPLES[1] - _SAMPLES[0])
        return np.stack([low - slope * _SAMPLES[0], slope], axis=-1)

    def work(self) -> Counter[tuple[Any, ...]]:
        """Return how often each operator runs: kind, whether in 16 bits, lines of FLOP and bytes, its two calls."""
        lines = np.concatenate([self.lines("flops"), self.lines("moved_bytes")], axis=1).tolist()
        kinds, halves = self.low.kinds.tolist(), self.low.half.tolist()
        return Counter(zip(kinds, halves, map(tuple, lines), self.low.calls, self.high.calls, strict=True))

    def needed_flops(self) -> Vector:
        """Return the work of all contractions but those that run again."""
        found: Vector = self.lines("flops")[self.low.products & ~self.low.recomputed].sum(axis=0)
        return found


def joined(low: Tape, high: Tape) -> Pass:
    """Return the tapes of two micro-batches, which run the same operators and make as many tensors, as one pass."""
    if low.names != high.names:
        raise NotLinear("the operators change with the micro-batch")
    if low.storages.shape != high.storages.shape:
        raise NotLinear("the tensors change with the micro-batch")
    return Pass(low, high)


class Shallow(NamedTuple):
    """A model with few layers, as traced."""

    step: Pass
    evaluation: Pass | None  # the forward pass without gradients; None: it can't be traced
    parameters: list[ParameterGroup]
    names: list[str]
    buffers_bytes: int


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
) -> Profile:
    """Return the profile of `family` for inputs of `shape`, or raise an InputError if the model can't be traced.

    An extended trace has to come to so many `parameters` without adapters, if that is known. `change` makes the built
    model the one that is trained, before the adapter is put on, as for libraries of another time. `known`: earlier
    traces of this model and shape, which are used and added to.
    """
    shape = shape.model_copy(update={"length": shape.length // family.sequence_parallel})
    profiler = _Profiler(spec, family, shape, change, {} if known is None else known)
    config = without_chance(build_config(spec, shape.task))
    found = stacks(config, family.checkpointed_every, frozen_layers(spec.frozen))
    try:
        if found and all(s.depth > s.base for s in found):
            with contextlib.suppress(NotLinear):
                return profiler.extended(config, found, parameters if family.tensor_parallel == 1 else None)
            if family.compiled:
                raise NotLinear("layers are compiled to programs that differ")  # as a whole it would take minutes
        return replace(profiler, known={}).extended(config, (), None)
    except (NotLinear, Untraceable) as error:
        raise InputError(f"{spec.name}: can't be traced, so there is no prediction: {one_line(error)}") from error


@dataclass(frozen=True)
class _Profiler:
    spec: ModelSpec
    family: Family
    shape: Shape
    change: Change | None
    known: Known

    def extended(self, config: Any, found: tuple[Stack, ...], parameters: int | None) -> Profile:
        """Return the profile at full depth, from traces with few layers of each stack; no stacks: traced whole."""
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
        fewer = [layers_of(short.names, short.parameters)[2] for short in lacking]
        places = {group: at for at, group in enumerate(groups)}
        steps = deep.step, [short.step for short in lacking], times
        work, needed = work_of(*steps)
        text = config.get_text_config()
        width = getattr(text, "hidden_size", None) or getattr(text, "d_model", None)
        inputs = make_inputs(config, self.shape, 1) if self.family.device == "cuda" else {}
        hidden = self.shape.length * width * (2 if self.family.half else 4) if isinstance(width, int) else 0
        traced = Profile(
            family=self.family,
            parameters=tuple(group.model_copy(update={"count": count}) for group, count in groups.items()),
            order=tuple(places[deep.parameters[at]] for at in made),
            names=tuple(deep.names[at] for at in made),
            buffers_bytes=deep.buffers_bytes
            + sum(n * (deep.buffers_bytes - short.buffers_bytes) for short, n in zip(lacking, times, strict=True)),
            storages=storages_of(*steps, exact=not self.family.compiled),
            unlike=max((unlike_share(deep.step.low, short.step.low) for short in lacking), default=0.0),
            work=work,
            needed_flops=needed,
            layer=layer,
            outside=outside,
            layers=max(1, count + sum(n * (count - less) for less, n in zip(fewer, times, strict=True))),
            inputs_bytes=sum(tensor.nbytes for tensor in inputs.values()),
            hidden_bytes=float(hidden),
        )
        kind = self.shape.kind  # whose passes without gradients come now, else an evaluation's
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
            forward = ForwardPass(storages=storages, outputs_bytes=outputs, inputs_bytes=traced.inputs_bytes)
            return traced.model_copy(update={"evaluation": forward})
        if kind.generates:
            how = generation_of(config, self.shape, traced, work, storages)
            traced = traced.model_copy(update={"generation": how})
        return scored(traced, kind, work, needed, storages)

    def _traced(self, config: Any, depth: dict[str, int]) -> Shallow:
        family, depths = self.family, tuple(depth.items())
        if (family, depths) in self.known:
            return self.known[family, depths]
        # A family that differs in checkpointing alone has the same evaluation.
        others = (
            family.model_copy(update={"checkpointing": kind, "compiled": False}) for kind in ("none", *CHECKPOINTING)
        )
        evaluation = next((found.evaluation for other in others if (found := self.known.get((other, depths)))), None)
        with warnings.catch_warnings(action="ignore"):
            model = build(self.spec, shallower(config, depth), family, self.shape, self.change)
            as_written = None if family.compiled else self._pass(model, micro_step)
            with contextlib.suppress(NotLinear, Untraceable):
                evaluation = evaluation or self._pass(model, evaluation_step)
            step = as_written or self._compiled(model)  # which leaves the model without tensors of the meta device
        self.known[family, depths] = traced = Shallow(
            step=step,
            evaluation=evaluation,
            parameters=_groups(model, has_unused=self.shape.task in (Task.IMAGE_TEXT_TO_TEXT, Task.CAUSAL_LM)),
            names=[name for name, _ in model.named_parameters()],
            buffers_bytes=sum(b.numel() * b.element_size() for b in model.buffers()),
        )
        return traced

    def _compiled(self, model: Any) -> Pass:
        from autotune.cost.compiled import compiled_step

        try:
            return joined(*compiled_step(model, self.family, self.shape, _SAMPLES))
        except Exception as error:  # of whatever kind: a compiler is large
            raise Untraceable(one_line(error)) from error

    def _pass(self, model: Any, step: Callable[[Any, Family, Shape, int], Tape]) -> Pass:
        try:
            low, high = (step(model, self.family, self.shape, samples) for samples in _SAMPLES)
        # Raised by torch (no kernel for these tensors, a value that isn't there) and by models' code without values.
        except (RuntimeError, NotImplementedError, ValueError, TypeError, AttributeError, LookupError) as error:
            raise Untraceable(one_line(error)) from error
        return joined(low, high)


def _groups(model: Any, *, has_unused: bool) -> list[ParameterGroup]:
    """Return the parameters of a traced model in the order they were made."""
    tables = {id(m.weight) for m in model.modules() if isinstance(m, torch.nn.Embedding)}
    packed = {id(m.weight): found for m in model.modules() if (found := weight_of(m)) is not None}
    groups = []
    for name, p in model.named_parameters():
        shape, width = packed.get(id(p), (tuple(p.shape), p.element_size()))
        # No gradient, no states: CLIP's last layer in LLaVA, the vision part where texts alone are shown.
        trained = p.requires_grad and not (has_unused and p.grad is None)
        kind = {"trained": trained, "embedding": id(p) in tables, "adapter": is_new_weight(name)}
        groups.append(ParameterGroup(shape=shape, element_bytes=width, count=1, **kind))
    return groups


def work_of(deep: Pass, lacking: Sequence[Pass], times: Sequence[int]) -> tuple[tuple[Work, ...], Line]:
    """Return the operators of a pass at full depth, and the FLOP that the model needs.

    `deep` is of the model with few layers, `lacking` for each stack the same with a layer less, and `times` how often
    the full model has that layer in addition to `deep`.
    """
    works, needed = deep.work(), deep.needed_flops()
    total = works.copy()
    for short, n in zip(lacking, times, strict=True):
        fewer = short.work()
        for row in works.keys() | fewer.keys():
            total[row] += n * (works[row] - fewer[row])
        needed = needed + n * (deep.needed_flops() - short.needed_flops())
    order = {row: at for at, row in enumerate(works)}
    rows = sorted((row for row, count in total.items() if count > 0), key=lambda row: order.get(row, len(order)))
    found = [
        Work(
            kind=kind, half=half, flops=line(lines[:2]), moved_bytes=line(lines[2:]), count=total[row],
            attends=attends(kind, low, high), call=as_line(low, high, _SAMPLES),
        )
        for row in rows
        for kind, half, lines, low, high in [row]
    ]  # fmt: skip
    return tuple(found), line(needed)


def line(values: Sequence[float] | Vector) -> Line:
    """Return (constant, per sample) as a line."""
    return Line(constant=float(values[0]), per_sample=float(values[1]))


def storages_of(deep: Pass, lacking: Sequence[Pass], times: Sequence[int], *, exact: bool = True) -> Storages:
    """Return the storages of a pass at full depth; the arguments are those of `work_of` and of `stretch`."""
    tape = deep.low
    origins = {origin: at for at, origin in enumerate(dict.fromkeys(tape.origins))}
    sizes, origin = deep.lines("storages")[:, 2], [origins[o] for o in tape.origins]
    rows = np.column_stack([tape.storages[:, :2], sizes, tape.storages[:, 3:], origin])
    end, products = tape.forward_end, np.flatnonzero(tape.products)
    workspaces = np.concatenate([products[products < end][:1], products[products >= end][:1]]).astype(float)
    moved = 0  # by which layers that come later in the forward pass have moved; in the backward pass they come earlier
    layers = []
    for short, n in zip(lacking, times, strict=True):
        few, names = short.low.forward_end, short.low.names
        at, length = stretch(names[few:], tape.names[end:], exact=exact)
        layers.append((stretch(names[:few], tape.names[:end], exact=exact), (end + at, length), n))
    for forward, backward, n in sorted(layers):
        layer = (forward[0] + moved, forward[1]), (backward[0] + moved, backward[1])
        rows, workspaces = _repeated(rows, layer, n, end), _outside(workspaces, layer, n)
        moved += n * forward[1]
        end += n * forward[1]
    return Storages.of(rows, forward_end=end, workspaces=workspaces.astype(int).tolist(), origins=tuple(origins))


def order_of(deep: Sequence[object], lacking: Sequence[Sequence[object]], times: Sequence[int]) -> list[int]:
    """Return positions in `deep`, a list of all layers' parameters, with those of the layers repeated."""
    order = list(range(len(deep)))
    moved = 0
    for (first, length), n in sorted((stretch(short, deep), n) for short, n in zip(lacking, times, strict=True)):
        at = first + moved
        order[at + length : at + length] = order[at : at + length] * n
        moved += n * length
    return order


def unlike_share(deep: Tape, short: Tape) -> float:
    """Return the share of the operators that differ between two tapes, beside the layer that one lacks."""
    few, end = short.forward_end, deep.forward_end
    sides = (short.names[:few], deep.names[:end]), (short.names[few:], deep.names[end:])
    return sum(int(_differing(*side).min()) for side in sides) / len(deep.names)


def _differing(short: Sequence[object], long: Sequence[object]) -> NDArray[np.int64]:
    """Return how many names differ if what `long` has more begins at each place of `short`."""
    before = np.cumsum([0, *(a != b for a, b in zip(short, long, strict=False))])
    behind = np.cumsum([0, *(a != b for a, b in zip(short[::-1], long[::-1], strict=False))])[::-1]
    found: NDArray[np.int64] = before + behind
    return found


def stretch(short: Sequence[object], long: Sequence[object], *, exact: bool = True) -> tuple[int, int]:
    """Return (position, length) of the stretch that `long` has more than `short`, between the layers of `short`.

    Names alone leave open where it begins: anywhere from before the first layer to behind the last one, and a few
    operators further where operators around the layers are named like them. One length of it behind its earliest place
    is between two layers, so that each operator is one of its own layer. If `exact`, no names beside it may differ. If
    not, it is where the fewest do: inductor puts operators around the layers, or of unlike layers, in another order.
    """
    extra, differing = len(long) - len(short), _differing(short, long)
    if extra < 0 or (exact and differing.min()):
        raise NotLinear("a deeper model doesn't only repeat its layers")
    places = np.flatnonzero(differing == differing.min())
    return int(min(places[-1], places[0] + extra)), extra


# Where a layer's operators are, (position, length) in the forward and the backward pass.
_Layer = tuple[tuple[int, int], tuple[int, int]]


def _repeated(rows: Vector, layer: _Layer, n: int, end: int) -> Vector:
    """Return the rows with those of the layer `n` times more; `end` is that of the forward pass."""
    (f0, lf), (b0, lb) = layer
    made, freed = rows[:, 0], rows[:, 1]
    in_forward, in_backward = (made >= f0) & (made < f0 + lf), (made >= b0) & (made < b0 + lb)
    once = rows[~(in_forward | in_backward)].copy()
    before, last = once[:, 0] < f0, once[:, 1]
    once[:, 1] += np.where(
        last < end,
        np.where(before & (last <= f0 + lf), 0, n * lf),
        np.where(last > np.where(before, b0 - 1, b0 + lb), n * (lf + lb), n * lf),
    )
    once[:, 0] = _outside(once[:, 0], layer, n)
    found, ends = [once], _outside(freed, layer, n)
    for chosen, length in ((in_forward, lf), (in_backward, lb)):
        stays = _ends_with_layer(rows, length)[chosen]
        for j in range(n + 1):
            copy = rows[chosen].copy()
            last = copy[:, 1]
            moved = j * lf if chosen is in_forward else n * lf + j * lb
            copy[:, 0] += moved
            by_layer = last + moved
            if chosen is in_forward:
                by_layer = np.where(last < end, by_layer, last + n * lf + (n - j) * lb)
            copy[:, 1] = np.where(stays, by_layer, ends[chosen])
            found.append(copy)
    repeated = np.concatenate(found)
    repeated[:, 1] = np.maximum(repeated[:, 1], repeated[:, 0] + 1)
    return repeated


def _ends_with_layer(rows: Vector, length: int) -> NDArray[np.bool_]:
    """Return of each storage whether the one made `length` operators earlier ends elsewhere, or isn't there."""
    seen: Counter[float] = Counter()
    ends: dict[tuple[float, int], float] = {}
    for position, end in rows[:, :2].tolist():
        ends[position, seen[position]] = end
        seen[position] += 1  # an operator may make several
    return np.array([ends.get((at - length, which)) != end for (at, which), end in ends.items()], dtype=bool)


def _outside(positions: Vector, layer: _Layer, n: int) -> Vector:
    """Return where operators outside of the repeated layer come to be."""
    (f0, lf), (b0, lb) = layer
    moved: Vector = positions + np.where(positions < f0 + lf, 0, np.where(positions < b0 + lb, n * lf, n * (lf + lb)))
    return moved
