"""The samples of a user's Trainer: their lengths are read, the longest come first, the same ones for every loss run."""

import numpy as np
import pytest
import torch
from accelerate.data_loader import prepare_data_loader
from datasets import Dataset
from factories import make_config, make_request, make_workload
from own_trainings import quiet_arguments
from torch.utils.data import DataLoader
from transformers import Trainer

from autotune.execution.user_data import (
    View,
    batch_size,
    collated_lengths,
    cut,
    first_batch,
    lengths_of,
    longest_of,
    ordered,
    stored_lengths,
    view,
)
from autotune.training.texts import write_lengths
from autotune.values.budget import LossTask
from autotune.values.workload import LENGTHS_FILE, OwnCode

LENGTHS = [3, 9, 1, 7, 5, 2, 8, 4]
ROWS = [{"input_ids": list(range(n)), "number": i} for i, n in enumerate(LENGTHS)]
CODE = OwnCode(kind="script", shown="train.py", command=("train.py",), directory="/", reorders=True, pads=True)

CHOICES = [{"input_ids": rows} for rows in ([[1, 2, 3], [1, 2, 3]], [[1], [1, 2, 3, 4, 5]], [[1, 2, 3, 4], []])]


class Plain:
    """A data set as people write them."""

    name = "plain"

    def __len__(self):
        return len(ROWS)

    def __getitem__(self, index):
        return ROWS[index]


@pytest.mark.parametrize(
    ("dataset", "lengths", "longest"),
    [
        (Dataset.from_list(ROWS), LENGTHS, [1, 6, 3]),
        (Plain(), LENGTHS, [1, 6, 3]),
        (Dataset.from_list(ROWS).select([2, 0]), [1, 3], [1, 0, 1]),
        # answers to choose from, padded to the longest
        (Dataset.from_list(CHOICES), [3, 5, 4], [1, 2, 0]),
        (Dataset.from_list(CHOICES).select([2, 0]), [4, 3], [0, 1, 0]),
        (CHOICES, [3, 5, 4], [1, 2, 0]),
        ([{"input_ids": torch.zeros(4, 7)}, {"input_ids": torch.zeros(0)}], [7, 0], [0, 1, 0]),
        # samples without tokens
        (Dataset.from_dict({"pixels": [1, 2]}), None, [0, 1, 0]),
        ([{"x": 1}], None, [0, 0, 0]),
        ([3, 4], None, [0, 1, 0]),
    ],
    ids=[
        "library", "plain", "selected", "choices", "selected choices", "plain choices", "tensors", "pixels", "others",
        "numbers",
    ],
)  # fmt: skip
def test_lengths_are_those_of_the_samples_of_which_the_longest_come_first(dataset, lengths, longest):
    found = lengths_of(dataset)
    assert (None if found is None else found.tolist()) == lengths
    assert longest_of(dataset, 3).tolist() == longest


def padded(samples, *, mask=True):
    longest = max(sample["letters"] for sample in samples)
    ids = torch.ones(len(samples), longest, dtype=torch.long)
    real = torch.arange(longest) < torch.tensor([sample["letters"] for sample in samples])[:, None]
    return {"input_ids": ids, **({"attention_mask": real.long()} if mask else {})}


def broken(samples):
    raise RuntimeError("no such letter")


@pytest.mark.parametrize(
    ("collate", "name", "found"),
    [
        (padded, "input_ids", LENGTHS),
        (lambda samples: padded(samples, mask=False), "input_ids", LENGTHS),  # one sample at a time
        (lambda samples: {"input_values": torch.ones(len(samples), 2 * samples[0]["letters"])}, "input_values",
         [2 * n for n in LENGTHS]),
        (broken, "input_ids", None),
    ],
    ids=["with a mask", "without", "sounds", "broken"],
)  # fmt: skip
def test_lengths_that_only_the_collator_makes_are_read_from_its_batches(tmp_path, collate, name, found):
    rows = [{"letters": n} for n in LENGTHS]
    trainer = Trainer(torch.nn.Linear(1, 1), quiet_arguments(tmp_path, remove_unused_columns=False), collate, rows)
    lengths = collated_lengths(trainer, name)
    assert (None if lengths is None else lengths.tolist()) == found
    if lengths is not None:
        write_lengths(lengths, tmp_path / LENGTHS_FILE)
        assert longest_of(rows, 2, stored_lengths(rows, tmp_path)).tolist() == [1, 6]
        assert stored_lengths(rows[:3], tmp_path) is None


