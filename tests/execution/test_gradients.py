"""Two gradients of the same samples are compared, of real Trainers too: what the split changes, what is chance."""

from types import SimpleNamespace

import pytest
import torch
from factories import make_config, make_facts, make_problem
from optimizer_steps import NEEDS_FLAG
from torch import nn
from torch.nn.functional import cross_entropy
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments

from autotune.execution import gradients
from autotune.execution.gradients import Gradient, Split
from autotune.space.knobs import allowance_of
from autotune.values.config import Allowance


def test_a_change_by_another_seed_is_not_put_down_to_the_split():
    def gradient(*values):
        return Gradient(1.0, torch.tensor(values))

    whole, split = gradient(1.0, 0.0), gradient(0.9, 0.1)
    known = {"shapes": ("1 micro-batch of 4", "2 of 2"), "rounding": 5e-3}
    assert gradients.compared(whole, lambda: gradient(0.9, -0.1), split, **known) == Split()
    assert gradients.compared(whole, lambda: whole, split, **known).changes


def test_tf32_rounds_as_16_bits_do(monkeypatch):
    layer = nn.Linear(2, 2)
    assert not gradients.is_short(layer.parameters())
    assert gradients.is_short(layer.bfloat16().parameters())
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.backends.cuda, "matmul", SimpleNamespace(fp32_precision="tf32"))
    assert gradients.is_short(nn.Linear(2, 2).parameters())


def test_gradients_count_parameters_without_one_as_zero():
    layer = nn.Linear(2, 2)
    layer.weight.grad = torch.full((2, 2), 2.0)
    found = gradients.gradient_of(layer.parameters())
    assert found.norm == pytest.approx(4.0)
    assert found.elements.tolist() == [2.0] * 4 + [0.0] * 2


def test_another_split_needs_the_permission_for_another_method_where_it_changes_the_gradient():
    facts, lines = gradients.reported_split(make_facts(), Split(changes="the gradient of a step changes"), None)
    assert lines[0].endswith(": another micro-batch is another training, tried with --allow method alone")
    assert allowance_of(make_config(16), make_problem(facts=facts)) is Allowance.METHOD
    facts, lines = gradients.reported_split(make_facts(), Split(unknown="no rows"), "the loss is T.compute_loss's")
    assert allowance_of(make_config(16), make_problem(facts=facts)) is Allowance.NUMERICS
    assert "could not be measured: no rows" in lines[0]
    assert gradients.reported_split(make_facts(), Split(), None) == (make_facts(), ())


