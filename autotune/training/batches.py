"""How samples become batches: their order, and padding or packing of a micro-batch.

In a trial the first two steps have the longest rows, so that the peak of memory is reached at once. The rest is as in
training: shuffled, in the order of the file, or grouped by length by the Trainer's own sampler. That sampler goes from
the longest batches to the shortest over thousands of rows, of which a trial sees some dozens, so its micro-batches are
visited in an order in which any few of them represent all. Where micro-batches are balanced by tokens, the Trainer's
sampler cuts the rows of each step, shuffled as ever, into its micro-batches.

Packing, by transformers' `DataCollatorWithFlattening`, puts the samples of a micro-batch into one row without padding,
with positions that start anew at each sample.
transformers masks by the positions, so no sample sees another, and the loss is that of padded batches. Blocks of a
fixed length, which cut samples and let one see the next, would be another training and are not made.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from autotune.values.config import TrainConfig

if TYPE_CHECKING:
    from torch import Tensor

# The first step makes the optimizer's states; the second has them from its start, and is the one that peaks.
STEPS_TO_PEAK = 2

_GOLDEN_RATIO = (math.sqrt(5) - 1) / 2

IGNORED = -100  # the label that transformers' losses leave out

# Model types whose attention stays within the samples of a packed row if positions start anew and no mask is given, as
# a test with tiny models sees (transformers 5.23). In OPT, BLOOM, Falcon, gpt-oss and Mamba samples see each other.
PACKED = frozenset(
    {
        "cohere", "deepseek_v2", "deepseek_v3", "gemma", "gemma3_text", "glm", "gpt2", "gpt_neox", "granite", "llama",
        "mistral", "mixtral", "olmo", "olmo2", "olmoe", "phi", "phi3", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe",
        "smollm3", "stablelm", "starcoder2",
    }
)  # fmt: skip

Sample = dict[str, "Tensor"]
Collator = Callable[[Sequence[Sample]], Sample]  # from samples to tensors whose first dimension is that of the batch


def padded_batch(samples: Sequence[Sample], *, pad_id: int) -> Sample:
    """Pad texts on the right to the longest of the batch, as Hugging Face's collators do; mask what is padding."""
    import torch
    from torch.nn.utils.rnn import pad_sequence

    ids, labels = ([sample[name] for sample in samples] for name in ("input_ids", "labels"))
    fill = partial(pad_sequence, batch_first=True)
    return {
        "input_ids": fill(ids, padding_value=pad_id),
        "attention_mask": fill([torch.ones_like(row) for row in ids], padding_value=0),
        "labels": fill(labels, padding_value=IGNORED) if labels[0].ndim else torch.stack(labels),
    }


def positioned_batch(samples: Sequence[Sample]) -> Sample:
    """Stack texts of one length with the position of each token, which a rank that has some of them needs."""
    import torch

    batch = {name: torch.stack([sample[name] for sample in samples]) for name in samples[0]}
    rows, tokens = batch["input_ids"].shape
    return {**batch, "position_ids": torch.arange(tokens).repeat(rows, 1)}


def joined_batch(samples: Sequence[Sample]) -> Sample:
    """Stack texts of one length, and join their images along the first dimension, as the models take them."""
    import torch

    return {
        name: (torch.stack if value.ndim == 1 else torch.cat)([sample[name] for sample in samples])
        for name, value in samples[0].items()
    }


def row_order(
    lengths: NDArray[np.int64], *, longest_first: int, rows: int, config: TrainConfig, per_step: int, seed: int
) -> NDArray[np.int64]:
    """Return row numbers in the order in which a trial reads them.

    Args:
        lengths: Tokens of all rows.
        longest_first: Number of the longest rows that come first, in each of the first `STEPS_TO_PEAK` steps.
        rows: Number of rows that are read, or more; the sampler orders as many.
        config: Says the micro-batch and the sampler.
        per_step: Rows of an optimizer step, by which the Trainer's sampler groups.
        seed: Of the random orders.
    """
    longest = np.tile(np.argsort(-lengths, kind="stable")[:longest_first], STEPS_TO_PEAK)
    if config.is_balanced or config.train_sampling_strategy == "random":
        return np.concatenate([longest, np.random.default_rng(seed).permutation(len(lengths))])
    if config.train_sampling_strategy == "sequential":
        rest = np.arange(len(lengths))
    else:
        drawn = np.random.default_rng(seed).permutation(len(lengths))[: max(per_step, rows - longest_first)]
        rest = _grouped(drawn, lengths, per_step, seed)
    return np.concatenate([longest, _representative(rest, lengths, config.per_device_train_batch_size)])


def _grouped(rows: NDArray[np.int64], lengths: NDArray[np.int64], per_step: int, seed: int) -> NDArray[np.int64]:
    """Return rows in the order of the Trainer's sampler by length."""
    import torch
    from transformers.trainer_pt_utils import get_length_grouped_indices

    generator = torch.Generator().manual_seed(seed)
    order = get_length_grouped_indices(lengths[rows].tolist(), per_step, generator=generator)
    return rows[np.array(order, dtype=np.int64)]


def _representative(rows: NDArray[np.int64], lengths: NDArray[np.int64], micro_batch: int) -> NDArray[np.int64]:
    """Return whole micro-batches of consecutive `rows`, in an order in which the first few have the lengths of all.

    Sorted by their longest sample, they are visited in steps of the golden ratio, which never leave a large gap.
    """
    count = len(rows) // micro_batch
    if count == 0:
        return rows
    batches = rows[: count * micro_batch].reshape(count, micro_batch)
    by_length = batches[np.argsort(lengths[batches].max(axis=1), kind="stable")]
    turns = (int((0.5 + turn * _GOLDEN_RATIO) % 1.0 * count) for turn in itertools.count())
    visits: dict[int, None] = {}
    while len(visits) < count:
        visits[next(turns)] = None
    visited: NDArray[np.int64] = by_length[list(visits)].reshape(-1)
    return visited


def micro_batches(lengths: Sequence[int], config: TrainConfig, per_step: int) -> Iterator[list[int]]:
    """Yield the numbers of the samples of each micro-batch, those of all ranks; a step has `per_step` samples.

    Balanced ones come rank by rank, in whole steps.
    """
    micro = config.per_device_train_batch_size
    if not config.is_balanced:
        yield from (list(range(start, start + micro)) for start in range(0, len(lengths) - micro + 1, micro))
        return
    from transformers.trainer_pt_utils import BatchRebalanceSampler

    ranks = config.parallelism.data_parallel
    for rank in range(ranks):
        steps = per_step // (micro * ranks)
        yield from BatchRebalanceSampler(list(lengths), per_step, ranks, steps, shuffle=False, rank=rank)


def padding_share(lengths: Sequence[NDArray[np.int64]], config: TrainConfig, per_step: int) -> float | None:
    """Return the share of padding among the positions of samples; None without tokens or a whole micro-batch.

    Args:
        lengths: Of the samples in the order in which they are read: of their ids, and of a decoder's own labels.
        config: Says the micro-batches.
        per_step: Samples of a step, those of all ranks.
    """
    batches = list(micro_batches(lengths[0].tolist(), config, per_step)) if lengths else []
    if not batches:
        return None
    if config.packing:
        return 0.0
    order, counts = np.concatenate(batches), np.array([len(batch) for batch in batches])
    starts = np.cumsum(counts) - counts
    run = sum(int((np.maximum.reduceat(sizes[order], starts) * counts).sum()) for sizes in lengths)
    return 1 - sum(int(sizes[order].sum()) for sizes in lengths) / run
