"""The one mapping from a configuration to the arguments of transformers and peft."""

import dataclasses
import itertools
from typing import Any

import pytest
from factories import make_config, make_gpu, make_hardware, make_spec, make_workload
from transformers import TrainingArguments

from autotune.training.arguments import (
    OWN_HARNESS,
    SEARCHED_ARGUMENTS,
    UNIT_PARAMETERS,
    TrainingPlan,
    building_device,
    effective_tf32,
    training_plan,
)
from autotune.values.config import Parallelism, Precision
from autotune.values.hardware import installed_versions
from autotune.values.workload import OwnCode

OLD_GPU = make_gpu(versions={"transformers": "5.17.2"})
NEW_GPU = make_gpu(versions={"transformers": "5.23.0"})
AUTOTUNED = {"torch_compile_backend": "inductor", "torch_compile_mode": "max-autotune"}


def mapped(hardware=NEW_GPU, *, fixed: dict[str, Any] | None = None, **knobs: Any) -> TrainingPlan:
    return training_plan(make_config(**knobs), make_workload(fixed_arguments=fixed or {}), hardware)


@pytest.mark.parametrize(
    ("knobs", "arguments"),
    [
        ({"micro_batch": 4}, {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 4}),
        ({"precision": "fp32"}, {"bf16": False, "fp16": False}),
        ({"precision": "bf16"}, {"bf16": True, "fp16": False}),
        ({"precision": "fp16"}, {"bf16": False, "fp16": True}),
        ({"precision": "pure_bf16"}, {"bf16": False, "fp16": False}),
        ({"precision": "pure_bf16", "adapter": {}}, {"bf16": True, "fp16": False}),  # peft has its weights in fp32
        ({"precision": "pure_bf16", "adapter": {"kind": "bitfit"}}, {"bf16": False, "fp16": False}),
        ({"tf32": True}, {"tf32": True}),
        ({"optim": "adafactor"}, {"optim": "adafactor"}),
        ({"torch_compile_backend": "inductor"}, {"torch_compile": True, "torch_compile_backend": "inductor"}),
        ({"dataloader_num_workers": 2}, {"dataloader_num_workers": 2, "dataloader_persistent_workers": True}),
        ({"dataloader_num_workers": 0}, {"dataloader_num_workers": 0, "dataloader_persistent_workers": False}),
        ({"dataloader_pin_memory": True}, {"dataloader_pin_memory": True}),
        ({"non_blocking": True}, {"accelerator_config": {"non_blocking": True}}),
        ({"logging_nan_inf_filter": False}, {"logging_nan_inf_filter": False}),
        ({"torch_empty_cache_steps": 4}, {"torch_empty_cache_steps": 4}),
    ],
)
def test_each_knob_is_its_own_training_arguments_and_no_others(knobs, arguments):
    neutral = mapped(micro_batch=8)
    tuned = mapped(**knobs).tuned
    assert {name: tuned[name] for name in arguments} == arguments
    assert {name for name in tuned if tuned[name] != neutral.tuned.get(name)} <= set(arguments)


@pytest.mark.parametrize(("workers", "stay"), [(1, False), (2, True)])
def test_as_many_workers_as_the_users_end_with_a_pass_as_the_users_do(workers, stay):
    own = {"dataloader_num_workers": 1, "dataloader_persistent_workers": False}
    code = OwnCode(kind="script", shown="python a.py", command=("a.py",), directory="/", arguments=own)
    plan = training_plan(make_config(dataloader_num_workers=workers), make_workload(own_code=code), make_hardware())
    assert plan.tuned["dataloader_persistent_workers"] is stay


def test_settings_of_accelerate_that_are_the_users_stay_beside_copies_that_dont_block():
    tuned = mapped(
        fixed={"accelerator_config": {"even_batches": False, "non_blocking": False}}, non_blocking=True
    ).tuned
    assert tuned["accelerator_config"] == {"even_batches": False, "non_blocking": True}
    made = TrainingArguments("out", use_cpu=True, accelerator_config=tuned["accelerator_config"]).accelerator_config
    assert (made.non_blocking, made.even_batches, made.use_seedable_sampler) == (True, False, True)


