"""Makes the trace of a model with few layers that of its full depth, and traces of small micro-batches those of any.

A model of equal layers runs the same operators once more for each layer. The tapes of a model with k and with k + 1
layers therefore agree but for one stretch in the forward and one in the backward pass, which is repeated. A storage of
the repeated layer is there once for each of them; those of layers before and after it, and of what surrounds the
layers, once. The layer that comes first in the forward pass comes last in the backward pass. The corresponding storage
of the layer before decides whether one ends with its layer or with something that comes once, as the cast weights that
autocast holds until the end of the forward pass. In the micro-batch every tensor is a line. Where tapes don't agree so,
:class:`NotLinear` is raised and the caller traces the model whole.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from autotune.cost.profile import FUSED_ATTENTION, PRODUCTS, Line, Storages, Vector, Work
from autotune.cost.tape import Tape
from autotune.cost.time import as_line, attends

_MADE, _FREED = 0, 1  # columns

# Where a layer's operators are, (position, length) in the forward and the backward pass.
_Layer = tuple[tuple[int, int], tuple[int, int]]


class NotLinear(Exception):
    """Tapes of different depths or micro-batches don't agree."""


class Pass(NamedTuple):
    """Tapes of the same pass at two micro-batches, as lines in the micro-batch."""

    samples: tuple[int, int]
    low: Tape
    high: Tape

    def lines(self, name: str) -> Vector:
        """Return an array of the tapes as lines: the last axis is (constant, per sample)."""
        low, high = (np.asarray(getattr(tape, name), dtype=float) for tape in (self.low, self.high))
        slope = (high - low) / (self.samples[1] - self.samples[0])
        return np.stack([low - slope * self.samples[0], slope], axis=-1)

    def work(self) -> Counter[tuple[Any, ...]]:
        """Return how often each operator runs: kind, whether in 16 bits, lines of FLOP and bytes, its two calls."""
        lines = np.concatenate([self.lines("flops"), self.lines("moved_bytes")], axis=1).tolist()
        tape = self.low
        rows = zip(tape.kinds.tolist(), tape.half.tolist(), map(tuple, lines), tape.calls, self.high.calls, strict=True)
        return Counter(rows)

    def needed_flops(self) -> Vector:
        """Return the work of all contractions but those that run again."""
        contractions = np.isin(self.low.kinds, PRODUCTS) & ~self.low.recomputed
        total: Vector = self.lines("flops")[contractions].sum(axis=0)
        return total


def joined(samples: tuple[int, int], low: Tape, high: Tape) -> Pass:
    """Return the tapes of two micro-batches as one pass.

    Raises:
        NotLinear: They don't run the same operators or don't make as many tensors.
    """
    if low.names != high.names:
        raise NotLinear("the operators change with the micro-batch")
    if low.storages.shape != high.storages.shape:
        raise NotLinear("the tensors change with the micro-batch")
    return Pass(samples, low, high)


def work_of(deep: Pass, lacking: Sequence[Pass], times: Sequence[int]) -> tuple[tuple[Work, ...], Line]:
    """Return the operators of a pass at full depth, and the FLOP that the model needs.

    Args:
        deep: Of the model with few layers.
        lacking: For each stack of layers the same with a layer less.
        times: How often the full model has that layer in addition to `deep`.
    """
    works, needed = deep.work(), deep.needed_flops()
    total = works.copy()
    for short, n in zip(lacking, times, strict=True):
        fewer = short.work()
        for row in works.keys() | fewer.keys():
            total[row] += n * (works[row] - fewer[row])
        needed = needed + n * (deep.needed_flops() - short.needed_flops())
    order = {row: at for at, row in enumerate(works)}
    rows = sorted((row for row, count in total.items() if count), key=lambda row: order.get(row, len(order)))
    found = [
        Work(
            kind=kind, half=half, flops=line(lines[:2]), moved_bytes=line(lines[2:]), count=total[row],
            attends=kind == FUSED_ATTENTION or attends(low, high), call=as_line(low, high, deep.samples),
        )
        for row in rows
        for kind, half, lines, low, high in [row]
    ]  # fmt: skip
    return tuple(found), line(needed)


def line(values: Sequence[float] | Vector) -> Line:
    """Return (constant, per sample) as a line."""
    return Line(constant=float(values[0]), per_sample=float(values[1]))


