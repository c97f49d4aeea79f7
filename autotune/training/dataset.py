"""The samples that a trial trains on; `batches` puts them into batches.

A data set is as long as it is asked to be: after its last sample the first one follows, so that no epoch ends inside a
trial. A sample is a slice of what was made beforehand, so that fetching it takes hardly any time beside a training
step. It depends on the workload's seed and on its index alone.

Ids, pixels and sound are valid and random. Texts have the lengths of a user's file, or all the workload's length and
therefore no attention mask. Masked-language samples label 15 % of the positions (arXiv:1810.04805) and leave the ids in
place, since a mask id changes neither time nor memory.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from autotune.errors import InputError
from autotune.training.batches import IGNORED, Collator, Sample, joined_batch, padded_batch, positioned_batch, row_order
from autotune.training.inputs import audio_input, image_input, image_text, labels_of, special_ids
from autotune.training.texts import refuse_files, text_lengths
from autotune.values.config import TrainConfig
from autotune.values.model import Task
from autotune.values.workload import SYNTHETIC_SAMPLES, Workload

MASKED_SHARE = 0.15
IMAGES = 8  # distinct images or recordings, which take megabytes and not gigabytes


class Samples(Protocol):
    """A map-style data set, as torch's DataLoader takes it."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Sample: ...


def training_data(
    workload: Workload,
    model_config: Any,
    *,
    samples: int,
    directory: Path | None,
    longest_first: int | None = None,
    config: TrainConfig | None = None,
) -> tuple[Samples, Collator]:
    """Return `samples` samples that fit `model_config`, and the collator that makes batches of them.

    Args:
        workload: Says the task, the lengths and the seed.
        model_config: The library config of the model that is trained.
        samples: Length of the data set.
        directory: Where `texts.prepare` put the lengths; None for synthetic data.
        longest_first: Number of the longest texts that come first, before all in the order of `config` and the seed;
            None keeps the order of the file, for a Trainer to sample from.
        config: How texts of a file are sampled and put into batches; None: at random, with padding.

    Raises:
        InputError: The workload names a file of images or sound, or one of texts without a directory.
        RunDirectoryError: The lengths are missing.
    """
    from transformers import DataCollatorWithFlattening, default_data_collator

    refuse_files(workload)
    if workload.task is Task.IMAGE_TEXT_TO_TEXT:
        return Repeated(_images_in_texts(workload, model_config), samples), joined_batch
    if not workload.task.takes_text:
        return Repeated(_images_or_sound(workload, model_config), samples), default_data_collator
    if workload.dataset is None:
        shares_tokens = config is not None and config.parallelism.sequence_parallel > 1
        collator = positioned_batch if shares_tokens else default_data_collator
        return Repeated(_texts(workload, model_config, None), samples), collator
    if directory is None:
        raise InputError("the data are of a file: give directory=, where their lengths are or are to be put")
    lengths = text_lengths(directory)
    config = config or TrainConfig(per_device_train_batch_size=1)
    if longest_first is not None:
        order = row_order(
            lengths[:, 0],
            longest_first=longest_first,
            rows=samples,
            config=config,
            # The Trainer's sampler by length goes by a device's samples of a step, and deals them out afterwards.
            per_step=workload.samples_per_step(config) // config.parallelism.data_parallel,
            seed=workload.seed,
        )
        lengths = lengths[order]
    pad = next(iter(special_ids(model_config, "pad_token_id")), 0)
    collator = DataCollatorWithFlattening() if config.packing else partial(padded_batch, pad_id=pad)
    return Repeated(_texts(workload, model_config, lengths), samples), collator


@dataclass(frozen=True)
class Repeated:
    """As many samples as are wanted; after the last one the first follows again."""

    source: Samples
    samples: int

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> Sample:
        if not 0 <= index < self.samples:
            raise IndexError(index)
        return self.source[index % len(self.source)]


def token_lengths(samples: Any, numbers: NDArray[np.int64]) -> list[NDArray[np.int64]]:
    """Return the lengths of samples of `training_data` by their numbers, none of which is read.

    They are those of the ids and of a decoder's own labels; nothing for samples without tokens.
    """
    while isinstance(samples, Repeated):
        numbers, samples = numbers % len(samples.source), samples.source
    return list(samples.lengths[numbers].T)


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
            count = max(1, round(MASKED_SHARE * len(ids)))  # or a batch of short texts would have no loss
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
        rows["labels"] = random.integers(config.num_labels, size=SYNTHETIC_SAMPLES, dtype=np.int32)
    return RandomSamples(rows, lengths, workload.seed if workload.task is Task.MASKED_LM else None)


def _random_ids(random: np.random.Generator, length: int, config: Any) -> NDArray[np.int32]:
    """Return rows of ids that aren't special but for the last, the end of a text if the model has one."""
    special = [i for name in ("pad_token_id", "eos_token_id", "bos_token_id") for i in special_ids(config, name)]
    special += [i for name in ("image_token_id", "video_token_id") if (i := getattr(config, name, None)) is not None]
    ordinary = np.setdiff1d(np.arange(config.get_text_config().vocab_size, dtype=np.int32), special)
    rows = random.choice(ordinary, size=(SYNTHETIC_SAMPLES, length))
    end = [i for i in special_ids(config, "eos_token_id") if i < config.get_text_config().vocab_size]
    if end:  # a config made for a smaller vocabulary may name one beyond it
        rows[:, -1] = end[0]
    return rows


def _images_in_texts(workload: Workload, config: Any) -> RandomSamples:
    """Return texts with images: placeholders before the text, which alone has labels."""
    random = np.random.default_rng(workload.seed)
    shown = image_text(config, workload.images, workload.image_size)
    pixels = random.standard_normal((max(1, IMAGES // shown.images), *shown.pixels), dtype=np.float32)
    ids, positions = _random_ids(random, workload.sequence_length, config), shown.positions()
    rows = {"input_ids": ids, "labels": ids.copy(), "pixel_values": pixels}
    rows["input_ids"][:, positions], rows["labels"][:, positions] = shown.token, IGNORED
    if shown.image.named is not None:
        rows[shown.image.named] = np.array([[shown.image.numbers] * shown.images])
    if shown.types is not None:
        name, of_image, of_text = shown.types
        rows[name] = np.full((1, ids.shape[1]), of_text)
        rows[name][:, positions] = of_image
    return RandomSamples(rows, np.full((SYNTHETIC_SAMPLES, 1), ids.shape[1]))


def _images_or_sound(workload: Workload, config: Any) -> RandomSamples:
    """Return noise, with a class or a transcript each."""
    random, colours = np.random.default_rng(workload.seed), None
    if workload.task.takes_audio:
        name, shape = audio_input(config, workload.sequence_length)
    else:
        name, shape, colours = image_input(config)
    if workload.task is Task.SPEECH_SEQ2SEQ:
        labels = _random_ids(random, workload.target_length or workload.sequence_length, config)
    elif workload.task is Task.SPEECH_CTC:
        ordinary = np.setdiff1d(np.arange(config.vocab_size), special_ids(config, "pad_token_id"))  # CTC's blank
        labels = random.choice(ordinary, size=(SYNTHETIC_SAMPLES, labels_of(workload.sequence_length)))
    else:
        labels = random.integers(config.num_labels, size=SYNTHETIC_SAMPLES, dtype=np.int32)
    size = (IMAGES, *shape)
    inputs = random.standard_normal(size, dtype=np.float32) if colours is None else random.integers(colours, size=size)
    return RandomSamples({name: inputs, "labels": labels}, np.empty((SYNTHETIC_SAMPLES, 0), dtype=np.int64))
