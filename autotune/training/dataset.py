"""The samples that a trial trains on, synthetic or from the prepared corpus; `batches` puts them into batches.

A data set is as long as it is asked to be: after its last sample the first one follows, so that no epoch ends inside a
trial. A sample is a slice of what was made beforehand, so that fetching it takes hardly any time beside a training
step. It depends on the workload's seed and on its index alone.

Synthetic texts all have the workload's length and therefore no attention mask. Ids, pixels and sound are valid and
random. Masked-language samples label 15 % of the positions (arXiv:1810.04805) and leave the ids in place, since a mask
id changes neither time nor memory.
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
from autotune.training.corpus import load_rows, refuse_files, row_lengths
from autotune.training.image_text import ImageText, image_text
from autotune.training.inputs import audio_input, image_input, labels_of, special_ids
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
        directory: Where `corpus.prepare` put the rows; None for synthetic data.
        longest_first: Number of the longest rows that come first, before all rows in the order of `config` and the
            seed; None keeps the order of the file, for a Trainer to sample from.
        config: How rows of a file are sampled and put into batches; None: at random, with padding.

    Raises:
        InputError: The workload names a file of images or sound, or one of texts without a directory.
        RunDirectoryError: The prepared rows are missing.
    """
    from torch.utils.data import Subset
    from transformers import default_data_collator

    refuse_files(workload)
    if workload.task is Task.IMAGE_TEXT_TO_TEXT:
        return Repeated(_synthetic_images_in_texts(workload, model_config), samples), ImageTextCollator()
    if not workload.task.takes_text:
        made = _synthetic_sound if workload.task.takes_audio else _synthetic_images
        return Repeated(made(workload, model_config), samples), default_data_collator
    if workload.dataset is None:
        shares_tokens = config is not None and config.parallelism.sequence_parallel > 1
        collator = PositionCollator() if shares_tokens else default_data_collator
        return Repeated(_synthetic_texts(workload, model_config), samples), collator
    if directory is None:
        raise InputError("the data are of a file: give directory=, where their tokens are or are to be put")
    rows = load_rows(directory)
    texts: Samples = TextSamples(
        workload.task,
        workload.seed,
        inputs=Column(rows, "input_ids"),
        labels=Column(rows, "labels") if "labels" in rows.column_names else None,
    )
    config = config or TrainConfig(per_device_train_batch_size=1)
    if longest_first is not None:
        order = row_order(
            row_lengths(rows),
            longest_first=longest_first,
            rows=samples,
            config=config,
            # The Trainer's sampler by length goes by a device's samples of a step, and deals them out afterwards.
            per_step=workload.samples_per_step(config) // config.parallelism.data_parallel,
            seed=workload.seed,
        )
        texts = Subset(texts, order.tolist())  # type: ignore[arg-type]  # torch wants a Dataset by inheritance
    pad = next(iter(special_ids(model_config, "pad_token_id")), 0)
    return Repeated(texts, samples), PackCollator() if config.packing else PadCollator(pad)


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


@dataclass(frozen=True)
class Column:
    """A column of prepared rows, read from the memory-mapped file: some microseconds an item."""

    rows: Any
    name: str

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Any:
        cell = self.rows.data.column(self.name)[index]
        return cell.values.to_numpy() if hasattr(cell, "values") else cell.as_py()


def token_lengths(samples: Any, numbers: NDArray[np.int64]) -> list[NDArray[np.int64]]:
    """Return the lengths of samples of `training_data` by their numbers, none of which is read.

    They are those of the ids and of a decoder's own labels; nothing for samples without tokens.
    """
    from torch.utils.data import Subset

    while isinstance(samples, Repeated | Subset):
        if isinstance(samples, Repeated):
            numbers, samples = numbers % len(samples.source), samples.source
        else:
            numbers, samples = np.asarray(samples.indices)[numbers], samples.dataset
    columns: tuple[Any, ...] = (samples.texts,) if isinstance(samples, ImageTextSamples) else ()
    if isinstance(samples, TextSamples):
        columns = (samples.inputs, samples.labels)
    found = []
    for column in columns:
        if isinstance(column, Column) and hasattr(column.rows.features[column.name], "feature"):
            found.append(row_lengths(column.rows, column.name)[numbers])
        elif isinstance(column, np.ndarray) and column.ndim > 1:
            found.append(np.full(len(numbers), column.shape[1]))
    return found


@dataclass(frozen=True)
class TextSamples:
    """Token ids and labels."""

    task: Task  # decides the labels
    seed: int  # of the masked positions
    inputs: Column | NDArray[np.int32]  # token ids by sample
    labels: Column | NDArray[np.int32] | None  # target ids or class by sample; None: they are made from the inputs

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> Sample:
        ids = np.array(self.inputs[index], dtype=np.int64)
        if self.labels is not None:
            labels = np.array(self.labels[index], dtype=np.int64)
        elif self.task is Task.MASKED_LM:
            labels = self._masked(ids, index)
        else:
            labels = ids
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


def _synthetic_texts(workload: Workload, config: Any) -> TextSamples:
    random = np.random.default_rng(workload.seed)
    inputs = _random_ids(random, workload.sequence_length, config)
    labels = None
    if workload.task is Task.SEQ2SEQ_LM:
        labels = _random_ids(random, workload.target_length or workload.sequence_length, config)
    elif workload.task is Task.SEQUENCE_CLASSIFICATION:
        labels = random.integers(config.num_labels, size=SYNTHETIC_SAMPLES, dtype=np.int32)
    return TextSamples(workload.task, workload.seed, inputs, labels)


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


def _synthetic_images_in_texts(workload: Workload, config: Any) -> ImageTextSamples:
    random = np.random.default_rng(workload.seed)
    shown = image_text(config, workload.images, workload.image_size)
    pixels = random.standard_normal((max(1, IMAGES // shown.images), *shown.pixels), dtype=np.float32)
    return ImageTextSamples(_random_ids(random, workload.sequence_length, config), pixels, shown)


def _synthetic_images(workload: Workload, config: Any) -> DenseSamples:
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


def _synthetic_sound(workload: Workload, config: Any) -> DenseSamples:
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
