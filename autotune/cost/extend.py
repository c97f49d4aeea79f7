"""Extends traces of a shallow model to its full depth, and of small micro-batches to any.

A model of equal layers runs the same operators once more for each layer. The tapes of a model with k and with k + 1
layers therefore agree but for one stretch in the forward and one in the backward pass, and what is alive at any moment
grows by the same bytes with each further layer: memory and work are lines in the depth. In the micro-batch every tensor
is a line too. Where tapes don't agree so, :class:`NotLinear` is raised and the caller traces the model whole.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from autotune.cost.operators import as_line, attends
from autotune.cost.profile import FUSED_ATTENTION, PRODUCTS, Line, MemoryPoint, Work
from autotune.cost.tape import ACTIVATION, FRESH, GRADIENT, TEMPORARY, Tape

# Micro-batches that peaks are looked for at: all small ones, then ever wider apart.
_SAMPLES = np.unique(np.round(np.concatenate([np.arange(1, 65), np.geomspace(64, 65536, 100)])))

# Shares of the gradients that stay: all, or those of one of many devices, where other moments are the peak.
_SHARES = (1.0, 0.5, 0.25, 0.0)


# An operator: kind, whether in 16 bits, lines of FLOP and bytes, and its calls at both micro-batches.
_Row = tuple[int, bool, tuple[float, ...], str, str]


class NotLinear(Exception):
    """Tapes of different depths or micro-batches don't agree."""


@dataclass(frozen=True)
class Pair:
    """Tapes of the same model at two micro-batches."""

    samples: tuple[int, int]
    tapes: tuple[Tape, Tape]

    def __post_init__(self) -> None:
        if self.tapes[0].names != self.tapes[1].names:
            raise NotLinear("the operators change with the micro-batch")

    def lines(self, name: str) -> NDArray[np.float64]:
        """Return an array of the tapes as lines: the last axis is (constant, per sample)."""
        low, high = (np.asarray(getattr(tape, name), dtype=float) for tape in self.tapes)
        slope = (high - low) / (self.samples[1] - self.samples[0])
        return np.stack([low - slope * self.samples[0], slope], axis=-1)


@dataclass(frozen=True)
class Extended:
    """One micro-step at full depth: operators with their counts, and moments with what is alive.

    Between the first and the last layer what is alive changes evenly, so the peak is in one of the two: the moments are
    those of the base, whose layers are the first and the last of the full model.
    """

    names: tuple[str, ...]
    live: NDArray[np.float64]  # (moments, categories, 2)
    work: tuple[Work, ...]
    needed_flops: Line
    attention: tuple[str, ...] = ()


def extend(base: Pair, deeper: Sequence[Pair], more: Sequence[int]) -> Extended:
    """Return what `base` would be with more layers.

    Args:
        base: The shallow model, with two layers (or two periods of layers) at the least.
        deeper: For each stack of layers the same model with one layer (or one period of layers) more.
        more: How many times that much the full model has beyond the base.

    Raises:
        NotLinear: The tapes don't agree.
    """
    shallow, works = base.lines("live"), _works(base)
    live = dict.fromkeys((False, True), shallow)
    total = works.copy()
    needed = _needed_flops(base)
    for pair, times in zip(deeper, more, strict=True):
        deep, deep_works = pair.lines("live"), _works(pair)
        for late in live:
            live[late] = live[late] + times * (deep[_align(base.tapes[0], pair.tapes[0], late=late)] - shallow)
        for work in dict.fromkeys((*works, *deep_works)):
            total[work] += times * (deep_works[work] - works[work])
        needed = needed + times * (_needed_flops(pair) - _needed_flops(base))
    return Extended(
        names=base.tapes[0].names * 2,
        live=np.concatenate(list(live.values())),
        work=tuple(_work(row, count, base.samples) for row, count in total.items() if count),
        needed_flops=line(needed),
        attention=base.tapes[0].attention,
    )


