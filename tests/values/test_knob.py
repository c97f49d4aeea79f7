"""Every field of a configuration says what knob it is, and says it once for all who ask."""

import dataclasses
import itertools
from typing import Annotated

import pytest
from factories import make_config, make_facts
from pydantic import Field
from transformers import TrainingArguments

from autotune.cost.corrections import time_features
from autotune.cost.predictions import kind_of
from autotune.output.table import show_config
from autotune.space.knobs import SHORT_NAMES, knobs
from autotune.training.arguments import SEARCHED_ARGUMENTS
from autotune.value import Value
from autotune.values.config import KNOBS, Parallelism, TrainConfig, knob_values
from autotune.values.knob import Allowance, Difference, Knob, each, knobs_of, of_sharding

USUAL = {field.name: field.default for field in dataclasses.fields(TrainingArguments)}


def test_every_field_of_a_configuration_has_its_knob_in_the_order_of_the_fields():
    nested = [f"parallelism.{name}" for name in Parallelism.model_fields]
    assert list(KNOBS) == [*(name for name in TrainConfig.model_fields if name != "parallelism"), *nested]


def test_the_values_of_a_configuration_are_in_the_order_of_its_knobs():
    values = dict(zip(KNOBS, knob_values(make_config(4, parallelism=Parallelism(world_size=2))), strict=True))
    assert (values["per_device_train_batch_size"], values["parallelism.world_size"]) == (4, 2)


class Forgetful(TrainConfig):
    planted: bool = Field(default=False, description="a field that doesn't say what knob it is")


class Nested(Value):
    within: Parallelism = Field(default=Parallelism())
    planted: Annotated[int, Knob("exact")] = 1


def test_a_field_without_its_knob_is_refused_by_name():
    with pytest.raises(TypeError, match=r"Forgetful\.planted has no Knob"):
        knobs_of(Forgetful)
    assert list(knobs_of(Nested)) == [*(f"within.{name}" for name in Parallelism.model_fields), "planted"]


@pytest.mark.parametrize(("name", "known"), KNOBS.items())
def test_an_argument_that_is_left_out_at_its_default_has_that_default_in_the_library_too(name, known):
    if known.knob.argument is not None:
        assert name in SEARCHED_ARGUMENTS
        assert name in USUAL
    if known.knob.argument == "unless default":
        assert (USUAL[name] or None) == (known.field.default or None)


OTHERS = {
    "precision": "bf16", "tf32": True, "optim": "adafactor", "checkpointing": "full", "attn_implementation": "eager",
    "experts_implementation": "eager", "experts_per_token": 1, "expert_capacity": 8, "use_liger_kernel": True,
    "chunked_loss": True, "activation_memory_budget": 0.5, "generation_batch_size": 4, "precompute_ref_log_probs": True,
    "torch_compile_backend": "inductor", "torch_compile_mode": "default", "adapter": {}, "quantization": "nf4",
    "train_sampling_strategy": "group_by_length", "packing": True, "parallelism": Parallelism(world_size=2),
}  # fmt: skip


def test_configurations_that_are_traced_differently_never_share_a_prediction():
    usual = make_config()
    traced = {name.partition(".")[0] for name, known in KNOBS.items() if known.knob.is_traced}
    assert traced == {"per_device_train_batch_size", *OTHERS}
    for name, value in OTHERS.items():
        assert kind_of(make_config(**{name: value})) != kind_of(usual), name
    assert kind_of(make_config(4, dataloader_num_workers=2, dataloader_pin_memory=True)) == kind_of(usual)


def test_words_and_features_are_said_of_what_is_not_the_default():
    config = make_config(adapter={}, torch_compile_backend="inductor", torch_compile_mode="max-autotune", tf32=True)
    assert show_config(config) == (
        "micro-batch 8, fp32, adamw_torch_fused, tf32, sdpa attention, compile inductor max-autotune, "
        "lora rank 16 on all-linear"
    )
    assert time_features(config).keys() == {
        "all", "samples", "precision=fp32", "tf32", "optim=adamw_torch_fused", "attention=sdpa", "compile=inductor",
        "adapter",
    }  # fmt: skip


def test_what_is_said_can_be_a_function_of_the_value():
    planted = knobs_of(Nested)["planted"]
    assert [planted.filled(each("x={}"), value) for value in (1, 2)] == ["x=1", "x=2"]
    assert [planted.filled("x={}", value) for value in (1, 2)] == [None, "x=2"]
    assert [planted.filled({2: "two"}.get, value) for value in (1, 2)] == [None, "two"]
    assert planted.filled(None, 2) is None


def test_the_class_of_a_change_is_fixed_or_worked_out():
    change = Difference("fsdp_full", "zero_3", make_facts(), "bf16", rounds=False)
    assert Knob("optimizer").allowance_of(change) == "optimizer"
    assert Knob(of_sharding).allowance_of(change) == "numerics"
    assert Knob(of_sharding).allowance_of(change._replace(precision="fp32")) == "exact"


def test_short_names_and_options_are_those_of_the_knobs():
    options = {knob.parameter: knob.option for knob in knobs()}
    assert SHORT_NAMES["parallelism.world_size"] == options["parallelism.world_size"] == "devices"
    assert all(options[name] == short for name, short in SHORT_NAMES.items())


def test_each_allowance_admits_itself_and_what_is_stricter():
    order = [Allowance.EXACT, Allowance.NUMERICS, Allowance.OPTIMIZER, Allowance.METHOD]
    for (i, allowed), (j, asked) in itertools.product(enumerate(order), enumerate(order)):
        assert allowed.admits(asked) == (j <= i)