def test_weights_are_fp32_unless_training_is_pure():
    found = {precision: mapped(precision=precision).model["dtype"] for precision in Precision}
    assert found == {**dict.fromkeys(Precision, "float32"), Precision.PURE_BF16: "bfloat16"}


@pytest.mark.parametrize("kind", ["encoder", "decoder"])
def test_an_encoder_that_is_to_generate_is_loaded_as_a_decoder(kind):
    plan = training_plan(make_config(), make_workload(model=make_spec(kind=kind)), make_hardware())
    assert plan.model.get("is_decoder", False) == (kind == "encoder")


@pytest.mark.parametrize(
    ("hardware", "name"), [(OLD_GPU, "gradient_checkpointing"), (NEW_GPU, "activation_checkpointing")]
)
def test_checkpointing_goes_by_the_name_that_the_installed_version_has_and_fsdp_checkpoints_its_units_itself(
    hardware, name
):
    off, on = (mapped(hardware, checkpointing=kind).tuned for kind in ("none", "full"))
    assert {k: v for k, v in off.items() if "checkpointing" in k} == {name: False}
    told = {name: True, f"{name}_kwargs": {"use_reentrant": False}}
    assert {k: v for k, v in on.items() if "checkpointing" in k} == told
    tuned = spread(sharding="fsdp_full", knobs={"checkpointing": "full"}, hardware=hardware).tuned
    assert (tuned["fsdp_config"]["activation_checkpointing"], tuned[name]) == (True, False)
    assert spread(sharding="zero_3", knobs={"checkpointing": "full"}, hardware=hardware).tuned[name] is True


COMPILED = {"torch_compile_backend": "inductor"}


@pytest.mark.parametrize(
    ("hardware", "knobs", "is_on"),
    [
        (NEW_GPU, {}, False), (NEW_GPU, {"tf32": True}, True), (NEW_GPU, COMPILED, True),
        (NEW_GPU, {**COMPILED, "precision": "bf16"}, True), (NEW_GPU, {**COMPILED, "precision": "pure_bf16"}, True),
        (NEW_GPU, {**COMPILED, "precision": "fp16"}, False),
        (NEW_GPU, {**COMPILED, "precision": "fp16", "tf32": True}, True),
        (NEW_GPU, {**AUTOTUNED, "precision": "fp32"}, True), (NEW_GPU, {**AUTOTUNED, "precision": "bf16"}, False),
        (make_gpu(capability=(7, 5)), COMPILED, False), (make_gpu(starts_with_tf32=True), {}, True),
        (make_gpu(starts_with_tf32=True, capability=(7, 5)), {}, False),
        (make_hardware(starts_with_tf32=True), COMPILED, False),
    ],
)  # fmt: skip
def test_tf32_is_on_as_asked_for_from_the_start_or_beside_a_compiler(hardware, knobs, is_on):
    assert effective_tf32(make_config(**knobs), hardware) is is_on


def test_inductors_autotuning_in_mixed_precision_has_tf32_switched_off_which_it_could_not_ask_for():
    assert "tf32" not in mapped(make_gpu(), tf32=False).tuned  # it is left to torch where it is not wanted
    assert mapped(**AUTOTUNED, precision="bf16").tuned["tf32"] is False
    assert not [p for p in ("fp32", "pure_bf16", "fp16") if "tf32" in mapped(**AUTOTUNED, precision=p).tuned]
    assert "tf32" not in mapped(make_hardware(), **AUTOTUNED, precision="bf16").tuned


def test_the_filter_of_nan_which_waits_for_the_device_is_that_of_the_exported_training():
    name = "logging_nan_inf_filter"
    assert name not in {*mapped().harness, *mapped().tuned, *OWN_HARNESS}
    assert mapped(fixed={name: False}).tuned[name] is False


