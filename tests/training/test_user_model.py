"""A model that code has made already becomes the one of a configuration, in place, however often it is asked for."""

from __future__ import annotations

import json

import pytest
import torch
from conftest import TINY_LLAMA
from factories import make_config, make_hardware, make_workload
from transformers import LlamaConfig, LlamaForCausalLM

from autotune.training.arguments import plan
from autotune.training.user_model import fitted
from autotune.values.user_code import Held, OwnCode

CODE = OwnCode(kind="script", shown="train.py", command=("train.py",), directory="/", normalizes=True)


@pytest.fixture
def model():
    return LlamaForCausalLM(LlamaConfig.from_dict(json.loads(json.dumps(TINY_LLAMA))))


def fit(model, code=CODE, **knobs):
    return fitted(model, plan(make_config(**knobs), make_workload(), make_hardware()), code)


def test_kernels_are_switched(model):
    assert fit(model, attn_implementation="eager").config._attn_implementation == "eager"


def test_pure_bf16_is_of_the_weights_and_not_of_rotary_positions(model):
    made = fit(model, precision="pure_bf16")
    assert {p.dtype for p in made.parameters()} == {torch.bfloat16}
    assert made.model.rotary_emb.inv_freq.dtype is torch.float32


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")  # peft asks by the older name
def test_an_adapter_is_put_on_once_though_code_makes_several_trainers_of_a_model(model):
    once = fit(model, adapter={"rank": 4})
    again = fit(once, adapter={"rank": 4})
    assert again is once
    assert sum("lora_A" in name for name, _ in again.named_parameters()) == 2 * 7


def test_the_loss_is_made_that_of_the_global_batch_where_it_is_the_librarys(model):
    assert fit(model).accepts_loss_kwargs
    assert type(fit(model))._autotune_normalized


def test_what_the_code_decides_stays(model):
    held = {name: Held(value=None, reason="its own") for name in ("precision", "attn_implementation")}
    own = CODE.model_copy(update={"held": held, "normalizes": False})
    made = fit(model, own, precision="pure_bf16", attn_implementation="eager")
    assert made.dtype is torch.float32
    assert made.config._attn_implementation == "sdpa"
    assert not hasattr(type(made), "_autotune_normalized")
