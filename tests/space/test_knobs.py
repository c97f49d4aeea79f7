"""Every field of a configuration is an option, derived from it."""

import pytest
from factories import make_config, make_problem
from pydantic import ValidationError

from autotune.errors import InputError
from autotune.space.changes import changes
from autotune.space.knobs import knobs, point_of, refused, shown, shown_changes
from autotune.values.adapters import ADAPTERS, LoraAdapter
from autotune.values.config import Parallelism, TrainConfig

OPTIONS = {knob.parameter: knob.option for knob in knobs()}


def test_every_field_of_a_configuration_and_of_its_adapter_is_a_knob():
    adapter = {f"adapter.{f}" for kind in ADAPTERS.values() for f in kind.model_fields if f != "kind"}
    devices = {f"parallelism.{f}" for f in Parallelism.model_fields}
    assert OPTIONS.keys() == set(TrainConfig.model_fields) - {"parallelism"} | adapter | devices


def test_options_are_the_fields_or_shorter():
    assert OPTIONS["per_device_train_batch_size"] == "micro-batch"
    assert OPTIONS["attn_implementation"] == "attention"
    assert OPTIONS["precision"] == "precision"
    assert OPTIONS["adapter.target_modules"] == "adapter-target-modules"
    assert len(set(OPTIONS.values())) == len(OPTIONS)


def test_choices_and_defaults_are_those_of_the_fields():
    by_name = {knob.option: knob for knob in knobs()}
    assert by_name["precision"].choices == ("fp32", "fp16", "bf16", "pure_bf16")
    assert by_name["precision"].help == "fp32, fp16, bf16 or pure_bf16 [fp32]."
    assert by_name["checkpointing"].choices == ("none", "full", "every-2nd", "every-4th", "offload", "reentrant")
    assert by_name["adapter"].choices == (*ADAPTERS, "none")
    assert by_name["quantization"].choices == ("int8", "nf4", "nf4-double", "fp4", "fp4-double", "none")
    assert "[16, 256 for vera, 8 for loha, 8 for lokr]" in by_name["adapter-rank"].help
    assert by_name["adapter-virtual-tokens"].help.endswith("[20]; of prefix, prompt, p-tuning.")
    assert by_name["tf32"].is_flag
    assert not by_name["optim"].is_flag


def test_what_is_written_becomes_a_point():
    written = {"micro-batch": "8", "tf32": True, "compile": "none", "checkpointing": "none"}
    assert point_of(written) == {
        "per_device_train_batch_size": "8",
        "tf32": True,
        "torch_compile_backend": None,
        "checkpointing": "none",
    }


def test_a_field_of_an_adapter_stands_for_lora_too():
    assert point_of({"adapter-rank": "8"}) == {"adapter": "lora", "adapter.rank": "8"}
    assert point_of({"adapter": "vera", "adapter-rank": "8"}) == {"adapter": "vera", "adapter.rank": "8"}
    assert point_of({"adapter": "none"}) == {"adapter": None}


@pytest.mark.parametrize(
    ("written", "said"),
    [
        ({"precison": "bf16"}, "--precison: unknown (did you mean 'precision'?)"),
        ({"precision": "bf61"}, "--precision bf61: expected fp32, fp16, bf16 or pure_bf16 (did you mean"),
        ({"adapter": "dorra"}, "(did you mean 'dora'"),
        ({"adapter": "none", "adapter-rank": "8"}, "--adapter-rank 8: there is no adapter (--adapter none)"),
        ({"adapter": "prefix", "adapter-rank": "8"}, "--adapter-rank 8: prefix has none (--adapter lora, rslora"),
        ({"adapter-virtual-tokens": "8"}, "lora has none (--adapter prefix, prompt or p-tuning has)"),
        ({"quantization": "int8-qat"}, "--quantization int8-qat: quantization-aware training is not offered"),
        ({"quantization": "nf5"}, "--quantization nf5: expected int8, nf4, nf4-double, fp4, fp4-double or none"),
    ],
)
def test_what_can_not_be_is_refused_in_one_line(written, said):
    with pytest.raises(InputError) as error:
        point_of(written)
    assert said in str(error.value)
    assert "\n" not in str(error.value)


def test_an_impossible_value_is_told_by_its_option():
    with pytest.raises(ValidationError) as error:
        TrainConfig(per_device_train_batch_size=0)
    assert str(refused(error.value)) == "--micro-batch 0: expected a number above 0"
    with pytest.raises(ValidationError) as error:
        LoraAdapter(rank=0)
    assert str(refused(error.value)).startswith("--adapter-rank 0:")


def test_an_option_is_shown_as_it_is_written():
    assert shown("precision", "bf16") == "--precision bf16"
    assert (shown("tf32", True), shown("tf32", False)) == ("--tf32", "--no-tf32")
    assert shown("compile", None) == "--compile none"
    assert shown("adapter-dropout", 0.0) == "--adapter-dropout 0.0"


def test_changes_are_told_by_the_short_names_of_the_knobs():
    changed = changes(make_config(16, precision="bf16", parallelism=Parallelism(world_size=2)), make_problem())
    assert shown_changes(changed) == "micro-batch 16, precision bf16, devices 2"
    assert shown_changes(()) == "the baseline"