def test_fixed_arguments_of_the_user_survive_and_prefetching_is_dropped_where_no_worker_could_do_it():
    fixed = {"learning_rate": 3e-4, "num_train_epochs": 7, "save_strategy": "epoch", "seed": 7, "max_grad_norm": 0.5}
    assert fixed.items() <= mapped(fixed=fixed).tuned.items()
    ahead = {"dataloader_prefetch_factor": 4}
    assert mapped(dataloader_num_workers=2, **ahead).tuned["dataloader_prefetch_factor"] == 4
    assert "dataloader_prefetch_factor" not in mapped(dataloader_num_workers=0, **ahead).tuned


def test_what_only_a_trial_needs_is_not_exported_and_neither_saves_nor_evaluates_whatever_the_user_does(tmp_path):
    fixed = {
        "save_strategy": "epoch", "eval_strategy": "epoch", "load_best_model_at_end": True, "eval_on_start": True,
        "push_to_hub": True, "report_to": ["tensorboard"],
    }  # fmt: skip
    mapping = mapped()
    assert not set(mapping.harness) & (set(mapping.tuned) | SEARCHED_ARGUMENTS)
    mapping = mapped(make_hardware(versions=installed_versions()), fixed=fixed)
    arguments = TrainingArguments(str(tmp_path), **{**mapping.tuned, **mapping.harness})
    assert arguments.save_strategy == arguments.eval_strategy == "no"
    assert [arguments.eval_on_start, arguments.push_to_hub, arguments.report_to] == [False, False, []]


def test_searched_arguments_are_exactly_those_that_the_mapping_can_decide():
    decided: set[str] = set()
    for hardware, checkpointing, backend in itertools.product(
        (OLD_GPU, NEW_GPU, make_hardware()), ("none", "full"), (None, "inductor")
    ):
        mapping = mapped(hardware, checkpointing=checkpointing, torch_compile_backend=backend, tf32=hardware is NEW_GPU)
        decided |= set(mapping.tuned)
    decided |= set(mapped(dataloader_num_workers=2, dataloader_prefetch_factor=4, torch_empty_cache_steps=1).tuned)
    decided |= set(mapped(logging_nan_inf_filter=False).tuned)
    decided |= set(mapped(torch_compile_backend="inductor", torch_compile_mode="default", use_liger_kernel=True).tuned)
    several = Parallelism(world_size=2, **DDP)
    decided |= {name for name in mapped(parallelism=several).tuned if name.startswith("ddp_")}
    decided |= mapped(parallelism=Parallelism(world_size=2, sharding="fsdp_full")).tuned.keys()
    decided |= mapped(parallelism=Parallelism(world_size=2, sharding="zero_2")).tuned.keys()
    assert decided - {"seed"} == SEARCHED_ARGUMENTS


def test_what_is_laid_over_own_arguments_undoes_all_that_a_search_decides():
    laid = mapped().overrides(make_workload())
    assert laid.keys() == SEARCHED_ARGUMENTS - DDP.keys()  # those of one device
    usual = {field.name: field.default for field in dataclasses.fields(TrainingArguments)}
    decided = mapped().tuned.keys()
    for name in (laid.keys() - decided) & usual.keys():  # what is newer than the installed library is left out
        assert laid[name] == (usual[name] or laid[name]), name


def test_what_is_laid_over_leaves_the_rest_of_the_own_arguments_alone():
    fixed = {"learning_rate": 0.1}
    laid = mapped(fixed=fixed, checkpointing="full").overrides(make_workload(fixed_arguments=fixed))
    assert not {"learning_rate", "seed"} & laid.keys()
    assert laid["gradient_checkpointing"] is laid["activation_checkpointing"] is True
    assert laid["gradient_checkpointing_kwargs"] == laid["activation_checkpointing_kwargs"]


# Several devices: what DDP, FSDP2, DeepSpeed and transformers' tensor parallel are told


