"""How much of the longest sample a micro-batch is padded to, by the lengths of the data. Pure arithmetic."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from autotune.values.config import LengthProfile, TrainConfig


def padded_share(lengths: LengthProfile | None, kind: TrainConfig, sizes: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the expected longest sample of a micro-batch over the longest of all: the mean without padding.

    Args:
        lengths: Of the data; None where all samples have one length.
        kind: How samples are put together; its micro-batch doesn't count.
        sizes: Micro-batches.
    """
    if lengths is None:
        return np.ones_like(sizes)
    if kind.packing or kind.train_sampling_strategy == "group_by_length":
        return np.full_like(sizes, lengths.mean / lengths.maximum)
    return expected_longest(lengths, sizes) / lengths.maximum


def expected_longest(lengths: LengthProfile, samples: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return about how long the longest of so many samples is: their n/(n+1) quantile, and the mean for one."""
    known = [(0.0, lengths.minimum), (0.5, lengths.median), (0.95, lengths.p95), (1.0, lengths.maximum)]
    quantiles, values = zip(*known, strict=True)
    longest = np.maximum(np.interp(samples / (samples + 1), quantiles, values), lengths.mean)
    return np.where(samples == 1, lengths.mean, longest)
