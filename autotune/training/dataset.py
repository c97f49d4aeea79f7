"""The samples that a trial trains on, and how they become batches: their order, and padding or packing.

A data set has as many samples as a trial asks for; after its last one the first follows. A sample is a slice of rows
made beforehand, by the workload's seed and its index alone. Ids, pixels and sound are valid and random. Texts have the
lengths of a user's file, or all the workload's length. Masked-language samples label 15 % of the positions
(arXiv:1810.04805) and leave the ids in place, since a mask id changes neither time nor memory.

In a trial the first two steps have the longest rows, so that the peak of memory is reached at once. The rest is as in
training: shuffled, in the order of the file, grouped by length (in an order in which any few micro-batches represent
all) or balanced, by the Trainer's own samplers. Packing, by transformers' `DataCollatorWithFlattening`, puts the
samples of a micro-batch into one row; positions start anew at each, by which transformers masks.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from autotune.training.inputs import OF_ONE_CLASS, image_or_sound, image_text, labels_of, special_ids
from autotune.training.texts import text_lengths
from autotune.values.config import TrainConfig
from autotune.values.model import Task
from autotune.values.workload import SYNTHETIC_SAMPLES, Workload

if TYPE_CHECKING:
    from torch import Tensor

# The first step makes the optimizer's states; the second has them from its start, and is the one that peaks.
STEPS_TO_PEAK = 2

PLAIN = TrainConfig(per_device_train_batch_size=1)  # by which samples are read at random, with padding
IGNORED = -100  # the label that transformers' losses leave out
_DISTINCT = 8  # images or recordings, which take megabytes and not gigabytes

Sample = dict[str, "Tensor"]
Collator = Callable[[Sequence[Sample]], Sample]  # from samples to tensors whose first dimension is that of the batch


def training_data(
    workload: Workload,
    model_config: Any,
    *,
    samples: int,
    directory: Path | None,  # where `texts.prepare` put the lengths; None for synthetic data
    longest_first: int | None = None,
    config: TrainConfig = PLAIN,
) -> "tuple[Any, Collator]":
    """Return `samples` samples that fit the library config of a model, and the collator that makes batches of them.

    The `longest_first` longest texts of a file come first, before all in the order of `config` and the seed; None keeps
    the order of the file, for a Trainer to sample from.
    """
    from transformers import DataCollatorWithFlattening, default_data_collator

    if workload.task is Task.IMAGE_TEXT_TO_TEXT:
        return repeated(_images_in_texts(workload, model_config), samples), joined_batch
    if not workload.task.takes_text:
        return repeated(_images_or_sound(workload, model_config), samples), default_data_collator
    pad = next(iter(special_ids(model_config, "pad_token_id")), 0)
    padded = partial(padded_batch, pad_id=pad, multiple=config.pad_to_multiple_of or 1)
    if workload.dataset is None:
        # A tokenizer gives a mask, by which compiled models choose their attention, even where nothing is padded.
        collator = positioned_batch if config.parallelism.sequence_parallel > 1 else padded
        return repeated(_texts(workload, model_config, None), samples), collator
    assert directory is not None
    lengths = text_lengths(directory)
    if longest_first is not None:
        lengths = lengths[row_order(lengths[:, 0], workload, config, longest_first=longest_first, rows=samples)]
    collator = DataCollatorWithFlattening() if config.packing else padded
    return repeated(_texts(workload, model_config, lengths), samples), collator


def repeated(source: Any, samples: int) -> Any:
    """Return a dataset of as many samples as are wanted; after the last one the first follows again."""
    from torch.utils.data import ConcatDataset, Subset

    return Subset(ConcatDataset([source] * -(-samples // len(source))), range(samples))


@dataclass(frozen=True)
class RandomSamples:
    """Samples of rows that take turns, by field; a text has the last tokens of a row, and so ends as the row does."""

    rows: dict[str, NDArray[Any]]  # by field; without labels they are the ids
    lengths: NDArray[np.int64]  # tokens of each sample in the first fields: (samples, fields)
    masks: int | None = None  # seed of the positions that have labels; None: all have

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> Sample:
        import torch

        sample = {name: np.asarray(rows[index % len(rows)]) for name, rows in self.rows.items()}
        for name, length in zip(self.rows, self.lengths[index], strict=False):
            sample[name] = sample[name][len(sample[name]) - length :]
        if self.masks is not None:
            ids = sample["input_ids"]
            count = max(1, round(0.15 * len(ids)))  # or a batch of short texts would have no loss
            positions = np.random.default_rng((self.masks, index)).permutation(len(ids))[:count]
            sample["labels"] = np.full_like(ids, IGNORED)
            sample["labels"][positions] = ids[positions]
        elif "labels" not in sample:
            sample["labels"] = sample["input_ids"]
        kinds = {"i": np.int64, "f": np.float32}
        return {name: torch.from_numpy(row.astype(kinds[row.dtype.kind], copy=False)) for name, row in sample.items()}


def _texts(workload: Workload, config: Any, lengths: NDArray[np.int64] | None) -> RandomSamples:
    """Return texts of these lengths; None: all are as long as the workload says."""
    random, has_targets = np.random.default_rng(workload.seed), workload.task is Task.SEQ2SEQ_LM
    if lengths is None:
        longest = (workload.sequence_length, workload.target_length or workload.sequence_length)[: 1 + has_targets]
        lengths = np.tile(longest, (SYNTHETIC_SAMPLES, 1))
    names = ("input_ids", "labels")[: 1 + has_targets]
    rows = {n: _random_ids(random, int(most), config) for n, most in zip(names, lengths.max(axis=0), strict=True)}
    if workload.task is Task.SEQUENCE_CLASSIFICATION:
        rows["labels"] = _classes(random, config)
    return RandomSamples(rows, lengths, workload.seed if workload.task is Task.MASKED_LM else None)


def _classes(random: np.random.Generator, config: Any) -> NDArray[Any]:
    """Return the class of each sample; where a config's problem takes numbers, such as of several classes, one each."""
    labels = random.integers(config.num_labels, size=SYNTHETIC_SAMPLES, dtype=np.int32)
    return labels if config.problem_type in OF_ONE_CLASS else np.eye(config.num_labels, dtype=np.float32)[labels]