def spread(world_size: int = 2, *, hardware=None, knobs: dict[str, Any] | None = None, **parallelism: Any):
    config = make_config(2, parallelism=Parallelism(world_size=world_size, **parallelism), **(knobs or {}))
    return training_plan(config, make_workload(), hardware or make_gpu())


FSDP = {"version": 2, "reshard_after_forward": True, "auto_wrap_policy": "TRANSFORMER_BASED_WRAP"}
DDP = {"ddp_bucket_cap_mb": 100, "ddp_find_unused_parameters": False, "ddp_broadcast_buffers": False}
BY_SIZE = {"auto_wrap_policy": "SIZE_BASED_WRAP", "min_num_params": UNIT_PARAMETERS, "reshard_after_forward": False}


@pytest.mark.parametrize(
    ("parallelism", "told"),
    [
        ({"world_size": 1}, {}),
        ({}, {"gradient_accumulation_steps": 4}),
        ({"world_size": 4, "tensor_parallel": 4}, {"save_only_model": True}),
        (DDP, {**DDP, "gradient_accumulation_steps": 4}),
        ({"sharding": "fsdp_full"}, {"fsdp": True, "fsdp_config": FSDP, "gradient_accumulation_steps": 4}),
        ({"sharding": "fsdp_grad_op", "wrapping": "size"},
         {"fsdp": True, "fsdp_config": {**FSDP, **BY_SIZE}, "gradient_accumulation_steps": 4}),
        ({"world_size": 1, "sharding": "fsdp_full", "offload": "parameters"},
         {"fsdp": True, "fsdp_config": {**FSDP, "cpu_offload": True}, "ddp_backend": "cuda:nccl,cpu:gloo"}),
    ],
)  # fmt: skip
def test_several_devices_are_told_what_one_is_and_how_they_share_it(parallelism, told):
    assert spread(**parallelism).tuned == {**spread(1).tuned, **told}


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_deepspeed_has_the_precision_of_the_trainer(precision):
    tuned = spread(sharding="zero_2", knobs={"precision": precision}).tuned
    for name in ("bf16", "fp16"):
        assert tuned["deepspeed"][name]["enabled"] is tuned[name] is (name == precision)


@pytest.mark.parametrize("hardware", [make_gpu(), make_hardware()], ids=["gpu", "cpu"])
@pytest.mark.parametrize(
    ("offload", "parts"),
    [("none", set()), ("optimizer", {"offload_optimizer"}), ("parameters", {"offload_optimizer", "offload_param"})],
)
def test_zero_offloads_what_it_is_told_to_and_pins_and_overlaps_on_gpus(offload, parts, hardware):
    tuned = spread(sharding="zero_3", offload=offload, hardware=hardware).tuned
    settings = tuned["deepspeed"]["zero_optimization"]
    told = {"device": "cpu", "pin_memory": not hardware.is_cpu}
    assert {name: value for name, value in settings.items() if "offload" in name} == dict.fromkeys(parts, told)
    assert settings["overlap_comm"] is not hardware.is_cpu


def test_tensor_parallel_is_the_models():
    shared = spread(4, tensor_parallel=2, sharding="fsdp_full")
    assert shared.model["distributed_config"] == {"tp_size": 2, "fsdp_size": 2}
    assert spread(2, tensor_parallel=2).model["distributed_config"] == {"tp_size": 2}
    assert "fsdp" not in shared.tuned


def test_no_device_holds_all_of_a_model_that_fsdp_splits():
    def built(to_compare=False, knobs=None, **parallelism):
        config = make_config(parallelism=Parallelism(world_size=2, **parallelism), **(knobs or {}))
        return building_device(config, "cuda:1", to_compare=to_compare)

    assert built(sharding="fsdp_full") == "cpu"
    assert built(sharding="zero_3") == built() == "cuda:1"
    assert built(sharding="zero_3", to_compare=True) == built(to_compare=True) == "cpu"
    assert built(to_compare=True, knobs={"adapter": {}, "quantization": "nf4"}) == "cuda:1"
