"""How deep a model is and how its layers repeat, read off its config; and the same config with fewer layers."""

from types import SimpleNamespace

import pytest

from autotune.training.build import shallower, stacks

SLIDING, FULL = "sliding_attention", "full_attention"
T5 = {"num_layers": 12, "num_decoder_layers": 6}


def config(**fields):
    return SimpleNamespace(**fields)


def only_stack(**fields):
    (stack,) = stacks(config(**fields))
    return stack


@pytest.mark.parametrize(
    ("fields", "depths"),
    [
        ({"num_hidden_layers": 32}, {"num_hidden_layers": 32}),
        (
            {"num_layers": 12, "num_decoder_layers": 6, "num_hidden_layers": 12},
            {"num_layers": 12, "num_decoder_layers": 6},
        ),
        ({"encoder_layers": 3, "decoder_layers": 4}, {"encoder_layers": 3, "decoder_layers": 4}),
        ({}, {}),
        ({"num_hidden_layers": None}, {}),
        ({"depths": [2, 2, 6, 2]}, {}),
        ({"num_hidden_layers": True}, {}),
    ],
)
def test_a_decoder_is_one_stack_both_halves_are_two_and_a_config_that_does_not_say_has_none(fields, depths):
    assert {stack.field: stack.depth for stack in stacks(config(**fields))} == depths
    assert all(stack.period == 1 for stack in stacks(config(**fields)))


@pytest.mark.parametrize(
    ("kinds", "period"),
    [
        ([FULL] * 8, 1),
        ([SLIDING, FULL] * 4, 2),
        ([SLIDING, SLIDING, FULL] * 4, 3),
        ([SLIDING] * 5 + [FULL] + [SLIDING] * 5 + [FULL] + [SLIDING] * 2, 6),
        ([FULL] + [SLIDING] * 7, 8),
    ],
)
def test_layers_repeat_as_their_kinds_do(kinds, period):
    assert only_stack(num_hidden_layers=len(kinds), layer_types=kinds).period == period


def test_every_so_manieth_layer_makes_a_period_of_which_leading_ones_are_no_part():
    assert only_stack(num_hidden_layers=12, decoder_sparse_step=3).period == 3
    assert only_stack(num_hidden_layers=12, decoder_sparse_step=1).period == 1
    kinds = [FULL] + [SLIDING, FULL] * 4
    assert only_stack(num_hidden_layers=9, layer_types=kinds, first_k_dense_replace=1).period == 2


@pytest.mark.parametrize(
    "fields",
    [
        {"num_hidden_layers": 32},
        {"num_hidden_layers": 27, "first_k_dense_replace": 3},
        {"num_hidden_layers": 26, "layer_types": ([SLIDING] * 5 + [FULL]) * 4 + [SLIDING] * 2},
        {"num_hidden_layers": 13, "decoder_sparse_step": 2},
    ],
)
def test_the_base_holds_every_kind_of_layer_and_whole_periods_are_left(fields):
    stack = only_stack(**fields)
    leading = fields.get("first_k_dense_replace", 0)
    assert stack.base >= leading + stack.period
    assert stack.more == int(stack.more)
    kinds = fields.get("layer_types", [])
    assert set(kinds[: stack.base]) == set(kinds)


def test_a_shallower_config_is_cut_along():
    full = config(num_hidden_layers=4, layer_types=[FULL, SLIDING] * 2, eos_token_id=[1, 2])
    cut = shallower(full, {"num_hidden_layers": 3})
    assert (cut.num_hidden_layers, cut.layer_types, cut.eos_token_id) == (3, [FULL, SLIDING, FULL], [1, 2])
    assert (full.num_hidden_layers, len(full.layer_types)) == (4, 4)
    assert shallower(config(num_hidden_layers=4), {}) == config(num_hidden_layers=4)
