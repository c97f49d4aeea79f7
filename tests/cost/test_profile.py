"""Profiles of real models are those of a search, and layers are told apart by the names of their parameters."""

from __future__ import annotations

from profiles import make_group

from autotune.cost.profile import layers_of
from autotune.estimates.profiles import Traces
from autotune.value import read_value, write_value


def test_what_is_in_no_layer_is_outside():
    names = ["model.embed_tokens.weight", "model.layers.0.mlp.weight", "model.layers.1.mlp.weight", "lm_head.weight"]
    found = layers_of(names, [make_group(n) for n in (5, 3, 3, 7)])
    assert found == ((make_group(3),), (make_group(5), make_group(7)), 2)


def test_the_first_number_of_a_name_counts_layers_and_a_later_one_experts():
    names = [f"layers.0.experts.{i}.weight" for i in range(4)]
    assert layers_of(names, [make_group(3)] * 4) == ((make_group(3, count=4),), (), 1)


def test_a_model_without_numbers_has_no_layers():
    assert layers_of(["weight"], [make_group(3)])[2] == 0


def test_a_real_models_profile_survives_its_file(profile_of, tmp_path):
    traces = Traces(profiles=(profile_of("llama", device="cuda", autocast="bfloat16"),))
    write_value(traces, tmp_path / "answer.json")
    assert read_value(Traces, tmp_path / "answer.json") == traces
