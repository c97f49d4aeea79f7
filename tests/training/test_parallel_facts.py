"""What the classes of a model offer for several devices, read off the model on the meta device."""

import pytest
from factories import make_spec

from autotune.training.build import describe
from autotune.values.model import Task

LLAMA = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 8, "vocab_size": 64}
T5 = {"d_model": 32, "d_ff": 64, "num_layers": 2, "num_heads": 4, "d_kv": 8, "vocab_size": 64}
BERT = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 64,
}  # fmt: skip


def facts(model_type: str, config: dict, task: Task, kind: str = "decoder"):
    return describe(make_spec(model_type=model_type, config=config, kind=kind), task)


@pytest.mark.parametrize("tied", [True, False])
def test_a_decoder_is_split_by_fsdp_tied_or_not(tied):
    assert facts("llama", {**LLAMA, "tie_word_embeddings": tied}, Task.CAUSAL_LM).not_fsdp is None


@pytest.mark.parametrize("tied", [True, False])
def test_t5_has_its_embedding_in_several_units(tied):
    found = facts("t5", {**T5, "tie_word_embeddings": tied}, Task.SEQ2SEQ_LM, "encoder-decoder")
    assert found.not_fsdp is not None
    assert "shared.weight" in found.not_fsdp
    assert "encoder.embed_tokens.weight" in found.not_fsdp


def test_berts_language_head_shares_its_bias_and_its_classifier_shares_nothing():
    reason = facts("bert", BERT, Task.MASKED_LM, "encoder").not_fsdp
    assert reason is not None
    assert "bias" in reason
    assert facts("bert", BERT, Task.SEQUENCE_CLASSIFICATION, "encoder").not_fsdp is None


@pytest.mark.parametrize(("keys", "heads"), [(8, 8), (2, 2), (6, 2)])
def test_tensor_parallel_deals_out_query_and_key_heads(keys, heads):
    config = {**LLAMA, "num_attention_heads": 8, "num_key_value_heads": keys}
    assert facts("llama", config, Task.CAUSAL_LM).tensor_parallel_heads == heads


def test_a_class_without_a_plan_has_no_tensor_parallel():
    assert facts("t5", T5, Task.SEQ2SEQ_LM, "encoder-decoder").tensor_parallel_heads is None
    assert facts("bert", BERT, Task.MASKED_LM, "encoder").tensor_parallel_heads is None
