"""Extends the traces of a model with few layers to its full depth.

The tapes of a model with k and with k + 1 equal layers agree but for one stretch in the forward and one in the backward
pass, which is repeated. A storage of the repeated layer is there once for each, those of the layers around it once. The
corresponding storage of the layer before decides whether one ends with its layer or with something that comes once, as
the cast weights that autocast holds until the end of the forward pass. Where tapes don't agree so, :class:`NotLinear`
is raised. Inductor may put the operators of a layer in any order: there a layer adds as many to the storages that are
there at once as the last of the traced ones does.
"""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from autotune.cost import kernels
from autotune.cost.profile import PRODUCTS, Line, Storages, Vector, Work
from autotune.cost.tape import Tape
from autotune.cost.time import as_line, attends

# The two micro-batches of a trace; not of 1 sample, whose tensors are contiguous where others aren't.
SAMPLES = (2, 4)


class NotLinear(Exception):
    """Tapes of different depths or micro-batches don't agree."""


class Pass(NamedTuple):
    """Tapes of the same pass at two micro-batches, as lines in the micro-batch."""

    low: Tape
    high: Tape

    def lines(self, name: str) -> Vector:
        """Return an array of the tapes as lines: the last axis is (constant, per sample)."""
        low, high = (np.asarray(getattr(tape, name), dtype=float) for tape in (self.low, self.high))
        slope = (high - low) / (SAMPLES[1] - SAMPLES[0])
        return np.stack([low - slope * SAMPLES[0], slope], axis=-1)

    def work(self) -> Counter[tuple[Any, ...]]:
        """Return how often each operator runs: kind, width, lines of FLOP and bytes, its two calls."""
        lines = np.concatenate([self.lines("flops"), self.lines("moved_bytes")], axis=1).tolist()
        kinds, widths = self.low.kinds.tolist(), self.low.widths.tolist()
        return Counter(zip(kinds, widths, map(tuple, lines), self.low.calls, self.high.calls, strict=True))

    def needed_flops(self) -> Vector:
        """Return the work of all contractions but those that run again."""
        found: Vector = self.lines("flops")[np.isin(self.low.kinds, PRODUCTS) & ~self.low.recomputed].sum(axis=0)
        return found

    @classmethod
    def of(cls, low: Tape, high: Tape) -> Self:
        """Return the tapes of two micro-batches, which run the same operators and make as many tensors, as one pass."""
        if low.names != high.names or low.storages.shape != high.storages.shape:
            raise NotLinear("the operators or their tensors change with the micro-batch")
        return cls(low, high)

    def _rows(self, origins: Mapping[tuple[str, str], int]) -> Vector:
        """Return the storages of a pass as rows of `Storages`; the origin is -1 where it isn't one of `origins`."""
        tape = self.low
        origin = [origins.get(o, -1) for o in tape.origins]
        return np.column_stack([tape.storages[:, :2], self.lines("storages")[:, 2], tape.storages[:, 3:], origin])


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
    found = [
        Work(
            kind=kind, width=width, flops=line(lines[:2]), moved_bytes=line(lines[2:]), count=count,
            attends=attends(kind, low, high), call=as_line(low, high, SAMPLES),
        )
        for (kind, width, lines, low, high), count in total.items()
        if count > 0
    ]  # fmt: skip
    return tuple(found), line(needed)


def line(values: Sequence[float] | Vector) -> Line:
    """Return (constant, per sample) as a line."""
    return Line(constant=float(values[0]), per_sample=float(values[1]))


