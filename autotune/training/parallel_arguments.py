"""A `Parallelism` as arguments of `TrainingArguments` and of the model: the part of `arguments` for several devices.

Data parallelism uses what TrainingArguments has for it: DDP's arguments, FSDP2 (`fsdp`, `fsdp_config`) or a DeepSpeed
configuration (`deepspeed`). Sequence parallelism is asked for in the environment. Tensor parallelism is an argument of
the model, `distributed_config`, by which transformers shards it according to its class's plan. Defaults of the
libraries are left out.
"""

from __future__ import annotations

from typing import Any

from autotune.values.config import Parallelism, Precision, TrainConfig
from autotune.values.techniques import checkpointing_arguments

# Elements that ZeRO reduces or gathers at a time. DeepSpeed's default is 500 million, in several buffers of 2 GB each
# (fp32), whatever the model; a tenth is its default for what ZeRO-3 fetches ahead (`zero/config.py`:
# reduce_bucket_size, allgather_bucket_size, stage3_prefetch_bucket_size).
ZERO_BUCKET_ELEMENTS = 50_000_000

# Parameters of an FSDP unit, where units are made by size: the order of a layer of a model of a billion parameters
# (Llama 3.2 1B has 61 million, BERT-large 13 million).
UNIT_PARAMETERS = 20_000_000

# Kinds of sharding by DeepSpeed, with ZeRO's stages, and by FSDP2.
ZERO_STAGES = {"zero_1": 1, "zero_2": 2, "zero_3": 3}
FSDP_KINDS = ("fsdp_full", "fsdp_grad_op")

# The transformers whose `DistributedConfig` has these degrees; it grew them over several versions.
TENSOR_PARALLEL_SINCE = (5, 23)

_WRAP_POLICIES = {"layers": "TRANSFORMER_BASED_WRAP", "size": "SIZE_BASED_WRAP"}  # accelerate's FSDP_AUTO_WRAP_POLICY

# torch.distributed needs gloo for collectives on the host, where the norm of gradients that FSDP offloads is added up
# for clipping; accelerate's launcher chooses the same (`PartialState`).
_BOTH_BACKENDS = "cuda:nccl,cpu:gloo"


def parallel_arguments(config: TrainConfig, *, is_cpu: bool, transformers: tuple[int, int]) -> dict[str, Any]:
    """Return the TrainingArguments that spread `config` over devices; none for one device.

    Args:
        config: What is trained.
        is_cpu: Whether ranks are processes on the host's processor.
        transformers: Major and minor version of the library.
    """
    spread = config.parallelism
    if spread.tensor_parallel > 1:  # transformers shards the model, and can't resume what it has sharded
        return {"save_only_model": True}
    if spread.sharding in FSDP_KINDS:
        return _fsdp(config, is_cpu=is_cpu, transformers=transformers)
    if spread.sharding in ZERO_STAGES:
        return {"deepspeed": deepspeed_config(config, is_cpu=is_cpu)}
    return _ddp(spread)


def parallel_variables(config: TrainConfig) -> dict[str, str]:
    """Return the environment variables by which accelerate shares a sample's tokens among ranks; none if it doesn't.

    Its `ParallelismConfig` reads them; as an argument of TrainingArguments it could be written to no file.
    """
    spread = config.parallelism
    if spread.sequence_parallel == 1:
        return {}
    return {
        "ACCELERATE_USE_PARALLELISM_CONFIG": "true",
        "PARALLELISM_CONFIG_SP_SIZE": str(spread.sequence_parallel),
        "PARALLELISM_CONFIG_DP_REPLICATE_SIZE": str(spread.data_parallel),
        "PARALLELISM_CONFIG_SP_ATTN_IMPLEMENTATION": str(config.attn_implementation),
    }


def model_arguments(spread: Parallelism) -> dict[str, Any]:
    """Return the arguments of from_pretrained: `distributed_config` for tensor parallelism."""
    if spread.tensor_parallel == 1:
        return {}
    degrees: dict[str, Any] = {"tp_size": spread.tensor_parallel}
    if spread.data_parallel > 1:
        degrees["fsdp_size"] = spread.data_parallel
        if spread.offload == "parameters":
            degrees["fsdp_cpu_offload"] = True
    return {"distributed_config": degrees}


def building_device(config: TrainConfig, device: str, *, to_compare: bool) -> str:
    """Return the device on which a rank builds its model, which the libraries then put on `device`.

    FSDP takes weights from the host, unit by unit, so that no device ever holds all of them. Weights that have to be
    equal however they are split (`to_compare`) are drawn on the host too. Quantized ones are packed on the device.
    """
    spread = config.parallelism
    on_host = spread.sharding in FSDP_KINDS or (to_compare and spread.world_size > 1)
    return "cpu" if on_host and config.quantization is None else device


def _ddp(spread: Parallelism) -> dict[str, Any]:
    arguments: dict[str, Any] = {}
    if spread.ddp_bucket_cap_mb is not None:
        arguments["ddp_bucket_cap_mb"] = spread.ddp_bucket_cap_mb
    if spread.ddp_static_graph:
        # Which parameters take part is learnt in the first step, so they needn't be searched in each.
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
        # If the layer checkpointed itself, its weights would be gathered once more in the backward pass.
        settings["activation_checkpointing"] = True
        arguments |= checkpointing_arguments("none", transformers)
    return arguments


def deepspeed_config(config: TrainConfig, *, is_cpu: bool) -> dict[str, Any]:
    """Return the DeepSpeed configuration, in which the Trainer replaces 'auto' by its own arguments."""
    stage = ZERO_STAGES[config.parallelism.sharding]
    zero: dict[str, Any] = {
        "stage": stage,
        "reduce_bucket_size": ZERO_BUCKET_ELEMENTS,
        "contiguous_gradients": True,
        "overlap_comm": not is_cpu,  # there are no streams to overlap on a CPU
    }
    if stage == 3:
        # Figures that the Trainer derives from the width of the model.
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
    place: dict[str, Any] = {"device": "cpu", "pin_memory": pinned}
    parts = ("offload_optimizer", "offload_param") if spread.offload == "parameters" else ("offload_optimizer",)
    return {part: dict(place) for part in parts}
