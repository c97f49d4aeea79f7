"""What is said of a built model's classes, for one device and for several."""

from __future__ import annotations

import contextlib

import pytest
from factories import make_spec
from tiny_models import NO_DROPOUT, TINY, on_cpu, tiny, without_dropout, write_model

from autotune.training.build import build_model, describe
from autotune.training.heads import default_task, tasks_of
from autotune.training.resolve import resolve
from autotune.values.model import Task

# What the classes offer

FLASH = {"flash_attention_2", "flash_attention_3"}


def facts(name, task=None, **changes):
    spec = resolve(name)
    spec = spec.model_copy(update={"config": {**spec.config, **changes}})
    return describe(spec, task or default_task(spec))


def test_facts_of_a_decoder():
    llama = facts("llama-2-7b")
    assert llama.attn_implementations[0] == "sdpa"
    assert {"eager", "flex_attention"} | FLASH <= set(llama.attn_implementations)
    assert llama.supports_checkpointing
    assert llama.batch_coupled is None
    assert not llama.has_dropout
    assert (llama.max_sequence_length, llama.vocab_size) == (4096, 32000)
    assert llama.linear_modules == (
        "q_proj",
        "k_proj",
        "v_proj",
        "o_proj",
        "gate_proj",
        "up_proj",
        "down_proj",
    )


def test_facts_of_gpt2_name_its_conv1d_layers():
    gpt2 = facts("gpt2")
    assert set(gpt2.linear_modules) == {"c_attn", "c_proj", "c_fc"}
    assert gpt2.has_dropout
    assert gpt2.max_sequence_length == 1024


def test_facts_of_an_encoder():
    bert = facts("bert-base-uncased")
    assert bert.task is Task.SEQUENCE_CLASSIFICATION
    assert bert.has_dropout
    assert bert.max_sequence_length == 512
    assert "classifier" not in bert.linear_modules


def test_facts_of_t5_know_no_limit_of_length():
    t5 = facts("t5-small")
    assert t5.max_sequence_length is None
    assert not FLASH & set(t5.attn_implementations)
    assert set(t5.linear_modules) == {"q", "k", "v", "o", "wi", "wo"}


def test_positions_that_padding_takes_are_not_offered(tmp_path):
    import torch

    spec = tiny(tmp_path, "roberta")
    task = default_task(spec)
    longest = describe(spec, task).max_sequence_length
    assert longest == 64
    model = on_cpu(spec, task)
    model(input_ids=torch.full((1, longest), 5))
    with pytest.raises((IndexError, RuntimeError)):
        model(input_ids=torch.full((1, longest + 1), 5))


def test_facts_of_a_mixture_of_experts():
    mixtral = facts("mixtral-8x7b")
    assert mixtral.batch_coupled is None
    assert mixtral.linear_modules == ("q_proj", "k_proj", "v_proj", "o_proj")


def test_a_router_loss_couples_the_batch_where_it_is_part_of_the_loss():
    assert "router loss" in facts("mixtral-8x7b", output_router_logits=True).batch_coupled
    assert facts("mixtral-8x7b", output_router_logits=True, router_aux_loss_coef=0.0).batch_coupled is None
    # Switch adds it only if the call asks for it, whatever the config says.
    coupled = facts("switch-base-8", output_router_logits=True).batch_coupled
    assert coupled is None or "expert capacity" in coupled


def test_batch_norm_couples_the_batch():
    resnet = facts("resnet-50")
    assert "batch norm" in resnet.batch_coupled
    assert resnet.attn_implementations == ()
    assert not resnet.supports_checkpointing
    assert (resnet.max_sequence_length, resnet.vocab_size) == (None, None)
    assert resnet.linear_modules == ()


def test_facts_of_a_vision_transformer():
    vit = facts("vit-base")
    assert "sdpa" in vit.attn_implementations
    assert not vit.has_dropout
    assert vit.max_sequence_length is None
    assert "classifier" not in vit.linear_modules


def test_facts_of_speech_models():
    whisper = facts("whisper-tiny")
    assert (whisper.max_sequence_length, whisper.max_target_length, whisper.vocab_size) == (None, 448, None)
    assert not whisper.has_dropout
    assert facts("wav2vec2-base").has_dropout
    assert tasks_of(resolve("wav2vec2-base")) == (Task.SPEECH_CTC, Task.AUDIO_CLASSIFICATION)
    assert tasks_of(resolve("whisper-tiny")) == (Task.SPEECH_SEQ2SEQ, Task.AUDIO_CLASSIFICATION)


