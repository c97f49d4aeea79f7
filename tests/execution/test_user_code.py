"""The model of a user's own code is told to the cost model as it is, and becomes a configuration's."""

import json

import pytest
import torch
from conftest import TINY_LLAMA
from factories import make_config, make_facts, make_hardware, make_workload
from peft import AdaLoraConfig, LoraConfig, get_peft_model, prepare_model_for_kbit_training
from transformers import BitsAndBytesConfig, LlamaConfig, LlamaForCausalLM

from autotune.cost.family import family_of
from autotune.execution import user_code
from autotune.training.adapters import adapter_arguments, put_on
from autotune.training.arguments import plan
from autotune.training.baseline import UserArguments, baseline_config
from autotune.training.loss import base_model
from autotune.values.workload import Held, OwnCode

# peft and users say it by the older name.
pytestmark = pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.* is deprecated:FutureWarning")

CODE = OwnCode(kind="script", shown="train.py", command=("train.py",), directory="/", normalizes=True)


@pytest.fixture
def llama():
    return LlamaForCausalLM(LlamaConfig.from_dict(json.loads(json.dumps(TINY_LLAMA))))


def fit(model, code=CODE, **knobs):
    mapping = plan(make_config(**knobs), make_workload(), make_hardware())
    return user_code.fitted(model, mapping, code)


def family(code, **knobs):
    return family_of(make_config(**knobs), make_hardware(), make_workload(own_code=code))


def test_pure_bf16_is_of_the_weights_and_not_of_rotary_positions(llama):
    made = fit(llama, precision="pure_bf16")
    assert {p.dtype for p in made.parameters()} == {torch.bfloat16}
    assert made.model.rotary_emb.inv_freq.dtype is torch.float32


def test_an_adapter_is_put_on_once_though_code_makes_several_trainers_of_a_model(llama):
    once = fit(llama, adapter={"rank": 4})
    again = fit(once, adapter={"rank": 4})
    assert again is once
    assert sum("lora_A" in name for name, _ in again.named_parameters()) == 2 * 7


def test_what_the_code_decides_stays(llama):
    held = {name: Held(value=None, reason="its own") for name in ("precision", "attn_implementation")}
    own = CODE.model_copy(update={"held": held, "normalizes": False})
    made = fit(llama, own, precision="pure_bf16", attn_implementation="eager")
    assert made.dtype is torch.float32
    assert made.config._attn_implementation == "sdpa"
    assert not hasattr(type(made), "_autotune_normalized")


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_that_the_code_has_switched_on_is_its_baselines_and_goes_where_it_is_not_asked_for(
    llama, reentrant
):
    written = {"activation_checkpointing": False, "gradient_checkpointing": False}
    assert user_code.checkpointing(llama, written) == {}
    llama.gradient_checkpointing_enable({"use_reentrant": reentrant})
    found = user_code.checkpointing(llama, written)
    arguments = UserArguments({**written, **found}, {}, "it")
    assert baseline_config(arguments, 8, make_facts(), make_hardware()).checkpointing == "full"
    assert user_code.checkpointing(llama, {**written, "gradient_checkpointing": True}) == {}  # it has been asked for
    own = CODE.model_copy(update={"checkpoints": True})
    assert fit(llama, own, checkpointing="full").is_gradient_checkpointing
    assert not fit(llama, own).is_gradient_checkpointing
    llama.gradient_checkpointing_enable()
    assert fit(llama).is_gradient_checkpointing  # of a code of which that isn't known


def test_an_adapter_without_defaults_is_not_told(llama):
    config = AdaLoraConfig(init_r=6, target_r=4, total_step=100, target_modules="all-linear")
    model = get_peft_model(llama, config)
    assert user_code.adapter(model) is None
    assert user_code.not_traced(model, llama) is not None


@pytest.mark.parametrize("targets", ["all-linear", ["q_proj", "down_proj"]])
def test_an_adapter_of_the_codes_own_is_told_so_that_it_can_be_put_on_again(llama, targets):
    before = user_code.counts_of(llama)
    config = LoraConfig(r=4, lora_alpha=3, target_modules=targets, init_lora_weights="pissa", task_type="CAUSAL_LM")
    model = get_peft_model(llama, config)
    assert user_code.not_traced(model, llama) is None
    assert user_code.counts_of(model) == {**before, "frozen_parameters": before["parameters"]}
    code = CODE.model_copy(update={"adapter": user_code.adapter(model)})
    again = put_on(LlamaForCausalLM(llama.config), adapter_arguments(family(code).adapter))
    shapes = [{n: p.shape for n, p in m.named_parameters() if p.requires_grad} for m in (model, again)]
    assert shapes[0] == shapes[1]
    assert base_model(model).model.layers[0].mlp.down_proj.scaling == {"default": 0.75}
    assert base_model(again).model.layers[0].mlp.down_proj.scaling == {"default": 0.75}


def test_what_an_adapter_can_not_say_is_not_traced(llama):
    model = get_peft_model(llama, LoraConfig(r=4, target_modules="all-linear"))
    next(p for n, p in model.named_parameters() if "norm" in n).requires_grad_(True)
    assert user_code.not_traced(model, llama) == "weights are trained beside those of the adapter"
    model.add_adapter("other", LoraConfig(r=4, target_modules="all-linear"))
    assert "several adapters" in user_code.not_traced(model, llama)


@pytest.mark.parametrize(
    ("options", "packed"),
    [
        ({"load_in_8bit": True}, "int8"),
        ({"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True}, "nf4-double"),
    ],
    ids=["int8", "nf4"],
)
def test_packed_weights_are_those_of_the_family_and_the_others_have_the_type(llama, tmp_path, options, packed):
    llama.save_pretrained(tmp_path)
    model = LlamaForCausalLM.from_pretrained(
        tmp_path, quantization_config=BitsAndBytesConfig(**options), dtype="bfloat16"
    )
    assert (user_code.weights_of(model), user_code.quantization(model)) == ("bfloat16", packed)
    assert user_code.counts_of(model)["parameters"] == user_code.counts_of(llama)["parameters"]
    assert user_code.not_traced(model, model) == "the model has packed weights and no adapter"
    model = prepare_model_for_kbit_training(model)
    assert user_code.weights_of(model) == "float32"
    wrapped = get_peft_model(model, LoraConfig(target_modules="all-linear"))
    assert user_code.not_traced(wrapped, base_model(wrapped)) is None
    code = CODE.model_copy(update={"quantization": packed, "weights": "float32"})
    assert (family(code).quantization, family(code).dtype) == (packed, "float32")


def test_weights_in_16_bits_stay_so_under_autocast():
    code = CODE.model_copy(update={"weights": "bfloat16"})
    found = family(code, precision="bf16")
    assert (found.dtype, found.autocast) == ("bfloat16", "bfloat16")
    assert family_of(make_config(precision="bf16"), make_hardware()).dtype == "float32"
