"""The samples of a user's own Trainer: their lengths, and their order in a trial.

As with the data of named models (`training.dataset`), the longest come first, so that memory peaks at once. A trial's
data set is as long as the trial, so that no epoch ends inside it. If the code makes its batches by itself, or reads
from a stream, it keeps its order.
"""

import contextlib
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from numpy.typing import NDArray

from autotune.errors import InputError, NoEffectError
from autotune.training.dataset import row_order
from autotune.values.budget import LossTask
from autotune.values.config import TrainConfig
from autotune.values.trial import TrialRequest
from autotune.values.workload import LENGTHS_FILE

# Rows that batches must have, as a share of their samples: a collator may leave out the few that can't be used.
_LEAST_ROWS = 0.9


class View:
    """Samples of a data set by their numbers, in any order and as often as wanted, with its other attributes."""

    def __init__(self, source: Any, order: NDArray[np.int64]) -> None:
        self._source, self._order = source, order

    def __len__(self) -> int:
        return len(self._order)

    def __getitem__(self, index: int) -> Any:
        return self._source[int(self._order[index])]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # copying and unpickling ask before there is a source
            raise AttributeError(name)
        return getattr(self._source, name)


def view(dataset: Any, order: NDArray[np.int64]) -> Any:
    import datasets

    return dataset.select(order) if isinstance(dataset, datasets.Dataset) else View(dataset, order)


def lengths_of(dataset: Any, column: str = "input_ids") -> NDArray[np.int64] | None:
    """Return the tokens of each sample's longest row, of which answers to choose from are several.

    None: samples have none, or reading them takes too long.
    """
    import datasets
    import pyarrow.compute as pc

    if isinstance(dataset, datasets.Dataset) and dataset.format["type"] != "custom":
        if len(dataset) == 0 or not isinstance(dataset.features.get(column), datasets.List):
            return None
        cells = dataset.select_columns([column]).with_format("arrow")[:][column]
        lengths = np.asarray(pc.list_value_length(cells), dtype=np.int64)
        if isinstance(dataset.features[column].feature, datasets.List) and lengths.all():
            rows = np.asarray(pc.list_value_length(pc.list_flatten(cells)), dtype=np.int64)
            return np.maximum.reduceat(rows, np.cumsum(lengths) - lengths)
        return lengths
    deadline, found = time.monotonic() + 10.0, []
    for index in range(len(dataset)):
        sample = dataset[index]
        if time.monotonic() > deadline:
            return None
        try:
            value = sample[column]
            has_rows = len(value) and (isinstance(value[0], list) or getattr(value, "ndim", 1) > 1)
            found.append(max(map(len, value if has_rows else [value])))
        except (TypeError, KeyError, IndexError):
            return None
    return np.array(found, dtype=np.int64) if found else None


def collated_lengths(trainer: Any, name: str) -> NDArray[np.int64] | None:
    """Return the length of each sample in the batches that the collator makes, by their mask or in `name`.

    None: that fails, or takes too long.
    """
    dataset, found, size = trainer.train_dataset, list[int](), 16
    deadline = time.monotonic() + 10.0
    with contextlib.suppress(Exception):  # of whatever kind: the trial of the baseline tells of it
        while len(found) < len(dataset) and time.monotonic() < deadline:
            numbers = np.arange(len(found), min(len(found) + size, len(dataset)))
            batch = first_batch(trainer, view(dataset, numbers), len(numbers))
            mask = batch.get("attention_mask")
            if mask is not None and mask.ndim == 2 and len(mask) == len(numbers):
                found += mask.cpu().sum(1).tolist()
                has_more = any(isinstance(v, torch.Tensor) and v.is_floating_point() for v in batch.values())
                size = 16 if has_more else 256  # images or sounds beside tokens take a device's memory
            elif size == 1:
                found.append(int(batch[name].shape[1]))
            size = size if len(found) > numbers[0] else 1
    return np.array(found, dtype=np.int64) if len(found) == len(dataset) else None


def stored_lengths(dataset: Any, directory: Path) -> NDArray[np.int64] | None:
    """Return the lengths of the samples that were stored when the code was described; None: there are none of these."""
    with contextlib.suppress(OSError, ValueError):
        lengths: NDArray[np.int64] = np.load(directory / LENGTHS_FILE, allow_pickle=False)
        return lengths if len(lengths) == len(dataset) else None  # of another data set
    return None


def longest_of(dataset: Any, samples: int, lengths: NDArray[np.int64] | None = None) -> NDArray[np.int64]:
    """Return the numbers of so many samples, the longest first; where no lengths can be read, the first ones."""
    lengths = lengths_of(dataset) if lengths is None else lengths
    order = np.arange(len(dataset)) if lengths is None else np.argsort(-lengths, kind="stable")
    return np.resize(order, samples).astype(np.int64)


def distinct_samples(request: TrialRequest, samples: int) -> tuple[int, TrainConfig]:
    """Return how many of a trial's `samples` are different ones, and the configuration that orders them."""
    # A loss run reads the same few again and again, in the same order whatever sampler is tried.
    if not isinstance(request.task, LossTask):
        return samples, request.config
    own = request.task.pass_steps * request.workload.samples_per_step(request.config)
    return min(samples, own), request.config.model_copy(update={"train_sampling_strategy": "random"})


def ordered(request: TrialRequest, dataset: Any, directory: Path, *, samples: int) -> Any:
    """Return so many samples of the Trainer's data set as a trial reads them, by the lengths in `directory`, if any."""
    lengths = stored_lengths(dataset, directory)
    ranks = request.config.parallelism.data_parallel
    per_step = request.accumulation_steps * request.config.per_device_train_batch_size * ranks
    distinct, config = distinct_samples(request, samples)
    if lengths is None:
        order = np.random.default_rng(request.workload.seed).permutation(len(dataset))
    else:
        order = row_order(lengths, request.workload, config, longest_first=per_step, rows=samples)
    return view(dataset, np.resize(order[:distinct], samples).astype(np.int64))