def storages_of(deep: Pass, lacking: Sequence[Pass], times: Sequence[int]) -> Storages:
    """Return the storages of a pass at full depth; the arguments are those of `work_of`.

    Raises:
        NotLinear: The tapes don't agree.
    """
    tape = deep.low
    origins = {origin: at for at, origin in enumerate(dict.fromkeys(tape.origins))}
    sizes, origin = deep.lines("storages")[:, 2], [origins[o] for o in tape.origins]
    rows = np.column_stack([tape.storages[:, :2], sizes, tape.storages[:, 3:], origin])
    end, products = tape.forward_end, np.flatnonzero(np.isin(tape.kinds, PRODUCTS))
    workspaces = np.concatenate([products[products < end][:1], products[products >= end][:1]]).astype(float)
    moved = 0  # by which layers that come later in the forward pass have moved; in the backward pass they come earlier
    layers = [(_layer(short.low, tape), n) for short, n in zip(lacking, times, strict=True)]
    for (forward, backward), n in sorted(layers):
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


def _layer(short: Tape, long: Tape) -> _Layer:
    """Return where `long` has the layer that `short` lacks.

    Raises:
        NotLinear: The tapes don't agree.
    """
    few, many = short.forward_end, long.forward_end
    at, length = stretch(short.names[few:], long.names[many:])
    return stretch(short.names[:few], long.names[:many]), (many + at, length)


def stretch(short: Sequence[object], long: Sequence[object]) -> tuple[int, int]:
    """Return (position, length) of what `long` has more than `short`, put between the layers of `short`.

    Names alone leave open where the stretch begins: anywhere from before the first layer to behind the last one, and a
    few operators further where what surrounds the layers is named like them. One length of it behind its earliest place
    is between two layers, so that each operator is one of its own layer.

    Raises:
        NotLinear: There is more than one stretch.
    """
    extra = len(long) - len(short)
    last = _common(short, long)
    first = len(short) - _common(short[::-1], long[::-1])
    if extra < 0 or first > last:
        raise NotLinear("a deeper model doesn't only repeat its layers")
    return min(last, first + extra), extra


def _common(one: Sequence[object], other: Sequence[object]) -> int:
    """Return how long two sequences agree."""
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def _repeated(rows: Vector, layer: _Layer, n: int, end: int) -> Vector:
    """Return the rows with those of the layer `n` times more; `end` is that of the forward pass."""
    (f0, lf), (b0, lb) = layer
    made, freed = rows[:, _MADE], rows[:, _FREED]
    in_forward, in_backward = (made >= f0) & (made < f0 + lf), (made >= b0) & (made < b0 + lb)
    once = rows[~(in_forward | in_backward)].copy()
    before, last = once[:, _MADE] < f0, once[:, _FREED]
    once[:, _FREED] += np.where(
        last < end,
        np.where(before & (last <= f0 + lf), 0, n * lf),
        np.where(last > np.where(before, b0 - 1, b0 + lb), n * (lf + lb), n * lf),
    )
    once[:, _MADE] = _outside(once[:, _MADE], layer, n)
    found = [once]
    ends = _outside(freed, layer, n)
    for chosen, length in ((in_forward, lf), (in_backward, lb)):
        stays = _ends_with_layer(rows, length)[chosen]
        for j in range(n + 1):
            copy = rows[chosen].copy()
            last = copy[:, _FREED]
            if chosen is in_forward:
                copy[:, _MADE] += j * lf
                by_layer = np.where(last < end, last + j * lf, last + n * lf + (n - j) * lb)
            else:
                copy[:, _MADE] += n * lf + j * lb
                by_layer = last + n * lf + j * lb
            copy[:, _FREED] = np.where(stays, by_layer, ends[chosen])
            found.append(copy)
    repeated = np.concatenate(found)
    repeated[:, _FREED] = np.maximum(repeated[:, _FREED], repeated[:, _MADE] + 1)
    return repeated


def _ends_with_layer(rows: Vector, length: int) -> NDArray[np.bool_]:
    """Return of each storage whether the one made `length` operators earlier ends elsewhere, or isn't there."""
    seen: Counter[float] = Counter()
    keys = []
    for position in rows[:, _MADE].tolist():  # an operator may make several
        keys.append((position, seen[position]))
        seen[position] += 1
    ends = dict(zip(keys, rows[:, _FREED].tolist(), strict=True))
    likes = [ends.get((position - length, which)) for position, which in keys]
    pairs = zip(rows[:, _FREED].tolist(), likes, strict=True)
    return np.array([like != end for end, like in pairs], dtype=bool)


def _outside(positions: Vector, layer: _Layer, n: int) -> Vector:
    """Return where operators outside of the repeated layer come to be."""
    (f0, lf), (b0, lb) = layer
    moved: Vector = positions + np.where(positions < f0 + lf, 0, np.where(positions < b0 + lb, n * lf, n * (lf + lb)))
    return moved