def peaks(step: Extended, *, accumulated: bool) -> tuple[MemoryPoint, ...]:
    """Return the moments of a micro-step that are its peak at some micro-batch.

    Args:
        step: The micro-step.
        accumulated: Whether gradients are there already; only fresh ones then come on top.
    """
    others = step.live[:, [ACTIVATION, TEMPORARY], :].sum(axis=1)
    gradients = step.live[:, FRESH if accumulated else GRADIENT, :]
    shares = _SHARES if not accumulated else (1.0,)
    totals = [others + share * gradients for share in shares]
    peaks_of_shares = [np.argmax(t[:, :1] + t[:, 1:] * _SAMPLES[None, :], axis=0) for t in totals]
    highest = np.unique(np.concatenate(peaks_of_shares))
    return tuple(
        MemoryPoint(
            operator=step.names[i],
            activations=line(step.live[i, ACTIVATION]),
            temporaries=line(step.live[i, TEMPORARY]),
            gradients=line(step.live[i, GRADIENT]),
            fresh_gradients=line(step.live[i, FRESH]),
        )
        for i in highest
    )


def _works(pair: Pair) -> Counter[_Row]:
    """Return how often each operator runs."""
    lines = np.concatenate([pair.lines("flops"), pair.lines("moved_bytes")], axis=1).tolist()
    tape, other = pair.tapes
    rows = zip(tape.kinds.tolist(), tape.half.tolist(), map(tuple, lines), tape.calls, other.calls, strict=True)
    return Counter(rows)


def _work(row: _Row, count: int, samples: tuple[int, int]) -> Work:
    kind, half, (flops, more_flops, moved, more_moved), low, high = row
    return Work(
        kind=kind,
        half=half,
        flops=Line(constant=flops, per_sample=more_flops),
        moved_bytes=Line(constant=moved, per_sample=more_moved),
        count=count,
        attends=kind == FUSED_ATTENTION or attends(low, high),
        call=as_line(low, high, samples),
    )


def _needed_flops(pair: Pair) -> NDArray[np.float64]:
    """Return the work of all contractions but those that run again."""
    tape = pair.tapes[0]
    total: NDArray[np.float64] = pair.lines("flops")[np.isin(tape.kinds, PRODUCTS) & ~tape.recomputed].sum(axis=0)
    return total


def _align(short: Tape, long: Tape, *, late: bool) -> NDArray[np.int64]:
    """Return for each operator of `short` the corresponding one of `long`."""
    ends = short.forward_end, long.forward_end
    first = _match(short.names[: ends[0]], long.names[: ends[1]], late=late)
    second = _match(short.names[ends[0] :], long.names[ends[1] :], late=late)
    return np.concatenate([first, ends[1] + second])


def stretches(short: Tape, long: Tape) -> tuple[tuple[int, int], tuple[int, int]]:
    """Return (position, length) in `long` of the operators of the layer that it has more, forward and backward.

    Raises:
        NotLinear: The tapes don't agree.
    """
    ends = short.forward_end, long.forward_end
    first = stretch(short.names[: ends[0]], long.names[: ends[1]])
    second = stretch(short.names[ends[0] :], long.names[ends[1] :])
    return first, (ends[1] + second[0], second[1])


def stretch(short: Sequence[object], long: Sequence[object], *, late: bool = False) -> tuple[int, int]:
    """Return (position, length) of what `long` has more than `short`, put between the layers of `short`.

    Names alone leave open where the stretch begins: anywhere from before the first layer to behind the last one, and a
    few operators further where what surrounds the layers is named like them. One length of it away from either end is
    between two layers, so that each operator is matched with one of its own layer, the first or the last.

    Raises:
        NotLinear: There is more than one stretch.
    """
    extra = len(long) - len(short)
    last = _common(short, long)
    first = len(short) - _common(short[::-1], long[::-1])
    if extra < 0 or first > last:
        raise NotLinear("a deeper model doesn't only repeat its layers")
    return (max(first, last - extra) if late else min(last, first + extra)), extra


def _match(short: Sequence[str], long: Sequence[str], *, late: bool) -> NDArray[np.int64]:
    """Match a sequence with one that has a single stretch more."""
    start, extra = stretch(short, long, late=late)
    positions = np.arange(len(short))
    return np.where(positions < start, positions, positions + extra)


def _common(one: Sequence[object], other: Sequence[object]) -> int:
    """Return how long two sequences agree."""
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def line(values: NDArray[np.float64]) -> Line:
    """Return (constant, per sample) as a line."""
    return Line(constant=float(values[0]), per_sample=float(values[1]))