def _random_ids(random: np.random.Generator, length: int, config: Any) -> NDArray[np.int32]:
    """Return rows of ids that aren't special but for the last, the end of a text if the model has one."""
    special = [i for name in ("pad_token_id", "eos_token_id", "bos_token_id") for i in special_ids(config, name)]
    special += [i for name in ("image_token_id", "video_token_id") if (i := getattr(config, name, None)) is not None]
    ordinary = np.setdiff1d(np.arange(config.get_text_config().vocab_size, dtype=np.int32), special)
    count = max(8, min(SYNTHETIC_SAMPLES, (1 << 24) // length))  # few of a million tokens
    rows = random.choice(ordinary, size=(count, length))
    end = [i for i in special_ids(config, "eos_token_id") if i < config.get_text_config().vocab_size]
    if end:  # a config made for a smaller vocabulary may name one beyond it
        rows[:, -1] = end[0]
    return rows


def _images_in_texts(workload: Workload, config: Any) -> RandomSamples:
    """Return texts with images: placeholders before the text, which alone has labels."""
    random = np.random.default_rng(workload.seed)
    shown = image_text(config, workload.images, workload.image_size)
    pixels = random.standard_normal((max(1, _DISTINCT // shown.images), *shown.pixels), dtype=np.float32)
    ids, length = _random_ids(random, workload.sequence_length, config), workload.sequence_length
    rows = {"input_ids": ids, "labels": ids.copy(), "pixel_values": pixels}
    rows["input_ids"][:, shown.positions], rows["labels"][:, shown.positions] = shown.token, IGNORED
    rows |= {name: np.array([values]) for name, values in shown.marks(length).items()}
    return RandomSamples(rows, np.full((SYNTHETIC_SAMPLES, 1), length))


def _images_or_sound(workload: Workload, config: Any) -> RandomSamples:
    random, size, length = np.random.default_rng(workload.seed), SYNTHETIC_SAMPLES, workload.sequence_length
    name, shape, colours = image_or_sound(config, length)
    if workload.task is Task.SPEECH_SEQ2SEQ:
        labels = _random_ids(random, workload.target_length or length, config)
    elif workload.task is Task.SPEECH_CTC:
        ordinary = np.setdiff1d(np.arange(config.vocab_size), special_ids(config, "pad_token_id"))  # CTC's blank
        labels = random.choice(ordinary, size=(size, labels_of(length)))
    else:
        labels = _classes(random, config)
    whole = (_DISTINCT, *shape)
    inputs = random.integers(colours, size=whole) if colours else random.standard_normal(whole, dtype=np.float32)
    return RandomSamples({name: inputs, "labels": labels}, np.empty((size, 0), dtype=np.int64))


def padded_batch(samples: Sequence[Sample], *, pad_id: int, multiple: int = 1) -> Sample:
    """Pad texts on the right to a multiple of tokens, as Hugging Face's collators do; mask what is padding."""
    import torch
    from torch.nn.functional import pad
    from torch.nn.utils.rnn import pad_sequence

    def filled(rows: list["Tensor"], value: int) -> "Tensor":
        whole = pad_sequence(rows, batch_first=True, padding_value=value)
        return pad(whole, (0, -whole.shape[1] % multiple), value=value)

    ids, labels = ([sample[name] for sample in samples] for name in ("input_ids", "labels"))
    return {
        "input_ids": filled(ids, pad_id),
        "attention_mask": filled([torch.ones_like(row) for row in ids], 0),
        "labels": filled(labels, IGNORED) if labels[0].ndim and labels[0].dtype is torch.int64 else torch.stack(labels),
    }


def joined_batch(samples: Sequence[Sample]) -> Sample:
    """Stack texts of one length, and join their images along the first dimension, as the models take them."""
    import torch

    return {
        name: (torch.stack if value.ndim == 1 else torch.cat)([sample[name] for sample in samples])
        for name, value in samples[0].items()
    }


def positioned_batch(samples: Sequence[Sample]) -> Sample:
    """Stack texts of one length with the position of each token, which a rank that has some of them needs."""
    import torch

    batch = joined_batch(samples)
    rows, tokens = batch["input_ids"].shape
    return {**batch, "position_ids": torch.arange(tokens).repeat(rows, 1)}


def row_order(
    lengths: NDArray[np.int64], workload: Workload, config: TrainConfig, *, longest_first: int, rows: int
) -> NDArray[np.int64]:
    """Return row numbers in the order in which a trial reads them, by the tokens of all rows; `rows` are read at most.

    The `longest_first` longest come first, in each of the first `STEPS_TO_PEAK` steps; the others are repeated.
    """
    longest, seed = np.tile(np.argsort(-lengths, kind="stable")[:longest_first], STEPS_TO_PEAK), workload.seed

    def read(rest: NDArray[np.int64]) -> NDArray[np.int64]:
        return np.concatenate([longest, np.resize(rest, max(len(rest), rows - len(longest)))])

    if config.is_balanced or config.train_sampling_strategy == "random":
        return read(np.random.default_rng(seed).permutation(len(lengths)))
    if config.train_sampling_strategy == "sequential":
        rest = np.arange(len(lengths))
    else:
        import torch
        from transformers.trainer_pt_utils import get_length_grouped_indices

        # The Trainer's sampler groups a device's samples of a step by length, and deals them out afterwards.
        per_step = workload.samples_per_step(config) // config.parallelism.data_parallel
        drawn = np.random.default_rng(seed).permutation(len(lengths))[: max(per_step, rows - longest_first)]
        generator = torch.Generator().manual_seed(seed)
        order = get_length_grouped_indices(lengths[drawn].tolist(), per_step, generator=generator)
        rest = drawn[np.array(order, dtype=np.int64)]
    micro_batch = config.per_device_train_batch_size
    if (count := len(rest) // micro_batch) == 0:
        return read(rest)
    # Whole micro-batches, in an order in which the first few have the lengths of all: sorted by their longest sample,
    # they are visited in steps of the golden ratio, which never leave a large gap.
    batches = rest[: count * micro_batch].reshape(count, micro_batch)
    by_length = batches[np.argsort(lengths[batches].max(axis=1), kind="stable")]
    turns = (0.5 + np.arange(count) * (5**0.5 - 1) / 2) % 1.0
    return read(by_length[turns.argsort().argsort()].reshape(-1))