def storages_of(deep: Pass, lacking: Sequence[Pass], times: Sequence[int], *, exact: bool = True) -> Storages:
    """Return the storages of a pass at full depth; the arguments are those of `work_of`.

    Unless the tapes have to be `exact`, layers' operators may be in any order.
    """
    tape = deep.low
    origins = {origin: at for at, origin in enumerate(dict.fromkeys(tape.origins))}
    rows, end = deep._rows(origins), tape.forward_end
    products = np.flatnonzero(tape.matrix_products & kernels.KEEPS_WORKSPACES)
    workspaces = np.concatenate([products[products < end][:1], products[products >= end][:1]]).astype(float)
    if not exact and any(unlike_share(tape, short.low) for short in lacking):
        fewer = [(short._rows(origins), short.low.forward_end) for short in lacking]
        rows, lacking, times = _grown(rows, end, fewer, times), (), ()
    moved = 0  # by which layers that come later in the forward pass have moved; in the backward pass they come earlier
    layers = []
    for short, n in zip(lacking, times, strict=True):
        few, names = short.low.forward_end, short.low.names
        at, length = stretch(names[few:], tape.names[end:])
        layers.append((stretch(names[:few], tape.names[:end]), (end + at, length), n))
    for forward, backward, n in sorted(layers):
        layer = (forward[0] + moved, forward[1]), (backward[0] + moved, backward[1])
        rows, workspaces = _repeated(rows, layer, n, end), _outside(workspaces, layer, n)
        moved += n * forward[1]
        end += n * forward[1]
    return Storages.of(rows, forward_end=end, workspaces=workspaces.astype(int).tolist(), origins=tuple(origins))


def _grown(rows: Vector, end: int, fewer: Sequence[tuple[Vector, int]], times: Sequence[int]) -> Vector:
    """Return rows at full depth where layers' operators are in any order; `end`: of the forward pass.

    `fewer`: rows and end of the forward pass with a layer less, for each stack. Where this layer adds to the storages
    of a kind that are there at once, it adds as many for each further layer, with the same beginnings and ends.
    """
    found = [rows]
    for (short, short_end), n in zip(fewer, times, strict=True):
        theirs = _most(short, short_end)
        for kind, places in _most(rows, end).items():
            if (added := len(places) - len(theirs.get(kind, ()))) > 0:
                found += [rows[places[-added:]]] * n
    whole: Vector = np.concatenate(found)
    whole[:, 1] = np.maximum(whole[:, 1], whole[:, 0] + 1)
    return whole


def _most(rows: Vector, end: int) -> dict[tuple[float, ...], list[int]]:
    """Return for each kind of storages, by pass, sizes and use, those that are there when most of the kind are."""
    kinds, last = defaultdict[tuple[float, ...], list[int]](list), rows[:, 1].max()
    for at, (made, freed, *what, _) in enumerate(rows.tolist()):
        kinds[made < end, freed > end, freed == last, *what].append(at)
    found = {}
    for kind, places in kinds.items():
        made, freed, is_gradient = rows[places, 0], rows[places, 1], rows[places, 4] > 0
        there = [(made <= at) & ((freed > at) | is_gradient) for at in made]  # a gradient stays beyond its end
        found[kind] = np.array(places)[max(there, key=np.count_nonzero)].tolist()
    return found


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


def stretch(short: Sequence[object], long: Sequence[object]) -> tuple[int, int]:
    """Return (position, length) of the stretch that `long` has more than `short`, between the layers of `short`.

    Names alone leave open where it begins: anywhere from before the first layer to behind the last one, and further.
    One length of it behind its earliest place is between two layers, so that each operator is one of its own layer.
    """
    extra, differing = len(long) - len(short), _differing(short, long)
    if extra < 0 or differing.min():
        raise NotLinear("a deeper model doesn't only repeat its layers")
    places = np.flatnonzero(differing == 0)
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
    """Return of each storage whether the one made `length` operators earlier ends elsewhere, or isn't there.

    What a layer makes may end with the next one, as the scores that RemBERT's layers return: those of the last two end
    at once, but then one as large, made before them, ends `length` operators earlier.
    """
    seen: Counter[float] = Counter()
    ends: dict[tuple[float, int], list[float]] = {}
    first: dict[tuple[float, ...], float] = {}
    for position, *end_and_size in rows[:, :6].tolist():
        ends[position, seen[position]] = end_and_size
        seen[position] += 1  # an operator may make several
        first.setdefault(tuple(end_and_size), position)
    found = [
        ends.get((at - length, which), [-1])[0] != end or first.get((end - length, *size), at) < at - length
        for (at, which), (end, *size) in ends.items()
    ]
    return np.array(found, dtype=bool)


def _outside(positions: Vector, layer: _Layer, n: int) -> Vector:
    """Return where operators outside of the repeated layer come to be."""
    (f0, lf), (b0, lb) = layer
    return positions + np.where(positions < f0 + lf, 0, np.where(positions < b0 + lb, n * lf, n * (lf + lb)))