def first_batch(trainer: Any, samples: Any, size: int) -> Any:
    """Return the first batch of some samples as the Trainer makes it, without workers.

    Of rows it has `size`, where a data loader of the user's own makes as many as it trains on.
    """
    loading = {"num_workers": 0, "prefetch_factor": None, "persistent_workers": False}
    alone: dict[str, Any] = {f"dataloader_{name}": value for name, value in loading.items()}
    few = patch.multiple(trainer, train_dataset=samples, _train_batch_size=size)
    with few, patch.multiple(trainer.args, train_sampling_strategy="sequential", **alone):
        batch = next(iter(loader := trainer.get_train_dataloader()))
    made = batch_size(trainer, loader) or trainer.args.train_batch_size
    return cut(batch, slice(size)) if size < made == rows_of(batch, size) else batch


def batch_size(trainer: Any, loader: Any) -> int | None:
    """Return the samples of a rank's batch, also of a loader that accelerate has prepared; None: it has no size."""
    if type(trainer).get_train_dataloader.__module__.startswith("trl."):  # loads those of a step at once, to generate
        return None
    parts = (loader, *(getattr(loader, name, None) for name in ("batch_sampler", "sampler")))
    return next((part.batch_size for part in parts if getattr(part, "batch_size", None)), None)


def cut(batch: Mapping[str, Any], part: slice) -> dict[str, Any]:
    """Return some rows of a batch, of tensors and of lists as long as these, which hold texts."""
    rows = {len(v) for v in batch.values() if isinstance(v, torch.Tensor) and v.ndim}
    of_rows = {n for n, v in batch.items() if (isinstance(v, list) and len(v) in rows) or getattr(v, "ndim", False)}
    taken = {name: value[part] if name in of_rows else value for name, value in batch.items()}
    return {n: v.clone() if isinstance(v, torch.Tensor) else v for n, v in taken.items()}  # whose rows lie together


def ends(dataset: Any) -> bool:
    """Return whether a loop over the samples, as of the Trainer's sampler by length, comes to an end."""
    if hasattr(type(dataset), "__iter__"):
        return True
    try:
        dataset[len(dataset)]
    except Exception as error:  # another one would end the training
        return isinstance(error, IndexError)
    return False


def has_rows(trainer: Any, lengths: NDArray[np.int64] | None) -> bool:
    """Try whether batches have a row for each sample, as packed ones haven't; InputError: the collator drops some."""
    order = np.linspace(0, len(trainer.train_dataset) - 1, 16).astype(np.int64)
    try:
        batch = first_batch(trainer, view(trainer.train_dataset, order), len(order))
    except Exception:  # whatever the user's data raise: the trial of the baseline tells of it
        return False
    rows = rows_of(batch, len(order))
    if rows is None or rows > len(order):
        return False
    if rows >= _LEAST_ROWS * len(order):
        return True
    is_packed, ids = rows == 1, batch.get("attention_mask", batch.get("input_ids"))
    if lengths is not None and ids is not None:
        tokens = int(ids.ne(0).sum() if "attention_mask" in batch else ids.numel())
        is_packed = tokens >= _LEAST_ROWS * int(lengths[order].sum())
    if not is_packed:
        raise InputError(f"{_dropped(trainer, rows, len(order))}; leave samples out of the data set instead")
    return False


def rows_of(batch: Any, samples: int) -> int | None:
    """Return the rows of a batch; None: its tensors disagree, or have their samples in the second dimension."""
    tensors = [v for v in getattr(batch, "values", tuple)() if isinstance(v, torch.Tensor) and v.ndim]
    rows = {len(tensor) for tensor in tensors}
    if len(rows) != 1 or any(t.ndim > 1 and t.shape[1] == samples != len(t) for t in tensors):
        return None
    return rows.pop()


def _dropped(trainer: Any, rows: int, samples: int) -> str:
    collator = trainer.data_collator
    name = getattr(collator, "__name__", type(collator).__name__)
    return f"your data collator {name} makes {rows} rows of {samples} samples: it drops the others"


class RowCount:
    """Counts the rows of the batches that a Trainer trains on, from now on."""

    def __init__(self, trainer: Any, micro_batch: int) -> None:
        self._trainer, self._micro_batch = trainer, micro_batch
        self._rows = self._samples = 0
        # Whether this step has all its samples, which the last of a stream may lack, and whether any step had.
        self.is_whole = self._had_whole = False
        self._original = trainer.get_batch_samples
        trainer.get_batch_samples = self._counted

    def _counted(self, *args: Any, **kwargs: Any) -> Any:
        found = self._original(*args, **kwargs)
        rows = sum(rows_of(batch, self._micro_batch) or self._micro_batch for batch in found[0])
        self._rows, self._samples = self._rows + rows, self._samples + len(found[0]) * self._micro_batch
        steps = self._trainer.args.gradient_accumulation_steps
        is_at_end = self._trainer.accelerator.gradient_state.end_of_dataloader
        self.is_whole = len(found[0]) == steps and (not is_at_end or rows == steps * self._micro_batch)
        self._had_whole |= self.is_whole
        if not self._had_whole:
            raise NoEffectError(
                f"your data end after {rows} samples, within the first step of {steps * self._micro_batch}: "
                "train on more of them, or with a smaller batch"
            )
        return found

    def check(self) -> None:
        if self._rows < _LEAST_ROWS * self._samples:
            raise NoEffectError(_dropped(self._trainer, self._rows, self._samples))
