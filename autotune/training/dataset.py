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
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from autotune.errors import InputError
from autotune.training.batches import (
    IGNORED,
    Collator,
    ImageTextCollator,
    PackCollator,
    PadCollator,
    PositionCollator,
    Sample,
    row_order,
)
from autotune.training.inputs import ImageText, audio_input, image_input, image_text, labels_of, special_ids
from autotune.training.texts import refuse_files, text_lengths
from autotune.values.config import TrainConfig
from autotune.values.model import Task
from autotune.values.workload import SYNTHETIC_SAMPLES, Workload

if TYPE_CHECKING:
    from torch import Tensor

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
    """Return `samples` samples that fit `model_config`, and what makes batches of them.

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
    from transformers import default_data_collator

    refuse_files(workload)
    if workload.task is Task.IMAGE_TEXT_TO_TEXT:
        return Repeated(_images_in_texts(workload, model_config), samples), ImageTextCollator()
    if not workload.task.takes_text:
        made = _sound if workload.task.takes_audio else _images
        return Repeated(made(workload, model_config), samples), default_data_collator
    if workload.dataset is None:
        shares_tokens = config is not None and config.parallelism.sequence_parallel > 1
        collator = PositionCollator() if shares_tokens else default_data_collator
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
    collator = PackCollator() if config.packing else PadCollator(pad)
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
    lengths = getattr(samples, "lengths", None)
    return [] if lengths is None else list(lengths[numbers].T)


@dataclass(frozen=True)
class TextSamples:
    """Token ids and labels; a sample has the last ids of a row, and so ends as the row does."""

    task: Task  # decides the labels
    seed: int  # of the masked positions
    ids: NDArray[np.int32]  # rows that take turns, as long as the longest sample
    labels: NDArray[np.int32] | None  # a row of target ids or a class for each row; None: they are made from the ids
    lengths: NDArray[np.int64]  # (samples, 1), or (samples, 2) with those of the targets

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> Sample:
        row, sizes = index % len(self.ids), self.lengths[index]
        ids = self.ids[row, self.ids.shape[1] - sizes[0] :].astype(np.int64)
        if self.task is Task.MASKED_LM:
            labels = self._masked(ids, index)
        elif self.labels is None:
            labels = ids
        elif self.task is Task.SEQ2SEQ_LM:
            labels = self.labels[row, self.labels.shape[1] - sizes[1] :].astype(np.int64)
        else:
            labels = np.array(self.labels[row], dtype=np.int64)
        return {"input_ids": _tensor(ids), "labels": _tensor(labels)}

    def _masked(self, ids: NDArray[np.int64], index: int) -> NDArray[np.int64]:
        # At least one, or a batch of short texts would have no loss.
        count = max(1, round(MASKED_SHARE * len(ids)))
        positions = np.random.default_rng((self.seed, index)).permutation(len(ids))[:count]
        labels = np.full_like(ids, IGNORED)
        labels[positions] = ids[positions]
        return labels


@dataclass(frozen=True)
class DenseSamples:
    """A handful of images or recordings, which take turns, with labels by sample."""

    name: str
    inputs: NDArray[np.float32] | NDArray[np.int64]
    labels: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> Sample:
        dense = self.inputs[index % len(self.inputs)]
        return {self.name: _tensor(dense), "labels": _tensor(np.array(self.labels[index]))}


@dataclass(frozen=True)
class ImageTextSamples:
    """Texts with images: placeholders before the text, which alone has labels."""

    texts: NDArray[np.int32]
    pixels: NDArray[np.float32]  # of distinct samples, which take turns
    shown: ImageText

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Tokens of each sample, (samples, 1)."""
        return np.full((len(self.texts), 1), self.texts.shape[1])

    def __len__(self) -> int:
        return len(self.texts)

    def __getitem__(self, index: int) -> Sample:
        shown, positions = self.shown, self.shown.positions()
        ids = np.array(self.texts[index], dtype=np.int64)
        labels = ids.copy()
        ids[positions], labels[positions] = shown.token, IGNORED
        sample = {"input_ids": ids, "labels": labels, "pixel_values": self.pixels[index % len(self.pixels)]}
        if shown.image.named is not None:
            sample[shown.image.named] = np.array([shown.image.numbers] * shown.images)
        if shown.types is not None:
            name, of_image, of_text = shown.types
            sample[name] = np.full_like(ids, of_text)
            sample[name][positions] = of_image
        return {name: _tensor(values) for name, values in sample.items()}


def _tensor(array: NDArray[Any]) -> Tensor:
    import torch

    return torch.from_numpy(array)


def _texts(workload: Workload, config: Any, lengths: NDArray[np.int64] | None) -> TextSamples:
    """Return texts of these lengths; None: all are as long as the workload says."""
    random, has_targets = np.random.default_rng(workload.seed), workload.task is Task.SEQ2SEQ_LM
    if lengths is None:
        longest = (workload.sequence_length, workload.target_length or workload.sequence_length)[: 1 + has_targets]
        lengths = np.tile(longest, (SYNTHETIC_SAMPLES, 1))
    ids, *targets = (_random_ids(random, int(longest), config) for longest in lengths.max(axis=0))
    labels = targets[0] if targets else None
    if workload.task is Task.SEQUENCE_CLASSIFICATION:
        labels = random.integers(config.num_labels, size=SYNTHETIC_SAMPLES, dtype=np.int32)
    return TextSamples(workload.task, workload.seed, ids, labels, lengths)


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


def _images_in_texts(workload: Workload, config: Any) -> ImageTextSamples:
    random = np.random.default_rng(workload.seed)
    shown = image_text(config, workload.images, workload.image_size)
    pixels = random.standard_normal((max(1, IMAGES // shown.images), *shown.pixels), dtype=np.float32)
    return ImageTextSamples(_random_ids(random, workload.sequence_length, config), pixels, shown)


def _images(workload: Workload, config: Any) -> DenseSamples:
    random = np.random.default_rng(workload.seed)
    name, shape, clusters = image_input(config)
    size = (IMAGES, *shape)
    return DenseSamples(
        name=name,
        inputs=random.standard_normal(size, dtype=np.float32)
        if clusters is None
        else random.integers(clusters, size=size),
        labels=random.integers(config.num_labels, size=SYNTHETIC_SAMPLES, dtype=np.int64),
    )


def _sound(workload: Workload, config: Any) -> DenseSamples:
    """Return noise of the workload's length, with a transcript or a class each."""
    random = np.random.default_rng(workload.seed)
    name, shape = audio_input(config, workload.sequence_length)
    if workload.task is Task.AUDIO_CLASSIFICATION:
        labels = random.integers(config.num_labels, size=SYNTHETIC_SAMPLES, dtype=np.int64)
    elif workload.task is Task.SPEECH_SEQ2SEQ:
        labels = _random_ids(random, workload.target_length or workload.sequence_length, config).astype(np.int64)
    else:
        blank = special_ids(config, "pad_token_id")  # CTC's
        ordinary = np.setdiff1d(np.arange(config.vocab_size), blank)
        labels = random.choice(ordinary, size=(SYNTHETIC_SAMPLES, labels_of(workload.sequence_length)))
    return DenseSamples(name, random.standard_normal((IMAGES, *shape), dtype=np.float32), labels)
