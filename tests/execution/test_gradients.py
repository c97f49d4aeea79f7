"""Two gradients of the same samples are compared: what is rounding and chance, and what the split changes."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from factories import make_config, make_facts, make_problem
from torch import nn

from autotune.execution.gradients import Gradient, Split, compared, gradient_of, is_short, reported_split
from autotune.space.knobs import allowance_of
from autotune.values.config import Allowance


def test_what_another_seed_changes_is_not_put_down_to_the_split():
    def gradient(*values):
        return Gradient(1.0, torch.tensor(values))

    whole, split = gradient(1.0, 0.0), gradient(0.9, 0.1)
    shapes = ("1 micro-batch of 4", "2 of 2")
    assert compared(whole, lambda: gradient(0.9, -0.1), split, shapes=shapes, rounding=5e-3) == Split()
    assert compared(whole, lambda: whole, split, shapes=shapes, rounding=5e-3).changes


def test_tf32_rounds_as_16_bits_do(monkeypatch):
    layer = nn.Linear(2, 2)
    assert not is_short(layer.parameters())
    assert is_short(layer.bfloat16().parameters())
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.backends.cuda, "matmul", SimpleNamespace(fp32_precision="tf32"))
    assert is_short(nn.Linear(2, 2).parameters())


def test_gradients_count_parameters_without_one_as_zero():
    layer = nn.Linear(2, 2)
    layer.weight.grad = torch.full((2, 2), 2.0)
    found = gradient_of(layer.parameters())
    assert found.norm == pytest.approx(4.0)
    assert found.elements.tolist() == [2.0] * 4 + [0.0] * 2


def test_another_split_needs_the_permission_for_another_method_where_it_changes_the_gradient():
    facts, lines = reported_split(make_facts(), Split(changes="the gradient of a step changes"), None)
    assert lines == ("the gradient of a step changes: another micro-batch is another training, tried with --allow "
                     "method alone",)  # fmt: skip
    assert allowance_of(make_config(16), make_problem(facts=facts)) is Allowance.METHOD
    facts, lines = reported_split(make_facts(), Split(unknown="no rows"), "the loss is T.compute_loss's")
    assert allowance_of(make_config(16), make_problem(facts=facts)) is Allowance.NUMERICS
    assert "could not be measured: no rows" in lines[0]
    assert reported_split(make_facts(), Split(), None) == (make_facts(), ())
