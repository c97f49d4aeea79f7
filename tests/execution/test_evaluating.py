"""Evaluation in a soak: real Trainers whose `compute_metrics` gets the predictions of the whole data set."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn
from transformers import Trainer, TrainingArguments

from autotune.execution.evaluating import CheckError, EvaluationData, evaluated, keeps_predictions
from autotune.values.trial import Memory

ROWS = [{"features": torch.full((4,), float(n)), "labels": n % 2} for n in range(30)]


class Net(nn.Module):
    """Counts the batches that it computes."""

    def __init__(self):
        super().__init__()
        self.out = nn.Linear(4, 2)
        self.calls = 0

    def forward(self, features, labels=None):
        self.calls += 1
        logits = self.out(features)
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


class Guard:
    """No limit but that of the test."""

    def __init__(self):
        self.given_up = 0

    def peak(self):
        return Memory()

    def check(self):
        pass

    def begin_anew(self, known):
        self.given_up += 1


@pytest.fixture
def seen():
    return []


@pytest.fixture
def make(tmp_path, seen):
    """Return a function that makes a Trainer; its metrics note the shape of what they get."""

    def accuracy(predicted):
        seen.append((predicted.predictions.shape, predicted.label_ids.shape))
        return {"accuracy": float((predicted.predictions.argmax(-1) == predicted.label_ids).mean())}

    def made(metrics=accuracy, **fields):
        arguments = {
            n: fields.pop(n)
            for n in ("eval_accumulation_steps", "prediction_loss_only", "dataloader_drop_last")
            if n in fields
        }
        args = TrainingArguments(str(tmp_path), report_to="none", use_cpu=True, disable_tqdm=True, **arguments)
        return Trainer(Net(), args, eval_dataset=ROWS, compute_metrics=metrics, **fields)

    return made


def data(kept=30):
    return EvaluationData(lambda samples: [ROWS[n % len(ROWS)] for n in range(samples)], kept)


def test_metrics_get_predictions_of_all_samples_of_which_the_model_computes_two_batches(make, seen):
    trainer = make()
    found = evaluated((4, 2), trainer, data(), Guard())
    assert seen == [((30, 2), (30,))]
    assert trainer.model.calls == 2
    assert found == {"eval_batch_size": 4, "predicted_samples": 30, "predictions_bytes": 30 * 2 * 4}


def test_the_last_batch_is_evaluated_though_a_trial_drops_it_in_training(make, seen):
    evaluated((4,), make(dataloader_drop_last=True), data(), Guard())
    assert seen == [((30, 2), (30,))]


def test_predictions_are_kept_as_small_as_the_user_makes_them(make, seen):
    trainer = make(preprocess_logits_for_metrics=lambda logits, labels: logits.argmax(-1))
    trainer.compute_metrics = lambda predicted: seen.append(predicted.predictions.shape) or {}
    found = evaluated((4,), trainer, data(), Guard())
    assert seen == [(30,)]
    assert found["predictions_bytes"] == 30 * 8


def test_the_users_own_accumulation_steps_stay(make):
    assert evaluated((4,), make(eval_accumulation_steps=3), data(), Guard())["eval_accumulation_steps"] == 3


def test_without_metrics_nothing_is_kept_and_two_batches_are_read(make):
    trainer, guard = make(metrics=None), Guard()
    assert not keeps_predictions(trainer)
    assert evaluated((4,), trainer, data(kept=None), guard) == {"eval_batch_size": 4, "metrics_failed": None}
    assert trainer.model.calls == 2


@pytest.mark.parametrize("fields", [{"prediction_loss_only": True}, {}])
def test_predictions_are_kept_for_metrics_unless_only_the_loss_is_asked_for(make, fields):
    assert keeps_predictions(make(**fields)) == (not fields)


def test_metrics_that_fail_refuse_nothing_and_are_told(make):
    def failing(predicted):
        raise LookupError("no such tokenizer")

    found = evaluated((4,), make(metrics=failing), data(), Guard())
    assert (found["predicted_samples"], found["metrics_failed"]) == (30, "LookupError: no such tokenizer")


class Loop:
    """A Trainer on a device that holds so many predictions, which moving them to the host makes room for."""

    def __init__(self, room, device="cuda", own=None):
        self.args = SimpleNamespace(device=SimpleNamespace(type=device), eval_accumulation_steps=own)
        self.room, self.compute_metrics, self.tried = room, lambda predicted: {}, []

    def prediction_step(self):
        """Never called."""

    evaluation_loop = prediction_step

    def evaluate(self, samples):
        args = self.args
        self.tried.append((args.per_device_eval_batch_size, args.eval_accumulation_steps, len(samples)))
        kept = args.per_device_eval_batch_size * (args.eval_accumulation_steps or len(samples))
        if self.compute_metrics is not None and kept > self.room:
            raise torch.OutOfMemoryError("CUDA out of memory")


def test_predictions_that_do_not_fit_the_device_are_moved_to_the_host(make):
    loop, guard = Loop(room=8), Guard()
    found = evaluated((16, 8), loop, data(), guard)
    assert (found["eval_batch_size"], found["eval_accumulation_steps"], found["predicted_samples"]) == (8, 1, 30)
    assert [(size, steps) for size, steps, _ in loop.tried] == [(16, None), (16, 1), (8, None), (8, 1)]
    assert guard.given_up == 3


@pytest.mark.parametrize(("device", "tries"), [("cuda", 2), ("cpu", 1)])
def test_predictions_that_fit_nowhere_are_left_out_and_told(device, tries):
    loop = Loop(room=0, device=device)
    found = evaluated((4,), loop, data(), Guard())
    assert found == {"eval_batch_size": 4, "metrics_failed": "out of memory: CUDA out of memory"}
    assert [kept for _, _, kept in loop.tried] == [30] * tries + [8]


def test_a_data_set_that_takes_too_long_to_read_is_left_out_and_told(make, monkeypatch):
    monkeypatch.setattr("autotune.execution.evaluating._LONGEST_S", 0.0)
    found = evaluated((4,), make(), data(), Guard())
    told = "TimeoutError: reading all samples takes too long; the predictions of the first 8 fitted"
    assert found == {"eval_batch_size": 4, "metrics_failed": told}


def test_evaluation_that_fails_without_metrics_too_is_a_failed_check(make):
    trainer = make()
    trainer.prediction_step = lambda *args, **kwargs: np.zeros(1)[3]
    with pytest.raises(CheckError, match="while evaluating with a batch of 4: index 3"):
        evaluated((4,), trainer, data(), Guard())


class Wide(Net):
    """Its logits take 4 MiB a sample."""

    def forward(self, features, labels=None):
        found = super().forward(features, labels)
        return {**found, "logits": found["logits"].repeat(1, 1 << 19)}


@pytest.mark.cuda
def test_an_allocator_too_small_for_all_predictions_has_room_for_those_of_a_batch(tmp_path):
    args = TrainingArguments(str(tmp_path), report_to="none", disable_tqdm=True)
    args._n_gpu = min(args.n_gpu, 1)  # a trial sees one device
    trainer = Trainer(Wide(), args, eval_dataset=ROWS, compute_metrics=lambda predicted: {"rows": len(predicted[0])})
    torch.cuda.set_per_process_memory_fraction((96 << 20) / torch.cuda.mem_get_info()[1])
    try:
        found = evaluated((4, 2), trainer, data(), Guard())
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert (found["eval_batch_size"], found["eval_accumulation_steps"]) == (4, 1)
    assert found["predictions_bytes"] == 30 * 4 << 20
