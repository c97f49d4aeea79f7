"""The knobs of a configuration's fields, the values that are refused, and ids."""

import dataclasses
import itertools

import pytest
from factories import make_config, make_workload
from pydantic import ValidationError
from transformers import TrainingArguments

from autotune.cost.corrections import time_features
from autotune.cost.model import kind_of
from autotune.output.table import show_config
from autotune.training.arguments import SEARCHED_ARGUMENTS
from autotune.value import digest_of
from autotune.values.config import KNOBS, Allowance, Parallelism, TrainConfig
from autotune.values.workload import Held, OwnCode, OwnStep

USUAL = {field.name: field.default for field in dataclasses.fields(TrainingArguments)}


def test_every_field_of_a_configuration_has_its_knob_in_the_order_of_the_fields():
    nested = [f"parallelism.{name}" for name in Parallelism.model_fields]
    plain = [name for name in TrainConfig.model_fields if name not in ("parallelism", "own")]
    assert list(KNOBS) == [*plain, *nested]


def test_an_argument_that_is_left_out_at_its_default_has_that_default_in_the_library_too():
    arguments = {name for name, known in KNOBS.items() if known.argument is not None}
    assert arguments <= {*SEARCHED_ARGUMENTS} & {*USUAL}
    for name, known in KNOBS.items():
        if known.argument == "unless default":
            assert (USUAL[name] or None) == (known.field.default or None), name


OTHERS = {
    "precision": "bf16", "tf32": True, "optim": "adafactor", "checkpointing": "full", "attn_implementation": "eager",
    "experts_implementation": "eager", "experts_per_token": 1, "expert_capacity": 8, "use_liger_kernel": True,
    "chunked_loss": True, "activation_memory_budget": 0.5, "generation_batch_size": 4, "precompute_ref_log_probs": True,
    "torch_compile_backend": "inductor", "torch_compile_mode": "default", "adapter": {}, "quantization": "nf4",
    "train_sampling_strategy": "group_by_length", "packing": True, "pad_to_multiple_of": 8,
    "parallelism": Parallelism(world_size=2),
}  # fmt: skip


def test_configurations_that_are_traced_differently_never_share_a_prediction():
    usual = make_config()
    traced = {name.partition(".")[0] for name, known in KNOBS.items() if known.is_traced}
    assert traced == {"per_device_train_batch_size", *OTHERS}
    for name, value in OTHERS.items():
        assert kind_of(make_config(**{name: value})) != kind_of(usual), name
    assert kind_of(make_config(4, dataloader_num_workers=2, dataloader_pin_memory=True)) == kind_of(usual)


def test_words_and_features_name_the_values_that_are_not_the_default():
    config = make_config(adapter={}, torch_compile_backend="inductor", torch_compile_mode="max-autotune", tf32=True)
    assert show_config(config) == (
        "micro-batch 8, precision fp32, tf32 True, optim adamw_torch_fused, attention sdpa, compile inductor, "
        "compile-mode max-autotune, adapter lora rank 16 on all-linear"
    )
    off = make_config(logging_nan_inf_filter=False, torch_compile_backend="inductor", activation_memory_budget=0.0)
    assert show_config(off).endswith("activation_memory_budget 0.0, nan-filter False")
    step = OwnStep(name="s", takes_accumulation=False, knobs={"precision": None}, directory="/", search_path=())
    own = show_config(make_config(own={"width": 4}), make_workload(own_step=step))
    assert own == "precision fp32, attention sdpa, width 4"
    held = {"optim": Held(value="adamw_torch_fused", reason="yours")}
    code = OwnCode(kind="script", shown="a.py", command=("a.py",), directory="/", held=held)
    shown = show_config(make_config(), make_workload(own_code=code))
    assert shown == "micro-batch 8, precision fp32, attention sdpa"
    assert time_features(config).keys() == {
        "all", "samples", "precision=fp32", "tf32", "optim=adamw_torch_fused", "attention=sdpa", "compile=inductor",
        "adapter",
    }  # fmt: skip


def test_each_allowance_admits_itself_and_the_stricter_ones():
    order = ("exact", "numerics", "optimizer", "method")
    for (i, allowed), (j, asked) in itertools.product(enumerate(order), enumerate(order)):
        assert Allowance(allowed).admits(Allowance(asked)) == (j <= i)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"micro_batch": 0}, "greater than 0"), ({"precision": "fp64"}, "precision"),
        ({"checkpointing": "some"}, "checkpointing"), ({"dataloader_num_workers": -1}, "greater than or equal to 0"),
        ({"adapter": {"kind": "dorra"}}, "dorra"), ({"adapter": {"kind": "lora", "rank": 0}}, "rank"),
        ({"adapter": {"kind": "lora", "dropout": 1.0}}, "dropout"), ({"adapter": {"kind": "ia3", "rank": 8}}, "rank"),
        ({"quantization": "nf5"}, "quantization"),
        ({"quantization": "qat"}, "quantization-aware training is not offered"),
        ({"optim": "adamw_trch"}, "no optimizer 'adamw_trch'.*'adamw_torch'"),
        ({"optim": "adamw_hf"}, "adamw_hf is gone from transformers 5; use adamw_torch"),
        ({"torch_compile_backend": "inducter"}, "Input should be 'inductor'"),
    ],
)  # fmt: skip
def test_a_value_that_can_not_be_trained_is_refused(fields, said):
    with pytest.raises(ValidationError, match=said):
        make_config(**fields)


def test_config_ids_do_not_change_with_later_knobs():
    """As they stand in run directories and on record."""
    assert TrainConfig(per_device_train_batch_size=8).config_id == digest_of({"per_device_train_batch_size": 8})
    written = TrainConfig(per_device_train_batch_size=8, precision="fp32", parallelism=Parallelism(), optim="sgd")
    assert written.config_id == digest_of({"per_device_train_batch_size": 8, "optim": "sgd"})
    assert len({make_config(adapter={"kind": kind}).config_id for kind in ("lora", "dora", "ia3")}) == 3
    assert make_config(torch_empty_cache_steps=1).config_id != make_config().config_id
    assert len({make_config(b, precision=p).config_id for b in (1, 2) for p in ("fp32", "bf16")}) == 4
