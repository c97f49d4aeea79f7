"""Several devices in the one mapping: what DDP, FSDP2, DeepSpeed and transformers' tensor parallel are told."""

import json
from typing import Any

import pytest
from factories import make_config, make_gpu, make_hardware, make_workload

from autotune.training.arguments import UNIT_PARAMETERS, ZERO_BUCKET_ELEMENTS, TrainingPlan, building_device, plan
from autotune.values.config import Parallelism


def mapped(world_size: int = 2, *, hardware=None, knobs: dict[str, Any] | None = None, **spread: Any) -> TrainingPlan:
    config = make_config(2, parallelism=Parallelism(world_size=world_size, **spread), **(knobs or {}))
    return plan(config, make_workload(), hardware or make_gpu())


def zero(**spread: Any) -> dict[str, Any]:
    return mapped(**spread).tuned["deepspeed"]["zero_optimization"]


def test_one_device_is_told_nothing_of_several():
    words = ("fsdp", "deepspeed", "ddp", "save_only_model", "distributed")
    one = mapped(1)
    assert not [name for name in (*one.tuned, *one.model) if name.startswith(words)]


def test_the_accumulation_is_that_of_all_data_parallel_ranks():
    assert mapped(1).tuned["gradient_accumulation_steps"] == 8
    assert mapped(4).tuned["gradient_accumulation_steps"] == 2
    assert mapped(4, tensor_parallel=4).tuned["gradient_accumulation_steps"] == 8


def test_plain_data_parallel_is_what_the_trainer_does_by_itself():
    assert mapped(2).tuned == mapped(1).tuned | {"gradient_accumulation_steps": 4}


def test_buckets_and_the_static_graph_are_ddps():
    tuned = mapped(ddp_bucket_cap_mb=100, ddp_static_graph=True).tuned
    assert tuned["ddp_bucket_cap_mb"] == 100
    assert tuned["ddp_static_graph"] is True
    assert tuned["ddp_find_unused_parameters"] is False


@pytest.mark.parametrize(("sharding", "reshard"), [("fsdp_full", True), ("fsdp_grad_op", False)])
def test_fsdp_differs_in_whether_weights_are_given_back_after_the_forward_pass(sharding, reshard):
    tuned = mapped(sharding=sharding).tuned
    assert tuned["fsdp"] is True
    assert tuned["fsdp_config"] == {
        "version": 2,
        "reshard_after_forward": reshard,
        "auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
    }


def test_fsdps_units_may_go_by_size():
    settings = mapped(sharding="fsdp_full", wrapping="size").tuned["fsdp_config"]
    assert (settings["auto_wrap_policy"], settings["min_num_params"]) == ("SIZE_BASED_WRAP", UNIT_PARAMETERS)


def test_what_fsdp_offloads_has_a_backend_of_the_host_as_well():
    tuned = mapped(sharding="fsdp_full", offload="parameters").tuned
    assert tuned["fsdp_config"]["cpu_offload"] is True
    assert tuned["ddp_backend"] == "cuda:nccl,cpu:gloo"
    assert "ddp_backend" not in mapped(sharding="fsdp_full").tuned


@pytest.mark.parametrize(
    ("version", "name"), [("5.17.2", "gradient_checkpointing"), ("5.23.0", "activation_checkpointing")]
)
def test_fsdp_checkpoints_its_units_itself(version, name):
    gpu = make_gpu(versions={"transformers": version})
    tuned = mapped(sharding="fsdp_full", knobs={"checkpointing": "full"}, hardware=gpu).tuned
    assert tuned["fsdp_config"]["activation_checkpointing"] is True
    assert tuned[name] is False
    assert mapped(sharding="zero_3", knobs={"checkpointing": "full"}, hardware=gpu).tuned[name] is True


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_zero_has_its_stage_and_buckets_that_do_not_take_gigabytes(stage):
    settings = zero(sharding=f"zero_{stage}")
    assert (settings["stage"], settings["reduce_bucket_size"]) == (stage, ZERO_BUCKET_ELEMENTS)
    assert ("stage3_param_persistence_threshold" in settings) == (stage == 3)


def test_deepspeed_takes_batch_and_clipping_from_the_trainer():
    tuned = mapped(sharding="zero_2").tuned["deepspeed"]
    automatic = {name for name, value in tuned.items() if value == "auto"}
    assert automatic == {
        "train_batch_size",
        "train_micro_batch_size_per_gpu",
        "gradient_accumulation_steps",
        "gradient_clipping",
    }


@pytest.mark.parametrize(("precision", "enabled"), [("fp32", None), ("bf16", "bf16"), ("fp16", "fp16")])
def test_deepspeed_has_the_precision_of_the_trainer(precision, enabled):
    tuned = mapped(sharding="zero_2", knobs={"precision": precision}).tuned
    assert [name for name in ("bf16", "fp16") if tuned["deepspeed"][name]["enabled"]] == [enabled] * bool(enabled)
    assert [name for name in ("bf16", "fp16") if tuned[name]] == [enabled] * bool(enabled)


@pytest.mark.parametrize(
    ("spread", "parts"),
    [
        ({}, {}),
        ({"offload": "optimizer"}, {"offload_optimizer": "cpu"}),
        ({"offload": "parameters"}, {"offload_optimizer": "cpu", "offload_param": "cpu"}),
    ],
)
def test_zero_offloads_what_it_is_told_to(spread, parts):
    settings = zero(sharding="zero_3", **spread)
    assert {name: settings[name]["device"] for name in settings if name.startswith("offload")} == parts
    assert all(settings[name]["pin_memory"] for name in parts)


def test_on_a_cpu_nothing_is_pinned_or_overlapped():
    tuned = mapped(sharding="zero_2", offload="optimizer", hardware=make_hardware()).tuned
    settings = tuned["deepspeed"]["zero_optimization"]
    assert settings["offload_optimizer"]["pin_memory"] is False
    assert settings["overlap_comm"] is False


def test_tensor_parallel_is_the_models():
    shared = mapped(4, tensor_parallel=2, sharding="fsdp_full")
    assert shared.model["distributed_config"] == {"tp_size": 2, "fsdp_size": 2}
    assert mapped(2, tensor_parallel=2).model["distributed_config"] == {"tp_size": 2}
    assert "fsdp" not in shared.tuned
    assert shared.tuned["save_only_model"] is True


@pytest.mark.parametrize("sharding", ["none", "fsdp_full", "fsdp_grad_op", "zero_1", "zero_2", "zero_3"])
def test_the_arguments_are_json(sharding):
    tuned = mapped(sharding=sharding).tuned
    assert json.loads(json.dumps(tuned)) == tuned


def test_no_device_holds_all_of_a_model_that_fsdp_splits():
    def built(to_compare=False, knobs=None, **spread):
        config = make_config(parallelism=Parallelism(world_size=2, **spread), **(knobs or {}))
        return building_device(config, "cuda:1", to_compare=to_compare)

    assert built(sharding="fsdp_full") == "cpu"
    assert built(sharding="zero_3") == built() == "cuda:1"
    assert built(sharding="zero_3", to_compare=True) == built(to_compare=True) == "cpu"
    assert built(to_compare=True, knobs={"adapter": {}, "quantization": "nf4"}) == "cuda:1"
