"""What several devices are asked for: a `Parallelism` as arguments of `TrainingArguments` and of the model.

Pure; a part of the one mapping in `training_args`. Data parallel goes through what TrainingArguments has for it: DDP's
own arguments, FSDP2 (`fsdp`, `fsdp_config`) or a DeepSpeed configuration (`deepspeed`). Tensor parallel is an argument
of the model, `distributed_config`: transformers shards it by its class's plan. Nothing is said of what one device
alone would be told, nor of what is the library's default.
"""

from __future__ import annotations

from typing import Any

from autotune.values import checkpointing
from autotune.values.config import Parallelism, Precision, TrainConfig

# Elements that ZeRO reduces or gathers at a time. DeepSpeed's own default is 500 million, of which it keeps several
# buffers, 2 GB each in fp32, whatever the model; a tenth is DeepSpeed's default for what ZeRO-3 fetches ahead
# (`zero/config.py`: reduce_bucket_size, allgather_bucket_size, stage3_prefetch_bucket_size).
ZERO_BUCKET_ELEMENTS = 50_000_000

# Parameters that make an FSDP unit where units go by size: those of a layer of a model of a billion (Llama 3.2 1B has
# 61 million, BERT-large 13 million).
UNIT_PARAMETERS = 20_000_000

# FSDP2 and DeepSpeed, by what is split.
ZERO_STAGES = {"zero_1": 1, "zero_2": 2, "zero_3": 3}
FSDP_KINDS = ("fsdp_full", "fsdp_grad_op")

_WRAP_POLICIES = {"layers": "TRANSFORMER_BASED_WRAP", "size": "SIZE_BASED_WRAP"}  # accelerate's FSDP_AUTO_WRAP_POLICY

# torch.distributed keeps collectives of the host for gloo. Gradients that FSDP offloads are clipped there, and with
# NCCL alone there is nobody to add up their norm; accelerate's launcher chooses the same (`PartialState`).
_BOTH_BACKENDS = "cuda:nccl,cpu:gloo"


def parallel_arguments(config: TrainConfig, *, is_cpu: bool, transformers: tuple[int, int]) -> dict[str, Any]:
    """Return the TrainingArguments of how `config` is spread over devices; none for one device.

    Args:
        config: What is trained.
        is_cpu: Whether its ranks are processes on the host's processor.
        transformers: Version of the library.
    """
    spread = config.parallelism
    if spread.tensor_parallel > 1:  # transformers shards the model, and can't resume what it has sharded
        return {"save_only_model": True}
    if spread.sharding in FSDP_KINDS:
        return _fsdp(config, is_cpu=is_cpu, transformers=transformers)
    if spread.sharding in ZERO_STAGES:
        return {"deepspeed": deepspeed_config(config, is_cpu=is_cpu)}
    return _ddp(spread)


def model_arguments(spread: Parallelism) -> dict[str, Any]:
    """Return what the model is given: `distributed_config` of from_pretrained, where matrices are shared."""
    if spread.tensor_parallel == 1:
        return {}
    degrees: dict[str, Any] = {"tp_size": spread.tensor_parallel}
    if spread.data_parallel > 1:
        degrees["fsdp_size"] = spread.data_parallel
        if spread.offload == "parameters":
            degrees["fsdp_cpu_offload"] = True
    return {"distributed_config": degrees}


def building_device(config: TrainConfig, device: str, *, to_compare: bool) -> str:
    """Return where a rank builds its model, which the libraries then put on its `device`.

    FSDP takes weights from the host, unit by unit, so that no device ever holds all of them. Weights that are to be the
    same whatever is split are drawn in one place: the host again. Packed ones are packed on the device.
    """
    spread = config.parallelism
    on_host = spread.sharding in FSDP_KINDS or (to_compare and spread.world_size > 1)
    return "cpu" if on_host and config.quantization is None else device


def _ddp(spread: Parallelism) -> dict[str, Any]:
    arguments: dict[str, Any] = {}
    if spread.ddp_bucket_cap_mb is not None:
        arguments["ddp_bucket_cap_mb"] = spread.ddp_bucket_cap_mb
    if spread.ddp_static_graph:
        # Who takes part is learnt in the first step, so that nobody has to look for the others in each.
        arguments |= {"ddp_static_graph": True, "ddp_find_unused_parameters": False}
    return arguments


def _fsdp(config: TrainConfig, *, is_cpu: bool, transformers: tuple[int, int]) -> dict[str, Any]:
    spread = config.parallelism
    settings: dict[str, Any] = {
        "version": 2,
        "reshard_after_forward": spread.sharding == "fsdp_full",
        "auto_wrap_policy": _WRAP_POLICIES[spread.wrapping],
    }
    if spread.wrapping == "size":
        settings["min_num_params"] = UNIT_PARAMETERS
    arguments: dict[str, Any] = {"fsdp": True, "fsdp_config": settings}
    if spread.offload == "parameters":
        settings["cpu_offload"] = True
        if not is_cpu:
            arguments["ddp_backend"] = _BOTH_BACKENDS
    if config.checkpointing == "full":
        # A layer that checkpoints itself would have its weights gathered once more in the backward pass.
        settings["activation_checkpointing"] = True
        arguments |= checkpointing.arguments("none", transformers)
    return arguments


def deepspeed_config(config: TrainConfig, *, is_cpu: bool) -> dict[str, Any]:
    """Return the DeepSpeed configuration; 'auto' is what the Trainer fills in from its own arguments."""
    stage = ZERO_STAGES[config.parallelism.sharding]
    zero: dict[str, Any] = {
        "stage": stage,
        "reduce_bucket_size": ZERO_BUCKET_ELEMENTS,
        "contiguous_gradients": True,
        "overlap_comm": not is_cpu,  # there are no streams to overlap on a CPU
    }
    if stage == 3:
        # By the width of the model, as the Trainer's guide has it.
        zero |= {"stage3_prefetch_bucket_size": "auto", "stage3_param_persistence_threshold": "auto"}
        zero["stage3_gather_16bit_weights_on_model_save"] = True
    else:
        zero["allgather_bucket_size"] = ZERO_BUCKET_ELEMENTS
    zero |= _offload(config.parallelism, pinned=not is_cpu)
    return {
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",  # without it DeepSpeed, which clips for itself, wouldn't
        "bf16": {"enabled": config.precision is Precision.BF16},
        "fp16": {"enabled": config.precision is Precision.FP16},
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,  # the Trainer's own optimizer steps, which DeepSpeed shards
    }


def _offload(spread: Parallelism, *, pinned: bool) -> dict[str, Any]:
    if spread.offload == "none":
        return {}
    place: dict[str, Any] = {"device": spread.offload_to, "pin_memory": pinned}
    if spread.offload_to == "nvme":
        place["nvme_path"] = spread.nvme_path
    parts = ("offload_optimizer", "offload_param") if spread.offload == "parameters" else ("offload_optimizer",)
    return {part: dict(place) for part in parts}
