"""Micro-batches of samples of several lengths, as so many samples of full length. Pure.

A micro-batch is padded to its longest sample: for its time to an expected one, for its memory to the longest of all,
with which a trial begins. Attention's work grows with the square of the length. Where micro-batches are balanced by
tokens (`BatchRebalanceSampler` of transformers), the samples of a step are sorted by length and cut into stretches of
about the same cost; the lengths of a step are taken from the quantiles of all.
"""

import functools
from typing import NamedTuple

import numpy as np

from autotune.cost.profile import Vector
from autotune.values.config import TrainConfig
from autotune.values.workload import LengthProfile, Workload

QUADRATIC_COST = 0.001  # of a sample, by its squared length: `BatchRebalanceSampler.QUADRATIC_COST_COEF`


class FullLength(NamedTuple):
    """Micro-batches as samples of the greatest length, one element for each."""

    mean: Vector  # expected of those of a training
    attended: Vector  # the same by the work of attention
    largest: Vector  # of the step with the longest samples, or of a usual one if that is more


class Cut(NamedTuple):
    """Samples in padded micro-batches."""

    padded: float  # positions of all together over the samples' own tokens
    attended: float  # pairs of positions in a row, of all together over the samples' own
    largest: float  # positions of the largest


def in_full_length(workload: Workload, kind: TrainConfig, sizes: Vector) -> FullLength:
    """Return micro-batches of `sizes` samples, put together as `kind` says, as so many samples of full length."""
    lengths, multiple = workload.lengths, kind.pad_to_multiple_of
    if lengths is None:
        return FullLength(sizes, sizes, sizes)
    # The mean of the squared lengths, which spread as the quantiles do, as a share of the greatest's.
    drawn = _quantiles(lengths, (np.arange(1000) + 0.5) / 1000)
    spread = lengths.mean**2 * float((drawn**2).mean() / drawn.mean() ** 2)
    square = min(spread, lengths.mean * lengths.maximum) / lengths.maximum**2
    if kind.is_balanced:
        cuts = [_balanced(lengths, workload.global_batch_size or int(size), int(size)) for size in sizes]
        padded, attended, largest = np.array(cuts).T
        mean = sizes * padded * lengths.mean / lengths.maximum
        found = FullLength(mean, sizes * attended * square, largest / lengths.maximum)
    elif kind.packing or kind.train_sampling_strategy == "group_by_length":
        mean = sizes * lengths.mean / lengths.maximum
        # Only flash-attn keeps the samples of a row apart, SDPA masks the rest of the row's pairs.
        masked = kind.packing and kind.attn_implementation != "flash_attention_2"
        found = FullLength(mean, mean**2 if masked else sizes * square, sizes)
    else:
        longest = expected_longest(lengths, sizes) / lengths.maximum
        found = FullLength(sizes * longest, sizes * np.where(sizes == 1, square, longest**2), sizes)
    if multiple is None:
        return found
    # A sample gets half a multiple more on average; attention's work grows with the square.
    more = 1 + sizes * (multiple - 1) / 2 / lengths.maximum / found.mean
    most = -(-lengths.maximum // multiple) * multiple / lengths.maximum
    return FullLength(found.mean * more, found.attended * more**2, found.largest * most)


def padding_share(workload: Workload, kind: TrainConfig) -> float:
    """Return the expected share of padding in the positions that run; 0 where no batch is padded."""
    lengths, code = workload.lengths, workload.own_code
    if lengths is None or (code is not None and not code.pads):
        return 0.0
    size = np.array([kind.per_device_train_batch_size])
    run = float(in_full_length(workload, kind, size).mean[0]) * lengths.maximum
    return max(0.0, 1 - float(size[0]) * lengths.mean / run)


def expected_longest(lengths: LengthProfile, samples: Vector) -> Vector:
    """Return about how long the longest of so many samples is: their n/(n+1) quantile, and the mean for one."""
    longest = np.maximum(_quantiles(lengths, samples / (samples + 1)), lengths.mean)
    return np.where(samples == 1, lengths.mean, longest)


def _quantiles(lengths: LengthProfile, shares: Vector) -> Vector:
    return np.interp(shares, (0.0, 0.5, 0.95, 1.0), (lengths.minimum, lengths.median, lengths.p95, lengths.maximum))


@functools.cache
def _balanced(lengths: LengthProfile, samples: int, micro_batch: int) -> Cut:
    """Return the padding of a usual step of `samples`, and the largest micro-batch of it or of the longest samples."""
    middles, groups = np.arange(samples)[::-1] + 0.5, max(1, samples // micro_batch)
    usual = balanced_cut(_quantiles(lengths, middles / samples), groups)
    of_all = max(samples, lengths.samples)
    longest = balanced_cut(_quantiles(lengths, 1 - (samples - middles) / of_all), groups)
    return usual._replace(largest=max(usual.largest, longest.largest))


def balanced_cut(lengths: Vector, groups: int) -> Cut:
    """Return the cut of one step's samples, the longest first, into so many micro-batches of balanced cost.

    From stretches of the same number on, one sample after the other moves from the most expensive to the cheapest, and
    the evenest cut is taken: `BatchRebalanceSampler` on one device.
    """
    costs = lengths * (1 + QUADRATIC_COST * lengths)
    counts = len(costs) // groups + (np.arange(groups) < len(costs) % groups)
    seen: set[bytes] = set()
    least, starts = np.inf, np.cumsum(counts) - counts
    for _ in range(max(30 * groups, len(costs))):  # the sampler's own limit
        ends = np.cumsum(counts)
        now = counts * costs[ends - counts]
        most_expensive, cheapest = int(now.argmax()), int(now.argmin())
        if (spread := now[most_expensive] - now[cheapest]) < least:
            least, starts = spread, ends - counts
        if spread == 0 or counts[most_expensive] == 1 or (state := counts.tobytes()) in seen:
            break
        seen.add(state)
        counts[most_expensive] -= 1
        counts[cheapest] += 1
    rows, longest = np.diff(starts, append=len(costs)), lengths[starts]
    positions, pairs = rows * longest, rows * longest**2
    return Cut(float(positions.sum() / lengths.sum()), float(pairs.sum() / (lengths**2).sum()), float(positions.max()))
