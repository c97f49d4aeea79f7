"""What is said of a built model's classes, for one device and for several."""

import contextlib

import pytest
import torch
from conftest import write_model
from factories import make_spec
from tiny_models import NO_DROPOUT, SIZES, T5, TINY, on_cpu, tiny, without_dropout

from autotune.training.adapters import adapter_arguments, put_on
from autotune.training.build import build_model, describe
from autotune.training.facts import facts_of
from autotune.training.resolve import default_task, resolve
from autotune.values.model import Task
from autotune.values.techniques import PrefixAdapter
from autotune.values.workload import Recipe

FLASH = {"flash_attention_2", "flash_attention_3"}


def facts(name, task=None, recipe=None, **changes):
    spec = resolve(name)
    spec = spec.model_copy(update={"config": {**spec.config, **changes}})
    return describe(spec, task or default_task(spec), recipe)


LLAMA_MODULES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        (
            "llama-2-7b",
            {"supports_checkpointing": True, "batch_coupled": None, "has_dropout": False, "max_sequence_length": 4096,
             "linear_modules": LLAMA_MODULES},
        ),
        ("gpt2", {"linear_modules": ("c_attn", "c_proj", "c_fc"), "has_dropout": True, "max_sequence_length": 1024}),
        ("bert-base-uncased", {"task": Task.SEQUENCE_CLASSIFICATION, "has_dropout": True, "max_sequence_length": 512}),
        ("t5-small", {"max_sequence_length": None, "linear_modules": ("q", "k", "v", "o", "wi", "wo")}),
        ("mixtral-8x7b", {"batch_coupled": None, "linear_modules": LLAMA_MODULES[:4]}),
        (
            "resnet-50",
            {"batch_coupled": "batch norm: its statistics are those of one micro-batch", "attn_implementations": (),
             "supports_checkpointing": False, "max_sequence_length": None, "linear_modules": ()},
        ),
        ("vit-base", {"has_dropout": False, "max_sequence_length": None}),
        ("whisper-tiny", {"max_sequence_length": None, "max_target_length": 448, "has_dropout": False}),
        ("wav2vec2-base", {"has_dropout": True}),
        ("mamba-130m", {"attn_implementations": ()}),
        ("convnext-tiny", {"attn_implementations": ()}),
        ("bloom-560m", {"attn_implementations": ("eager",)}),
        ("deberta-v3-base", {"attn_implementations": ("eager",)}),
    ],
)  # fmt: skip
def test_facts_of_models_of_every_kind(name, fields):
    found = facts(name)
    assert {field: getattr(found, field) for field in fields} == fields
    assert "classifier" not in found.linear_modules


def test_kernels_of_attention_are_those_that_the_class_names():
    kernels = facts("llama-2-7b").attn_implementations
    assert kernels[0] == "sdpa"
    assert {"eager", "flex_attention"} | FLASH <= set(kernels)
    assert not FLASH & set(facts("t5-small").attn_implementations)
    assert "sdpa" in facts("vit-base").attn_implementations


def test_positions_that_padding_takes_are_not_offered(tmp_path):
    spec = tiny(tmp_path, "roberta")
    task = default_task(spec)
    longest = describe(spec, task).max_sequence_length
    assert longest == 64
    model = on_cpu(spec, task)
    model(input_ids=torch.full((1, longest), 5))
    with pytest.raises((IndexError, RuntimeError)):
        model(input_ids=torch.full((1, longest + 1), 5))
    looks_ahead = resolve(str(write_model(tmp_path / "prophet", {"model_type": "prophetnet"})))
    assert describe(looks_ahead, Task.SEQ2SEQ_LM).max_sequence_length == 512 - 2


def test_a_router_loss_couples_the_batch_where_it_is_part_of_the_loss():
    assert "router loss" in facts("mixtral-8x7b", output_router_logits=True).batch_coupled
    assert facts("mixtral-8x7b", output_router_logits=True, router_aux_loss_coef=0.0).batch_coupled is None
    # TRL asks for it by itself, but for a reward model.
    made = {name: Recipe(name=name, prompt_length=8, completion_length=8) for name in ("dpo", "reward")}
    assert "router loss" in facts("mixtral-8x7b", recipe=made["dpo"]).batch_coupled
    assert facts("mixtral-8x7b", Task.SEQUENCE_CLASSIFICATION, made["reward"]).batch_coupled is None
    # Switch adds it only if the call asks for it, whatever the config says.
    coupled = facts("switch-base-8", output_router_logits=True).batch_coupled
    assert coupled is None or "expert capacity" in coupled