def test_hidden_parts_of_a_recording_are_random_as_dropout_is(tmp_path):
    still = without_dropout({**TINY["wav2vec2"], **dict.fromkeys(NO_DROPOUT, 0.0)})
    silent = describe(resolve(str(write_model(tmp_path / "still", {**still, "mask_time_prob": 0.0}))), Task.SPEECH_CTC)
    hiding = describe(resolve(str(write_model(tmp_path / "hiding", {**still, "mask_time_prob": 0.1}))), Task.SPEECH_CTC)
    assert (silent.has_dropout, hiding.has_dropout) == (False, True)


def test_no_parameter_is_left_on_another_device(tmp_path):
    spec = tiny(tmp_path, "wav2vec2")
    model = build_model(spec, Task.SPEECH_CTC, dtype="float32", attn_implementation=None, device="meta")
    assert {parameter.device.type for parameter in model.parameters()} == {"meta"}


@pytest.mark.parametrize("name", ["mamba-130m", "convnext-tiny"])
def test_a_model_without_attention_has_no_attention_kernels(name):
    assert facts(name).attn_implementations == ()


@pytest.mark.parametrize("name", ["bloom-560m", "deberta-v3-base"])
def test_a_class_without_flags_has_eager_attention(name):
    assert facts(name).attn_implementations == ("eager",)


@pytest.mark.parametrize("name", ["t5-small", "gpt2", "bert-base-uncased", "bart-base", "opt-125m", "swin-tiny"])
def test_dropout_is_found_and_its_absence_too(name):
    assert facts(name).has_dropout
    assert not facts(name, **without_dropout(resolve(name).config)).has_dropout


def test_another_heads_dropout_does_not_count():
    assert not facts("albert-base-v2", Task.MASKED_LM).has_dropout
    assert facts("albert-base-v2", Task.SEQUENCE_CLASSIFICATION).has_dropout


@pytest.mark.parametrize("name", ["llama", "bert", "t5", "vit"])
def test_the_kernels_named_can_be_built(tmp_path, name):
    spec = tiny(tmp_path, name)
    task = default_task(spec)
    kernels = describe(spec, task).attn_implementations
    assert on_cpu(spec, task).config._attn_implementation == kernels[0]
    for kernel in set(kernels) - FLASH:
        with contextlib.suppress(ImportError):
            assert on_cpu(spec, task, attn_implementation=kernel).config._attn_implementation == kernel


LLAMA = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 8, "vocab_size": 64}
T5 = {"d_model": 32, "d_ff": 64, "num_layers": 2, "num_heads": 4, "d_kv": 8, "vocab_size": 64}
BERT = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 64,
}  # fmt: skip


def facts_of_config(model_type: str, config: dict, task: Task, kind: str = "decoder"):
    return describe(make_spec(model_type=model_type, config=config, kind=kind), task)


@pytest.mark.parametrize("tied", [True, False])
def test_a_decoder_is_split_by_fsdp_tied_or_not(tied):
    assert facts_of_config("llama", {**LLAMA, "tie_word_embeddings": tied}, Task.CAUSAL_LM).not_fsdp is None


@pytest.mark.parametrize("tied", [True, False])
def test_t5_has_its_embedding_in_several_units(tied):
    found = facts_of_config("t5", {**T5, "tie_word_embeddings": tied}, Task.SEQ2SEQ_LM, "encoder-decoder")
    assert found.not_fsdp is not None
    assert "shared.weight" in found.not_fsdp
    assert "encoder.embed_tokens.weight" in found.not_fsdp


def test_berts_language_head_shares_its_bias_and_its_classifier_shares_nothing():
    reason = facts_of_config("bert", BERT, Task.MASKED_LM, "encoder").not_fsdp
    assert reason is not None
    assert "bias" in reason
    assert facts_of_config("bert", BERT, Task.SEQUENCE_CLASSIFICATION, "encoder").not_fsdp is None


@pytest.mark.parametrize(("keys", "heads"), [(8, 8), (2, 2), (6, 2)])
def test_tensor_parallel_deals_out_query_and_key_heads(keys, heads):
    config = {**LLAMA, "num_attention_heads": 8, "num_key_value_heads": keys}
    assert facts_of_config("llama", config, Task.CAUSAL_LM).tensor_parallel_heads == heads


def test_a_class_without_a_plan_has_no_tensor_parallel():
    assert facts_of_config("t5", T5, Task.SEQ2SEQ_LM, "encoder-decoder").tensor_parallel_heads is None
    assert facts_of_config("bert", BERT, Task.MASKED_LM, "encoder").tensor_parallel_heads is None
