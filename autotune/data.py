"""Makes the samples a trial trains on, synthetic or from the prepared corpus, and puts them into batches.

Called in the process of a trial. A data set is as long as it is asked to be (it wraps around), so that no
epoch ends inside a trial, and an item is a slice of what was made beforehand, so that fetching it costs next
to nothing beside a training step. Every item depends on the workload's seed and on its index alone.

Synthetic texts all have the workload's length and therefore no attention mask. Their ids, like the pixels of
the images, are valid and otherwise without meaning. Masked-language samples label 15 % of the positions
(arXiv:1810.04805) but leave the ids in place, since a mask id changes neither time nor memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from autotune.architecture import Task
from autotune.config import SYNTHETIC_SAMPLES, Workload
from autotune.corpus import Corpus, load_rows, prepare, row_lengths
from autotune.errors import InputError

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["Corpus", "prepare", "training_data"]

IGNORED = -100  # the label that transformers' losses leave out
MASKED_SHARE = 0.15
IMAGES = 8  # distinct images; a data set of them takes megabytes, not gigabytes
_DEFAULT_IMAGE_SIZE = 224  # of ImageNet models whose config doesn't tell, such as ResNet

Sample = dict[str, "Tensor"]


class Samples(Protocol):
    """A map-style data set, as torch's DataLoader takes it."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Sample: ...


class Collator(Protocol):
    """Makes a batch of samples."""

    def __call__(self, samples: Sequence[Sample]) -> Sample:
        """Return tensors whose first dimension is that of the batch."""
        ...


def training_data(
    workload: Workload, model_config: Any, *, samples: int, directory: Path | None, longest_first: int | None = None
) -> tuple[Samples, Collator]:
    """Return `samples` samples that fit `model_config`, and what makes batches of them.

    Args:
        workload: The task, the lengths and the seed.
        model_config: The transformers configuration of the model that is trained.
        samples: Length of the data set; indices beyond the data start again from their beginning.
        directory: Where `corpus.prepare` put the rows; None for synthetic data.
        longest_first: So many of the longest rows come first, that the peak of memory is met at once, and all rows
            follow in an order that the seed alone decides; None keeps the order of the file.

    Raises:
        InputError: The workload wants images from a file.
        RunDirectoryError: The prepared rows are missing.
    """
    if workload.task is Task.IMAGE_CLASSIFICATION:
        if workload.dataset is not None:
            raise InputError(f"{workload.dataset}: images are not read from files yet; leave the data out")
        return Repeated(_synthetic_images(workload, model_config), samples), StackCollator()
    if workload.dataset is None:
        return Repeated(_synthetic_texts(workload, model_config), samples), StackCollator()
    if directory is None:
        raise ValueError("real data need the directory that they were prepared in")
    rows = load_rows(directory)
    texts: Samples = TextSamples(
        workload.task,
        workload.seed,
        inputs=Column(rows, "input_ids"),
        labels=Column(rows, "labels") if "labels" in rows.column_names else None,
    )
    if longest_first is not None:
        texts = Ordered(texts, _order(row_lengths(rows), longest_first, workload.seed))
    return Repeated(texts, samples), PadCollator(_ids(model_config, "pad_token_id", default=0)[0])


@dataclass(frozen=True)
class Repeated:
    """As many samples as wanted, from the first again after the last."""

    source: Samples
    samples: int

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> Sample:
        if not 0 <= index < self.samples:
            raise IndexError(index)
        return self.source[index % len(self.source)]


@dataclass(frozen=True)
class Ordered:
    """The samples in an order of their own."""

    source: Samples
    order: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.order)

    def __getitem__(self, index: int) -> Sample:
        return self.source[int(self.order[index])]


def _order(lengths: NDArray[np.int64], longest_first: int, seed: int) -> NDArray[np.int64]:
    """Return row numbers: the longest rows, then all rows shuffled."""
    longest = np.argsort(-lengths, kind="stable")[:longest_first]
    return np.concatenate([longest, np.random.default_rng(seed).permutation(len(lengths))])


@dataclass(frozen=True)
class Column:
    """A column of prepared rows, read where it lies: some microseconds an item."""

    rows: Any
    name: str

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Any:
        cell = self.rows.data.column(self.name)[index]
        return cell.values.to_numpy() if hasattr(cell, "values") else cell.as_py()


@dataclass(frozen=True)
class TextSamples:
    """Token ids and what is to be learnt from them.

    Args:
        task: Decides the labels.
        seed: Of the masked positions.
        inputs: Token ids by sample.
        labels: Target ids or class by sample; None: the labels are made from the inputs.
    """

    task: Task
    seed: int
    inputs: Column | NDArray[np.int32]
    labels: Column | NDArray[np.int32] | None

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
class ImageSamples:
    """Labels of their own for a handful of images that take turns."""

    images: NDArray[np.float32]
    labels: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> Sample:
        image = self.images[index % len(self.images)]
        return {"pixel_values": _tensor(image), "labels": _tensor(np.array(self.labels[index]))}


@dataclass(frozen=True)
class StackCollator:
    """Batches of samples that are all of one shape."""

    def __call__(self, samples: Sequence[Sample]) -> Sample:
        """Stack the tensors of each name."""
        import torch

        return {name: torch.stack([sample[name] for sample in samples]) for name in samples[0]}


@dataclass(frozen=True)
class PadCollator:
    """Batches of texts, padded on the right to the longest of the batch, as Hugging Face's collators do."""

    pad_id: int

    def __call__(self, samples: Sequence[Sample]) -> Sample:
        """Pad and stack; mask what is padding."""
        import torch

        ids = [sample["input_ids"] for sample in samples]
        labels = [sample["labels"] for sample in samples]
        return {
            "input_ids": _padded(ids, self.pad_id),
            "attention_mask": _padded([torch.ones_like(row) for row in ids], 0),
            "labels": _padded(labels, IGNORED) if labels[0].ndim else torch.stack(labels),
        }


def _padded(rows: Sequence[Tensor], value: int) -> Tensor:
    from torch.nn.utils.rnn import pad_sequence

    return pad_sequence(list(rows), batch_first=True, padding_value=value)


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
    """Return rows of ordinary ids that end as a text of the model ends."""
    special = [i for name in ("pad_token_id", "eos_token_id", "bos_token_id") for i in _ids(config, name)]
    ordinary = np.setdiff1d(np.arange(config.get_text_config().vocab_size, dtype=np.int32), special)
    rows = random.choice(ordinary, size=(SYNTHETIC_SAMPLES, length))
    end = [i for i in _ids(config, "eos_token_id") if i < config.get_text_config().vocab_size]
    if end:  # a config made for a smaller vocabulary may name one beyond it
        rows[:, -1] = end[0]
    return rows


def _ids(config: Any, name: str, *, default: int | None = None) -> list[int]:
    """Return the special ids of a name: a config has none, one, or several."""
    value = getattr(config.get_text_config(), name, None)
    if value is None:
        value = [] if default is None else default
    return list(value) if isinstance(value, list | tuple) else [value]


def _synthetic_images(workload: Workload, config: Any) -> ImageSamples:
    random = np.random.default_rng(workload.seed)
    vision = getattr(config, "vision_config", config)
    size = getattr(vision, "image_size", None) or _DEFAULT_IMAGE_SIZE
    height, width = (size, size) if isinstance(size, int) else size
    shape = (IMAGES, getattr(vision, "num_channels", 3), height, width)
    return ImageSamples(
        images=random.standard_normal(shape, dtype=np.float32),
        labels=random.integers(config.num_labels, size=SYNTHETIC_SAMPLES, dtype=np.int64),
    )