@pytest.mark.parametrize("task", [Task.CAUSAL_LM, Task.SEQUENCE_CLASSIFICATION])
def test_prefixes_fit_where_peft_can_hand_them_over(tmp_path, task):
    spec, known = tiny(tmp_path, "llama", pad_token_id=0), PrefixAdapter(virtual_tokens=2)
    model = put_on(build_model(spec, task, dtype="float32", device="cpu"), adapter_arguments(known, task))
    ids = torch.full((1, 4), 5)
    with contextlib.nullcontext() if describe(spec, task).takes_prefix else pytest.raises(ValueError, match="past key"):
        model(input_ids=ids, attention_mask=torch.ones_like(ids))


def test_hidden_parts_of_a_recording_are_random_as_dropout_is(tmp_path):
    still = without_dropout({**TINY["wav2vec2"], **dict.fromkeys(NO_DROPOUT, 0.0)})
    silent = describe(resolve(str(write_model(tmp_path / "still", {**still, "mask_time_prob": 0.0}))), Task.SPEECH_CTC)
    hiding = describe(resolve(str(write_model(tmp_path / "hiding", {**still, "mask_time_prob": 0.1}))), Task.SPEECH_CTC)
    assert (silent.has_dropout, hiding.has_dropout) == (False, True)


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


LLAMA = {**SIZES, "num_attention_heads": 8}


def facts_of_config(model_type: str, config: dict, task: Task, kind: str = "decoder"):
    return describe(make_spec(model_type=model_type, config=config, kind=kind), task)


def test_a_config_without_a_number_of_key_heads_is_told_from_one_that_leaves_the_class_to_say_it():
    assert facts_of_config("llama", LLAMA, Task.CAUSAL_LM).counts_keys
    assert not facts_of_config("gpt_neox", LLAMA, Task.CAUSAL_LM).counts_keys


def test_a_figure_that_each_layer_has_its_own_of_is_none_of_the_model():
    """As by `per_layer_config` in transformers 5.24, whose error is a RuntimeError."""
    model = build_model(
        make_spec(model_type="llama", config=LLAMA), Task.CAUSAL_LM, dtype="float32", attn_implementation=None,
        device="meta",
    )  # fmt: skip

    class Varied(type(model.config)):
        @property
        def num_attention_heads(self):
            raise RuntimeError("'num_attention_heads' is a per-layer attribute")

    assert facts_of(model, Task.CAUSAL_LM).tensor_parallel_heads
    del model.config.num_attention_heads
    model.config.__class__ = Varied
    assert facts_of(model, Task.CAUSAL_LM).tensor_parallel_heads is None


@pytest.mark.parametrize("tied", [True, False])
def test_a_decoder_is_split_by_fsdp_and_t5_has_its_embedding_in_several_units_tied_or_not(tied):
    assert facts_of_config("llama", {**LLAMA, "tie_word_embeddings": tied}, Task.CAUSAL_LM).not_fsdp is None
    found = facts_of_config("t5", {**T5, "tie_word_embeddings": tied}, Task.SEQ2SEQ_LM, "encoder-decoder")
    assert "shared.weight and encoder.embed_tokens.weight are one parameter" in found.not_fsdp
    assert found.tensor_parallel_heads is None  # its class has no plan


def test_bert_is_not_split_by_fsdp_as_a_unit_holds_its_embedding_and_its_language_head_shares_a_bias():
    of_language = facts_of_config("bert", SIZES, Task.MASKED_LM, "encoder")
    assert of_language.tensor_parallel_heads is None
    for found in (of_language, facts_of_config("bert", SIZES, Task.SEQUENCE_CLASSIFICATION, "encoder")):
        assert "bert.embeddings.word_embeddings lies within BertEmbeddings" in found.not_fsdp


@pytest.mark.parametrize(("keys", "heads"), [(8, 8), (2, 2), (6, 2)])
def test_tensor_parallel_deals_out_query_and_key_heads(keys, heads):
    config = {**LLAMA, "num_key_value_heads": keys}
    assert facts_of_config("llama", config, Task.CAUSAL_LM).tensor_parallel_heads == heads
