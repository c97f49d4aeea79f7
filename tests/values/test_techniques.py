"""Tables of techniques: checkpointing, compilers and optimizers as libraries have them; adapters as values."""

import typing

import pytest
import torch
from factories import installed_arguments
from pydantic import TypeAdapter, ValidationError
from torch._inductor import list_mode_options
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments
from transformers.training_args import OptimizerNames

from autotune.values.hardware import installed_versions
from autotune.values.techniques import (
    ADAPTERS,
    CHECKPOINTING,
    OPTIMIZERS,
    AnyAdapter,
    BackendName,
    Mode,
    checkpointing_arguments,
    checkpointing_of,
    is_new_weight,
)

NEW, OLD = (5, 23), (5, 17)
TINY = {"vocab_size": 16, "hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 1}


@pytest.mark.parametrize("kind", CHECKPOINTING)
def test_a_kind_is_recognised_by_its_own_arguments(kind):
    assert checkpointing_of(checkpointing_arguments(kind, NEW)["activation_checkpointing_kwargs"]) == kind


def test_older_versions_have_the_older_name_and_options_of_no_kind_are_refused():
    assert checkpointing_arguments("none", OLD) == {"gradient_checkpointing": False}
    assert checkpointing_arguments("full", OLD)["gradient_checkpointing_kwargs"] == {"use_reentrant": False}
    assert checkpointing_arguments("none", NEW) == {"activation_checkpointing": False}
    assert checkpointing_of({}) == "full"
    for options in ({"every_n_layers": 3}, {"preserve_rng_state": False}):
        with pytest.raises(ValueError, match="none of full, every-2nd"):
            checkpointing_of(options)


@pytest.mark.parametrize("kind", [k for k in CHECKPOINTING if not CHECKPOINTING[k].offload])
def test_the_installed_trainer_checkpoints_the_layers_of_a_kind(kind, tmp_path):
    arguments, model = installed_arguments(kind), LlamaForCausalLM(LlamaConfig(num_hidden_layers=8, **TINY))
    made = TrainingArguments(str(tmp_path), use_cpu=True, report_to="none", **arguments)
    name, _ = arguments
    options = dict(getattr(made, f"{name}_kwargs"))
    own = {key: options.pop(key) for key in ("every_n_layers", "offload") if key in options}
    getattr(model, f"{name}_enable")(options, **own)
    assert sum(layer.gradient_checkpointing for layer in model.model.layers) == 8 // CHECKPOINTING[kind].every


def test_modes_and_backends_are_those_that_torch_knows():
    assert set(typing.get_args(Mode)) <= set(list_mode_options())
    assert set(typing.get_args(BackendName)) <= set(torch._dynamo.list_backends(exclude_tags=()))


# Packages whose optimizers have groups of their own, or need a GPU.
UNLIKE = {"apollo-torch", "galore-torch", "lomo-optim"}
HERE = installed_versions().keys() - UNLIKE
RUN_HERE = sorted(
    name
    for name, row in OPTIMIZERS.items()
    if row.unusable is None and (row.package is None or row.package in HERE) and not row.compiles
)


def test_every_optimizer_of_the_installed_transformers_has_a_row_with_its_class_or_the_reason_against_it():
    assert {str(name.value) for name in OptimizerNames} == OPTIMIZERS.keys()
    assert [name for name, row in OPTIMIZERS.items() if bool(row.class_name) == bool(row.unusable)] == []


@pytest.mark.parametrize("name", RUN_HERE)
@pytest.mark.filterwarnings("ignore:Paged optimizers are not supported on CPU")
def test_the_trainer_makes_the_class_of_the_row(name, tmp_path):
    model = LlamaForCausalLM(LlamaConfig(num_hidden_layers=1, **TINY))
    arguments = TrainingArguments(str(tmp_path), optim=name, use_cpu=True, report_to="none", weight_decay=0.1)
    optimizer = Trainer(model, arguments, train_dataset=[{}]).create_optimizer()
    assert f"{type(optimizer).__module__}.{type(optimizer).__name__}" == OPTIMIZERS[name].class_name
    decayed, kept = optimizer.param_groups
    assert (decayed["weight_decay"], kept["weight_decay"]) == (0.1, 0.0)
    assert {p.dim() for p in kept["params"]} == {1}
    assert {p.dim() for p in decayed["params"]} == {2}


@pytest.mark.cuda
def test_an_optimizer_takes_gradients_in_bf16_where_bitsandbytes_has_a_kernel_for_them():
    # Of each optimizer: fp32, fp16 and, of some, bf16. Small weights have states in 32 bits always.
    kernels = pytest.importorskip("bitsandbytes.backends.cuda.ops").str2optimizer32bit
    for name, row in OPTIMIZERS.items():
        if row.package == "bitsandbytes" and row.unusable is None:
            kind = row.class_name.rpartition(".")[2].lower().replace("adamw", "adam")
            assert row.takes_bf16 == (len(kernels[kind]) == 3), name


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


def test_an_adapters_weights_are_known_by_their_names():
    lora, head = "base_model.model.layers.0.q_proj.", "base_model.model.score."
    new = (f"{lora}lora_A.default.weight", f"{lora}lora_magnitude_vector.default.weight")
    new += (f"{head}modules_to_save.default.weight", "prompt_encoder.default.embedding.weight")
    old = (f"{head}original_module.weight", f"{lora}base_layer.weight", "model.layers.0.self_attn.q_proj.weight")
    assert [name for name in (*new, *old) if is_new_weight(name)] == list(new)