ROWS = [{"features": torch.randn(16, generator=torch.Generator().manual_seed(i)), "labels": i // 8} for i in range(32)]


class Net(nn.Module):
    def __init__(self, *between: nn.Module) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(16, 32), *between, nn.ReLU(), nn.Linear(32, 4))

    def forward(self, features, labels=None, **kwargs):
        return self.layers(features)


def trainer_of(loss, /, model=None, *, bf16=False, **attributes):
    """A Trainer with a loss of its own; `loss` gets logits and labels."""

    class OwnTrainer(Trainer):
        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            return loss(model(inputs["features"]), inputs["labels"])

    torch.manual_seed(0)
    args = TrainingArguments("out", use_cpu=True, bf16=bf16, remove_unused_columns=False, gradient_accumulation_steps=4)
    trainer = OwnTrainer(model=model or Net(), args=args, train_dataset=ROWS)
    for name, value in attributes.items():
        setattr(trainer, name, value)
    return trainer


def split_of(trainer, *, normalizes=False, coupled=False):
    return gradients.split_of_trainer(
        trainer, normalizes=normalizes, lengths=None, reorders=True, batch_coupled=coupled
    )


@pytest.mark.parametrize("times", [4, 6])
def test_rows_of_a_batch_whose_first_dimension_is_time_are_no_samples(times):
    class Recurrent(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = nn.LSTM(8, 8)

        def forward(self, batch):
            return {"loss": (self.net(batch)[0] - batch).square().mean()}

    def collated(chosen):
        return {"batch": torch.stack([sample["batch"] for sample in chosen], 1)}

    args = TrainingArguments("out", use_cpu=True, remove_unused_columns=False)
    samples = [{"batch": torch.randn(times, 8, generator=torch.Generator().manual_seed(i))} for i in range(8)]
    assert split_of(Trainer(Recurrent(), args, train_dataset=samples, data_collator=collated)) == Split()


@NEEDS_FLAG
def test_mixed_precision_rounds_as_weights_of_16_bits_do():
    def off(logits, labels):  # by 1 % with another split
        return cross_entropy(logits, labels) * (1 + 0.005 * len(labels))

    def summed(logits, labels):
        return cross_entropy(logits, labels, reduction="sum")

    assert "1% apart" in split_of(trainer_of(off, loss_is_scaled_for_ga=False)).changes
    assert split_of(trainer_of(off, bf16=True, loss_is_scaled_for_ga=False)) == Split()
    assert split_of(trainer_of(summed, bf16=True, loss_is_scaled_for_ga=False)).changes is not None


@NEEDS_FLAG
def test_a_loss_that_compares_the_samples_of_a_micro_batch_changes_with_the_split():
    def contrastive(logits, labels):
        return cross_entropy(logits @ logits.T, torch.arange(len(logits)))

    def over_boxes(logits, labels):  # as many in the first two samples as in the others
        counts = 1 + labels % 2
        return (cross_entropy(logits, labels, reduction="none") * counts).sum() / counts.sum()

    for loss in (contrastive, over_boxes):
        assert "in 1 micro-batch of 4 and" in split_of(trainer_of(loss, loss_is_scaled_for_ga=False)).changes


@NEEDS_FLAG
@pytest.mark.parametrize("layer", [nn.Dropout(0.5), nn.BatchNorm1d(32)])
def test_dropout_and_batch_norm_do_not_hide_what_the_loss_does_and_are_afterwards_as_before(layer):
    for scaled in (False, True):
        trainer = trainer_of(cross_entropy, model := Net(layer), loss_is_scaled_for_ga=scaled)
        found = split_of(trainer)
        assert (found == Split(), found.changes is not None) == (not scaled, scaled)
        assert all(p.grad is None for p in model.parameters())
        assert (trainer.args.gradient_accumulation_steps, trainer.loss_is_scaled_for_ga) == (4, scaled)
        assert torch.equal(getattr(layer, "running_mean", torch.zeros(32)), torch.zeros(32))
        assert model.train().layers[1].training


def test_a_models_own_loss_is_normalised_as_in_trials():
    """BERT's classifier swallows the count of labels: the plain Trainer gets its accumulation wrong."""
    config = BertConfig(
        vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    rows = [{"input_ids": [i % 32, 1, 2, 3], "labels": i % 2} for i in range(16)]

    def trainer():
        args = TrainingArguments("out", use_cpu=True)
        return Trainer(model=BertForSequenceClassification(config), args=args, train_dataset=rows)

    assert split_of(trainer()).changes is not None
    assert split_of(trainer(), normalizes=True) == Split()


@pytest.mark.parametrize(
    ("loss", "fields", "said"),
    [
        (lambda logits, labels: 1 / 0, {}, "a step of 4 samples failed (ZeroDivisionError"),
        (lambda logits, labels: (logits * 0).sum(), {}, "all gradients are zero"),
        (lambda logits, labels: (logits * float("nan")).sum(), {}, "a gradient is not a number"),
        (cross_entropy, {"data_collator": list}, "its batches have no rows that could be split"),  # TRL's online ones
        (cross_entropy, {"loss": {"pairs": nn.MSELoss()}}, "each of its data sets has a loss of its own"),
    ],
)
def test_an_unknown_split_is_told_with_the_reason(loss, fields, said):
    assert said in split_of(trainer_of(loss, **fields)).unknown
