"""Trainings of library models with a planted fault, and honest ones, looked at as `find` looks at a user's Trainer.

Each Trainer is made by a pickled function and described by `run_describe`, which a search runs before its first trial;
honest ones and those that drop samples are also run as trials.
"""

import sys

import cloudpickle
import optimizer_steps
import pytest
from optimizer_steps import NEEDS_FLAG, arguments_for, build, collator_for, samples_for
from own_trainings import looked_at
from torch.nn.functional import cross_entropy
from transformers import DataCollatorWithFlattening, Trainer

from autotune.training.resolve import resolve
from autotune.value import sha256_of
from autotune.values.model import Task
from autotune.values.trial import DescribeRequest, Description, TrialStatus
from autotune.values.workload import CODE_FILE, OwnCode, Workload

FAULTY = ("Llama", "T5", "BERT")
HONEST = (*FAULTY, "ViT", "Whisper", "Mixtral")


class OwnLoss(Trainer):
    """A loss of its own: a mean over the labels of the step, as it should be."""

    reduction, divides = "sum", True

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        logits, labels = model(**inputs)["logits"].float(), inputs["labels"]
        if self._loss_shifts_labels:
            logits, labels = logits[:, :-1], labels[:, 1:]
        loss = cross_entropy(logits.flatten(0, -2), labels.flatten(), ignore_index=-100, reduction=self.reduction)
        return loss / num_items_in_batch if self.divides else loss


def undivided(reduction, *, claimed):
    """Return a Trainer whose loss knows nothing of the step; `claimed`: that it is scaled for accumulation."""
    return type("Undivided", (OwnLoss,), {"reduction": reduction, "divides": False, "loss_is_scaled_for_ga": claimed})


class LastAlone(OwnLoss):
    """Forgets what it has accumulated."""

    def training_step(self, model, *args, **kwargs):
        model.zero_grad()
        return super().training_step(model, *args, **kwargs)


class Dropping:
    """A collator that keeps some of the samples alone."""

    def __init__(self, collate, kept):
        self.collate, self.kept = collate, kept

    def __call__(self, samples):
        return self.collate(self.kept(samples))


def made(kind, name, directory, collator=lambda collate: collate):

    def make():
        data = {"train_dataset": 4 * samples_for(name), "data_collator": collator(collator_for(name))}
        trainer = kind(model=build(name), args=arguments_for(directory, 4, 2), **data)
        trainer.model_accepts_loss_kwargs = True  # some heads swallow the count of labels
        return trainer

    return make


@pytest.fixture
def pickled(tmp_path, monkeypatch):
    """Return a function that pickles a maker of Trainers where a search has it, and returns the user's code."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    for module in (sys.modules[__name__], optimizer_steps):  # which a trial's process can't import
        cloudpickle.register_pickle_by_value(module)

    def pickle(make, folder):
        content = cloudpickle.dumps(make)
        folder.mkdir(exist_ok=True, parents=True)
        (folder / CODE_FILE).write_bytes(content)
        return OwnCode(kind="pickle", shown="make_trainer make", directory=str(tmp_path), sha256=sha256_of(content))

    yield pickle
    for module in (sys.modules[__name__], optimizer_steps):
        cloudpickle.unregister_pickle_by_value(module)


@pytest.fixture
def look(tmp_path, pickled, tiny_llama):

    def described(make):
        code = pickled(make, tmp_path / "data")
        spec = resolve(str(tiny_llama))
        workload = Workload(model=spec, task=Task.OWN, sequence_length=1, global_batch_size=None, own_code=code)
        return looked_at(DescribeRequest(workload=workload), tmp_path / "describe")

    return described


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        pytest.param(undivided("sum", claimed=False), True, marks=NEEDS_FLAG),
        (undivided("sum", claimed=True), False),  # a sum over the samples of the step, whatever the split
        (undivided("mean", claimed=True), True),
        pytest.param(undivided("mean", claimed=False), True, marks=NEEDS_FLAG),
        (LastAlone, True),
    ],
    ids=["sum", "sum, claimed", "mean, claimed", "mean", "the last alone"],
)
@pytest.mark.parametrize("name", FAULTY)
def test_a_loss_that_changes_with_the_split_is_told(look, tmp_path, name, kind, changes):
    found = look(made(kind, name, tmp_path))
    assert (found.facts.split_changes is not None) == changes
    assert any("the gradient of a step changes" in note for note in found.notes) == changes


def assert_honest(found):
    assert isinstance(found, Description), found
    assert found.facts.split_changes is None
    assert not any("gradient" in note or "loss" in note for note in found.notes), found.notes
    assert found.own.has_rows


def trial_of(bench, found, pickled, make):
    """Run a maker's Trainer, which was described before, as a trial of micro-batches of 4."""
    known = {name: getattr(found.own, name) for name in ("weights", "reorders", "pads", "has_rows", "normalizes")}
    code = pickled(make, bench.run_directory / "data").model_copy(update=known)
    fields = {"model": found.own.spec, "task": found.own.task, "global_batch_size": 8, "own_code": code}
    return bench.run(
        workload={**fields, "sequence_length": found.own.sequence_length},
        config={"per_device_train_batch_size": 4, "attn_implementation": None, "optim": "adamw_torch"},
    )


@pytest.mark.parametrize("name", HONEST)
def test_an_honest_training_passes_and_completes_its_trial(bench, look, pickled, tmp_path, name):
    assert_honest(look(made(OwnLoss, name, tmp_path)))
    make = made(Trainer, name, tmp_path)
    found = look(make)
    assert_honest(found)
    result = trial_of(bench, found, pickled, make)
    assert result.status is TrialStatus.COMPLETED, result.outcome


@pytest.mark.parametrize("name", FAULTY)
def test_a_collator_that_drops_samples_is_refused_at_once_or_in_its_trial(bench, look, pickled, tmp_path, name):
    at_once, later = (
        made(Trainer, name, tmp_path, lambda collate, kept=kept: Dropping(collate, kept))
        # half of the 16 samples of the first batch that is made, or all of them, and two of others
        for kept in (lambda samples: samples[::2], lambda samples: samples if len(samples) > 4 else samples[:2])
    )
    told = "your data collator Dropping makes 8 rows of 16 samples: it drops the others"
    assert look(at_once).message.startswith(told)
    result = trial_of(bench, look(later), pickled, later)
    assert result.status is TrialStatus.INVALID
    assert result.outcome.cause.startswith("your data collator Dropping makes")
    assert result.outcome.cause.endswith("it drops the others")


def test_a_collator_that_packs_all_samples_into_one_row_drops_none(look, tmp_path):
    make = made(Trainer, "Llama", tmp_path, lambda _: DataCollatorWithFlattening(return_position_ids=True))
    found = look(make)
    assert isinstance(found, Description), found
    assert not found.own.has_rows
    assert found.own.packs
    assert found.own.sequence_length == found.lengths.maximum  # of a sample, not of all in the row
    assert found.own.not_predicted is None