def test_a_batch_of_pairs_is_whole_though_it_has_as_many_rows_as_the_trainers_micro_batch(tmp_path):
    """As DPO and reward trainers make them, of 8 samples by default."""
    made = Trainer(
        torch.nn.Linear(1, 1), quiet_arguments(tmp_path), lambda pairs: {"x": torch.ones(2 * len(pairs), 1)}, ROWS
    )
    assert [len(first_batch(made, ROWS[:size], size)["x"]) for size in (2, 4)] == [4, 8]


@pytest.mark.parametrize("dataset", [ROWS, Dataset.from_list(ROWS).to_iterable_dataset()], ids=["rows", "stream"])
@pytest.mark.parametrize("dispatches", [False, True])
def test_a_loader_tells_the_samples_of_a_batch_on_one_of_two_ranks(dataset, dispatches):
    loader = DataLoader(dataset, batch_size=4)
    ranks = {"num_processes": 2, "process_index": 0}
    dispatches = dispatches and dataset is not ROWS
    prepared = prepare_data_loader(loader, **ranks, dispatch_batches=dispatches, put_on_device=dispatches)
    kind = type("OfTrl", (Trainer,), {"get_train_dataloader": lambda trainer: loader})
    assert [batch_size(object.__new__(kind), made) for made in (loader, prepared, [4])] == [4, 4, None]
    kind.get_train_dataloader.__module__ = "trl.trainer.rloo_trainer"  # which loads several micro-batches at once
    assert batch_size(object.__new__(kind), loader) is None


def test_rows_of_a_batch_are_cut_from_its_tensors_and_texts():
    batch = {
        "ids": torch.arange(12).view(4, 3), "texts": ["a", "b", "c", "d"], "scale": torch.ones(()), "kinds": [1, 2, 3],
    }  # fmt: skip
    found = cut(batch, slice(1, 3))
    assert found["ids"].tolist() == [[3, 4, 5], [6, 7, 8]]
    assert (found["texts"], found["scale"].ndim, found["kinds"]) == (["b", "c"], 0, [1, 2, 3])


def test_a_view_is_the_samples_in_an_order_and_all_else_of_the_data_set():
    made = view(Plain(), np.array([6, 0, 6]))
    assert isinstance(made, View)
    assert [s["number"] for s in made] == [6, 0, 6]
    assert made.name == "plain"
    of_library = view(Dataset.from_list(ROWS), np.array([6, 0, 6]))
    assert isinstance(of_library, Dataset)
    assert of_library["number"][:] == [6, 0, 6]


def data_of(directory, samples, *, micro_batch=2, **fields):
    workload = make_workload(own_code=CODE, global_batch_size=4)
    steps = workload.global_batch_size // micro_batch
    request = make_request(config=make_config(micro_batch), workload=workload, accumulation_steps=steps, **fields)
    return ordered(request, Plain(), directory, samples=samples)


def test_the_longest_come_first_and_then_all_at_random(tmp_path):
    write_lengths(np.array(LENGTHS), tmp_path / LENGTHS_FILE)
    numbers = [s["number"] for s in data_of(tmp_path, 20)]
    assert numbers[:8] == [1, 6, 3, 4] * 2  # the first step makes the optimizer's states, the second has them
    assert sorted(numbers[8:16]) == list(range(8))
    assert numbers[8:16] != list(range(8))
    assert len(numbers) == 20


def test_lengths_of_another_data_set_are_not_taken(tmp_path):
    write_lengths(np.array([1, 2, 3]), tmp_path / LENGTHS_FILE)
    assert sorted(s["number"] for s in data_of(tmp_path, 8)) == list(range(8)), "in no order of length"


def test_loss_runs_see_the_same_samples_again_and_again_whatever_the_micro_batch(tmp_path):
    task = LossTask(steps=6, pass_steps=1, seed=1)
    orders = [[s["number"] for s in data_of(tmp_path, 12, micro_batch=m, task=task)] for m in (1, 2, 4)]
    assert orders[0] == orders[1] == orders[2]
    assert orders[0][:4] == orders[0][4:8] == orders[0][8:]
