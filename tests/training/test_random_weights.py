"""Weights that are drawn in blocks: the same distribution, and nothing else of torch changed."""

import pytest
import torch

from autotune.training.random_weights import BLOCK, quick_weights

LARGE = (450, 700)


def test_large_tensors_have_the_distribution_that_was_asked_for():
    torch.manual_seed(0)
    with quick_weights():
        normal = torch.empty(LARGE).normal_(0.5, 0.02)
        named = torch.empty(LARGE).normal_(mean=-1.0, std=2.0)
        uniform = torch.empty(LARGE).uniform_(-0.1, 0.3)
        standard = torch.empty(LARGE).normal_()
        linear = torch.nn.Linear(700, 450)
    assert (normal.mean().item(), normal.std().item()) == (pytest.approx(0.5, abs=1e-3), pytest.approx(0.02, rel=0.02))
    assert (named.mean().item(), named.std().item()) == (pytest.approx(-1.0, abs=0.05), pytest.approx(2.0, rel=0.02))
    assert uniform.min() >= -0.1
    assert uniform.max() <= 0.3
    assert uniform.mean().item() == pytest.approx(0.1, abs=2e-3)
    assert standard.std().item() == pytest.approx(1.0, rel=0.02)
    assert linear.weight.std().item() == pytest.approx(700**-0.5 / 3**0.5, rel=0.02)


def test_rows_differ():
    with quick_weights():
        weights = torch.empty(2 * BLOCK // 512, 512).normal_()
    assert len(torch.unique(weights, dim=0)) == len(weights)


def test_equal_seeds_give_equal_weights_and_small_tensors_are_torchs_own():
    torch.manual_seed(1)
    own = torch.empty(10).normal_()
    drawn = []
    for _ in range(2):
        torch.manual_seed(1)
        with quick_weights():
            drawn.append((torch.empty(10).normal_(), torch.empty(LARGE).normal_()))
    assert torch.equal(drawn[0][0], own)
    assert torch.equal(drawn[0][1], drawn[1][1])


def test_a_generator_and_half_a_tensor_are_left_to_torch():
    whole = torch.zeros(LARGE[0], 2 * LARGE[1])
    with quick_weights():
        drawn = torch.empty(LARGE).normal_(generator=torch.Generator().manual_seed(3))
        whole[:, : LARGE[1]].normal_()
    assert torch.equal(drawn, torch.empty(LARGE).normal_(generator=torch.Generator().manual_seed(3)))
    assert not whole[:, LARGE[1] :].any()
    assert whole[:, : LARGE[1]].std().item() == pytest.approx(1.0, rel=0.02)


def test_bf16_and_parameters_are_filled_too():
    with quick_weights():
        weight = torch.nn.Parameter(torch.empty(LARGE, dtype=torch.bfloat16))
        torch.nn.init.normal_(weight, std=0.02)
    assert weight.requires_grad
    assert weight.dtype is torch.bfloat16
    assert weight.float().std().item() == pytest.approx(0.02, rel=0.02)


def test_torch_is_as_before_afterwards_even_after_an_error():
    with pytest.raises(ZeroDivisionError), quick_weights():
        raise ZeroDivisionError
    assert "normal_" not in vars(torch.Tensor)
    assert "uniform_" not in vars(torch.Tensor)
