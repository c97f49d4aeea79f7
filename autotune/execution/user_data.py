"""The samples of a user's own Trainer: their lengths, and their order in a trial.

As with the data of named models (`training.batches`), the longest come first, so that the peak of memory is met at
once, and the rest comes as training would see it. A trial's data set is as long as the trial needs, so that no epoch
ends inside it. Where the code makes its batches by itself, or reads from a stream, the order is left alone.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
from numpy.typing import NDArray

from autotune.execution.checking import distinct_samples
from autotune.training.batches import row_order
from autotune.value import write_bytes
from autotune.values.trial import TrialRequest
from autotune.values.user_code import LENGTHS_FILE
from autotune.values.workload import LengthProfile

_LIMIT_S = 10.0  # for reading samples one by one


class View:
    """Samples of a data set by their numbers, in any order and as often as wanted; all else is the data set's."""

    def __init__(self, source: Any, order: NDArray[np.int64]) -> None:
        self._source = source
        self._order = order

    def __len__(self) -> int:
        return len(self._order)

    def __getitem__(self, index: int) -> Any:
        return self._source[int(self._order[index])]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # copying and unpickling ask before there is a source
            raise AttributeError(name)
        return getattr(self._source, name)


def view(dataset: Any, order: NDArray[np.int64]) -> Any:
    """Return the samples of `dataset` in an order; one of the library datasets stays one."""
    import datasets

    return dataset.select(order) if isinstance(dataset, datasets.Dataset) else View(dataset, order)


def lengths_of(dataset: Any, column: str = "input_ids") -> NDArray[np.int64] | None:
    """Return the tokens of each sample; None where samples have none, or there are too many to be read."""
    import datasets
    import pyarrow.compute as pc

    if isinstance(dataset, datasets.Dataset) and dataset.format["type"] != "custom":
        if len(dataset) == 0 or not isinstance(dataset.features.get(column), datasets.List):
            return None
        cells = dataset.select_columns([column]).with_format("arrow")[:][column]
        return np.asarray(pc.list_value_length(cells), dtype=np.int64)
    return _read(dataset, column)


def longest_of(dataset: Any, samples: int) -> NDArray[np.int64]:
    """Return the numbers of so many samples, the longest first; the first ones where samples have no length."""
    lengths = lengths_of(dataset)
    order = np.arange(len(dataset)) if lengths is None else np.argsort(-lengths, kind="stable")
    return np.resize(order, samples).astype(np.int64)


def _read(dataset: Any, column: str) -> NDArray[np.int64] | None:
    deadline, lengths = time.monotonic() + _LIMIT_S, []
    for index in range(len(dataset)):
        sample = dataset[index]
        try:
            lengths.append(len(sample[column]))
        except (TypeError, KeyError, IndexError):
            return None
        if time.monotonic() > deadline:
            return None
    return np.array(lengths, dtype=np.int64) if lengths else None


def profile_of(lengths: NDArray[np.int64], mean_target: float | None) -> LengthProfile:
    """Return how the lengths are spread."""
    return LengthProfile(
        samples=len(lengths),
        mean=float(lengths.mean()),
        minimum=int(lengths.min()),
        median=int(np.median(lengths)),
        p95=int(np.percentile(lengths, 95)),
        maximum=int(lengths.max()),
        mean_target=mean_target,
    )


def record_lengths(lengths: NDArray[np.int64], directory: Path) -> None:
    """Write the lengths where trials find them, which needn't read all samples again."""
    import io

    directory.mkdir(exist_ok=True)
    file = io.BytesIO()
    np.save(file, lengths, allow_pickle=False)
    write_bytes(file.getvalue(), directory / LENGTHS_FILE)


def recorded_lengths(directory: Path, samples: int) -> NDArray[np.int64] | None:
    """Return the lengths of so many samples; None if there are none, or of another data set."""
    try:
        lengths: NDArray[np.int64] = np.load(directory / LENGTHS_FILE, allow_pickle=False)
    except (OSError, ValueError):
        return None
    return lengths if len(lengths) == samples else None


class UserData:
    """At most so many samples of the Trainer's data set for one trial, in the order in which it reads them.

    Their lengths are read from `directory`, where `record_lengths` has written them.
    """

    def __init__(self, request: TrialRequest, dataset: Any, directory: Path, *, samples: int) -> None:
        self._request = request
        self._dataset = dataset
        self._lengths = recorded_lengths(directory, len(dataset))
        per_step = request.accumulation_steps * request.config.per_device_train_batch_size
        self._order = self._ordered(samples, longest_first=per_step)
        self.first_timed = per_step  # what comes before is the longest

    def in_order(self) -> Any:
        """Return the data set that is trained on."""
        return view(self._dataset, self._order)

    def padding_share(self, steps: int) -> float | None:
        """Return the share of positions that were padding in so many steps, the first left out; None: not known."""
        own, micro = self._request.workload.own_code, self._request.config.per_device_train_batch_size
        if self._lengths is None or own is None or not own.pads:
            return None
        timed = self._lengths[self._order][self.first_timed : steps * self.first_timed]
        batches = timed[: len(timed) // micro * micro].reshape(-1, micro)
        if batches.size == 0:
            return None
        return 1 - float(batches.sum() / (batches.max(axis=1).sum() * micro))

    def _ordered(self, samples: int, *, longest_first: int) -> NDArray[np.int64]:
        request, count = self._request, len(self._dataset)
        distinct, config = distinct_samples(request, samples)
        if self._lengths is None:
            order = np.random.default_rng(request.workload.seed).permutation(count)
        else:
            order = row_order(
                self._lengths,
                longest_first=longest_first,
                rows=samples,
                config=config,
                per_step=request.workload.samples_per_step(config),
                seed=request.workload.seed,
            )
        return np.resize(order[:distinct], samples).astype(np.int64)


def first_batch(trainer: Any, samples: Any, size: int) -> Any:
    """Return the first batch of some samples as the Trainer makes it, made in this process."""
    alone: dict[str, Any] = {
        "dataloader_num_workers": 0,
        "dataloader_prefetch_factor": None,
        "dataloader_persistent_workers": False,
        "train_sampling_strategy": "sequential",
    }
    few = patch.multiple(trainer, train_dataset=samples, _train_batch_size=size)
    with few, patch.multiple(trainer.args, **alone):
        return next(iter(trainer.get_train_dataloader()))
