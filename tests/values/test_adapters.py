"""Every kind of adapter is a value of its own; the facts that rules and the cost model read are right about peft."""

import pytest
from pydantic import TypeAdapter, ValidationError

from autotune.values.techniques import ADAPTERS, AnyAdapter, is_new_weight, kinds_with

UNION = TypeAdapter(AnyAdapter)


@pytest.mark.parametrize("kind", ADAPTERS)
def test_a_kind_is_read_back_from_its_json(kind):
    adapter = ADAPTERS[kind]()
    assert UNION.validate_json(adapter.model_dump_json()) == adapter
    assert adapter.kind == kind


def test_kinds_are_told_in_words_and_a_field_that_a_kind_has_not_is_refused():
    assert UNION.validate_python({"kind": "dora", "rank": 4}).shown == "dora rank 4 on all-linear"
    assert UNION.validate_python({"kind": "prompt", "virtual_tokens": 5}).shown == "prompt of 5 virtual tokens"
    assert ADAPTERS["ia3"]().shown == "ia3"
    with pytest.raises(ValidationError, match="rank"):
        UNION.validate_python({"kind": "prefix", "rank": 8})


def test_virtual_tokens_take_positions_and_weights_do_not():
    lengths = {kind: adapter().prompt_length for kind, adapter in ADAPTERS.items()}
    assert {kind for kind, length in lengths.items() if length} == set(kinds_with("virtual_tokens"))


@pytest.mark.parametrize(
    ("name", "new"),
    [
        ("base_model.model.layers.0.q_proj.lora_A.default.weight", True),
        ("base_model.model.layers.0.q_proj.lora_magnitude_vector.default.weight", True),
        ("base_model.model.score.modules_to_save.default.weight", True),
        ("base_model.model.score.original_module.weight", False),
        ("base_model.model.layers.0.q_proj.base_layer.weight", False),
        ("prompt_encoder.default.embedding.weight", True),
        ("model.layers.0.self_attn.q_proj.weight", False),
    ],
)
def test_an_adapters_weights_are_known_by_their_names(name, new):
    assert is_new_weight(name) is new
