"""How deep a model is and how its layers repeat, read off its config; and the same config with fewer layers."""

from types import SimpleNamespace as Config

import pytest

from autotune.training.build import shallower, stacks

SLIDING, FULL = "sliding_attention", "full_attention"
T5 = {"num_layers": 12, "num_decoder_layers": 6}
BART = {"encoder_layers": 3, "decoder_layers": 4}


class Blocks:
    """As of Funnel: its depth follows from its blocks, and can't be set."""

    num_hidden_layers = property(lambda self: 4)


def test_a_depth_that_follows_from_other_figures_is_none_to_be_changed():
    assert stacks(Blocks()) == ()


@pytest.mark.parametrize(
    ("fields", "depths"),
    [
        ({"num_hidden_layers": 32}, {"num_hidden_layers": 32}), ({**T5, "num_hidden_layers": 12}, T5), (BART, BART),
        ({}, {}), ({"num_hidden_layers": None}, {}), ({"depths": [2, 2, 6, 2]}, {}), ({"num_hidden_layers": True}, {}),
    ],
)  # fmt: skip
def test_a_decoder_is_one_stack_both_halves_are_two_and_a_config_that_does_not_say_has_none(fields, depths):
    assert {stack.field: stack.depth for stack in stacks(Config(**fields))} == depths
    assert all(stack.period == 1 for stack in stacks(Config(**fields)))


@pytest.mark.parametrize(
    ("fields", "period"),
    [
        ({"layer_types": [FULL] * 8}, 1),
        ({"layer_types": [SLIDING, FULL] * 4}, 2),
        ({"layer_types": [SLIDING, SLIDING, FULL] * 4}, 3),
        ({"layer_types": ([SLIDING] * 5 + [FULL]) * 2 + [SLIDING] * 2}, 6),
        ({"layer_types": ([SLIDING] * 5 + [FULL]) * 4 + [SLIDING] * 2}, 6),
        ({"layer_types": [FULL] + [SLIDING] * 7}, 8),
        ({"layer_types": [FULL] + [SLIDING, FULL] * 4, "first_k_dense_replace": 1}, 2),
        ({"num_hidden_layers": 27, "first_k_dense_replace": 3}, 1),
        ({"num_hidden_layers": 12, "decoder_sparse_step": 3}, 3),
        ({"num_hidden_layers": 13, "decoder_sparse_step": 2}, 2),
        ({"num_hidden_layers": 12, "decoder_sparse_step": 1}, 1),
    ],
)
def test_layers_repeat_as_their_kinds_do_and_the_base_has_every_kind_and_leaves_whole_periods(fields, period):
    kinds = fields.get("layer_types", [])
    (stack,) = stacks(Config(**{"num_hidden_layers": len(kinds), **fields}))
    assert stack.period == period
    assert stack.base >= fields.get("first_k_dense_replace", 0) + period
    assert (stack.depth - stack.base) % stack.period == 0
    assert set(kinds[: stack.base]) == set(kinds)


def test_a_shallower_config_is_cut_along():
    full = Config(num_hidden_layers=4, layer_types=[FULL, SLIDING] * 2, eos_token_id=[1, 2])
    cut = shallower(full, {"num_hidden_layers": 3})
    assert (cut.num_hidden_layers, cut.layer_types, cut.eos_token_id) == (3, [FULL, SLIDING, FULL], [1, 2])
    assert (full.num_hidden_layers, len(full.layer_types)) == (4, 4)
    assert shallower(Config(num_hidden_layers=4), {}) == Config(num_hidden_layers=4)
