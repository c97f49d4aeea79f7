"""The one mapping from a configuration to the arguments of transformers and peft.

Pure. A :class:`TrainingPlan` has two parts: the meaning of the configuration (`tuned`, `model`, `adapter`), which the
export writes, and the arguments of a trial alone (`harness`). Trials train with both, so they measure what is exported.

Over several devices TrainingArguments ask for DDP, FSDP2 (`fsdp`, `fsdp_config`) or DeepSpeed (`deepspeed`), variables
of the environment for sequence parallelism, and the model's argument `distributed_config` for tensor parallelism, by
the plan of its class. Defaults of the libraries are left out.
"""

import importlib
import json
from typing import Any

from pydantic import Field

from autotune.training.adapters import adapter_arguments, quantization_arguments
from autotune.value import Value
from autotune.values.budget import Soaked
from autotune.values.config import KNOBS, OF_DDP, Precision, TrainConfig
from autotune.values.hardware import Hardware
from autotune.values.model import Task
from autotune.values.result import Arguments
from autotune.values.techniques import OPTIMIZERS, checkpointing_arguments
from autotune.values.workload import Recipe, Workload

# Elements that ZeRO reduces or gathers at a time. DeepSpeed's default is 500 million, in several buffers of 2 GB each
# (fp32), whatever the model; a tenth is its default for what ZeRO-3 fetches ahead (`zero/config.py`:
# reduce_bucket_size, allgather_bucket_size, stage3_prefetch_bucket_size).
ZERO_BUCKET_ELEMENTS = 50_000_000

# Parameters of an FSDP unit, where units are made by size: the order of a layer of a model of a billion parameters
# (Llama 3.2 1B has 61 million, BERT-large 13 million).
UNIT_PARAMETERS = 20_000_000
FSDP_BY_SIZE = {"auto_wrap_policy": "SIZE_BASED_WRAP", "min_num_params": UNIT_PARAMETERS}

# Kinds of sharding by DeepSpeed, with ZeRO's stages, and by FSDP2.
ZERO_STAGES = {"zero_1": 1, "zero_2": 2, "zero_3": 3}
FSDP_KINDS = ("fsdp_full", "fsdp_grad_op")


class TrainingPlan(Value):
    """The meaning of a configuration for a workload on a device."""

    tuned: dict[str, Any] = Field(description="TrainingArguments: what the configuration means")
    harness: dict[str, Any] = Field(description="TrainingArguments: what only a trial needs")
    model: dict[str, Any] = Field(description="keyword arguments of from_pretrained or from_config")
    adapter: dict[str, Any] | None = Field(description="arguments of peft's config for its peft_type, or BITFIT")
    quantization: dict[str, Any] | None = Field(description="arguments of BitsAndBytesConfig for the base weights")

    def overrides(self, workload: Workload) -> dict[str, Any]:
        """Return all arguments that a search decides, to lay over a user's own; what it leaves out is default."""
        theirs = {"seed", *workload.fixed_arguments}
        decided = {name: value for name, value in {**_DEFAULTS, **self.tuned}.items() if name not in theirs}
        return decided | _under_old_name(self.tuned)


def training_plan(config: TrainConfig, workload: Workload, hardware: Hardware) -> TrainingPlan:
    """Return what `config` means for `workload` on `hardware`; ValueError: the micro-batch doesn't divide the batch."""
    recipe, harness = workload.recipe, dict(_HARNESS)
    if recipe is not None:
        del harness["remove_unused_columns"]  # TRL's Trainer sees to the columns itself
        if workload.dataset is None:  # a tokenizer of synthetic words has no others
            harness |= {n: None for n in ("eos_token", "pad_token") if n in workload.fixed_arguments}
        if recipe.kind.generates:
            own = workload.fixed_arguments.get("generation_kwargs") or {}
            forced = {**(json.loads(own) if isinstance(own, str) else own), "min_new_tokens": recipe.completion_length}
            # Those completions end by their number of tokens, and not by themselves.
            harness |= {"shuffle_dataset": False, "generation_kwargs": forced, "mask_truncated_completions": False}
    packed = config.quantization and quantization_arguments(config.quantization, config.precision, workload.task)
    return TrainingPlan(
        tuned={"seed": workload.seed, **workload.fixed_arguments, **_tuned(config, workload, hardware)},
        harness=harness,
        model=_model(config, workload),
        adapter=adapter_arguments(config.adapter, workload.task, workload.model.model_type) if config.adapter else None,
        quantization=packed,
    )


def arguments_class(recipe: Recipe | None) -> Any:
    """Return the class of a Trainer's arguments: that of transformers, or of TRL for a recipe."""
    library, name = ("transformers", "TrainingArguments") if recipe is None else ("trl", recipe.kind.config)
    return getattr(importlib.import_module(library), name)


def arguments_of(config: TrainConfig, workload: Workload, hardware: Hardware, soaked: Soaked | None) -> Arguments:
    """Return the arguments of an answer: what its configuration means, and what a soak adds."""
    mapping = training_plan(config, workload, hardware)
    tuned = {**mapping.tuned, **(soaked.arguments if soaked is not None else {})}
    return Arguments(training_arguments=tuned, **mapping.model_dump(include={"model", "quantization", "adapter"}))


def _tuned(config: TrainConfig, workload: Workload, hardware: Hardware) -> dict[str, Any]:
    own = workload.own_code.arguments if workload.own_code is not None else {}
    as_own = own.get("dataloader_num_workers") == config.dataloader_num_workers  # which may end with each pass
    persist = not (as_own and own.get("dataloader_persistent_workers") is False)
    arguments: dict[str, Any] = {
        "per_device_train_batch_size": config.per_device_train_batch_size,
        "gradient_accumulation_steps": workload.accumulation_steps(config),
    }
    for name, knob in _ONE_TO_ONE.items():
        if knob.argument == "always" or getattr(config, name) != knob.field.default:
            arguments[name] = getattr(config, name)
    arguments |= {
        "bf16": config.mixed_precision == "bf16",
        "fp16": config.mixed_precision == "fp16",
        "dataloader_persistent_workers": config.dataloader_num_workers > 0 and persist,
        **checkpointing_arguments(config.checkpointing, transformers_version(hardware)),
    }
    if OPTIMIZERS[config.optim].targets and "optim_target_modules" not in workload.fixed_arguments:
        arguments["optim_target_modules"] = "all-linear"
    if config.tf32:  # said only where it is wanted: False would take from convolutions what torch gives by default
        arguments["tf32"] = True
    elif hardware.has_tf32 and config.mixed_precision == "bf16" and compiler_refuses_tf32(config):
        arguments["tf32"] = False  # or TrainingArguments would switch it on
    if not config.dataloader_num_workers:
        arguments.pop("dataloader_prefetch_factor", None)
    if config.non_blocking:
        settings = workload.fixed_arguments.get("accelerator_config") or {}
        arguments["accelerator_config"] = {**settings, "non_blocking": True}
    if hardware.is_cpu:
        arguments["use_cpu"] = True
    if config.torch_compile_backend is not None:
        arguments["torch_compile"] = True
    else:
        arguments.pop("torch_compile_mode", None)
    if (recipe := workload.recipe) is not None:
        arguments |= _of_trl(recipe, config, workload) | _under_old_name(arguments)
    spread = config.parallelism
    if spread.tensor_parallel > 1:  # transformers shards the model, and can't resume what it has sharded
        return arguments | {"save_only_model": True}
    if spread.sharding in FSDP_KINDS:
        return arguments | _fsdp(config, hardware)
    if spread.sharding in ZERO_STAGES:
        return arguments | {"deepspeed": _deepspeed(config, hardware)}
    return arguments | spread.model_dump(include={*OF_DDP}, exclude_none=True)


def _of_trl(recipe: Recipe, config: TrainConfig, workload: Workload) -> dict[str, Any]:
    arguments = {"max_length": workload.fixed_arguments.get("max_length", workload.sequence_length)}
    if recipe.kind.generates:
        arguments = {"num_generations": recipe.generations, "max_completion_length": recipe.completion_length}
    arguments |= config.model_dump(include=set(OF_TRL), exclude_defaults=True)
    if recipe.kind.coupled is not None:  # KTO takes no other order
        arguments["train_sampling_strategy"] = "sequential"
    return arguments


def _fsdp(config: TrainConfig, hardware: Hardware) -> dict[str, Any]:
    spread = config.parallelism
    settings: dict[str, Any] = {"version": 2, "reshard_after_forward": spread.sharding == "fsdp_full"}
    settings |= FSDP_BY_SIZE if spread.wrapping == "size" else {"auto_wrap_policy": "TRANSFORMER_BASED_WRAP"}
    arguments: dict[str, Any] = {"fsdp": True, "fsdp_config": settings}
    if spread.offload == "parameters":
        settings["cpu_offload"] = True
        if not hardware.is_cpu:
            # torch.distributed needs gloo for collectives on the host, where the norm of gradients that FSDP offloads
            # is added up for clipping; accelerate's launcher chooses the same (`PartialState`).
            arguments["ddp_backend"] = "cuda:nccl,cpu:gloo"
    if config.checkpointing == "full":
        # If the layer checkpointed itself, its weights would be gathered once more in the backward pass.
        settings["activation_checkpointing"] = True
        arguments |= checkpointing_arguments("none", transformers_version(hardware))
    return arguments


def _deepspeed(config: TrainConfig, hardware: Hardware) -> dict[str, Any]:
    """Return the DeepSpeed configuration, in which the Trainer replaces 'auto' by its own arguments."""
    spread, is_cpu = config.parallelism, hardware.is_cpu
    zero: dict[str, Any] = {
        "stage": ZERO_STAGES[spread.sharding],
        "reduce_bucket_size": ZERO_BUCKET_ELEMENTS,
        "contiguous_gradients": True,
        "overlap_comm": not is_cpu,  # there are no streams to overlap on a CPU
    }
    if zero["stage"] == 3:  # the Trainer derives figures from the width of the model
        zero |= {"stage3_prefetch_bucket_size": "auto", "stage3_param_persistence_threshold": "auto"}
        zero["stage3_gather_16bit_weights_on_model_save"] = True
    else:
        zero["allgather_bucket_size"] = ZERO_BUCKET_ELEMENTS
    if spread.offload != "none":
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": not is_cpu}
    if spread.offload == "parameters":
        zero["offload_param"] = {"device": "cpu", "pin_memory": not is_cpu}
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


def _model(config: TrainConfig, workload: Workload) -> dict[str, Any]:
    # Since transformers 5 from_pretrained takes the checkpoint's own dtype: master weights in fp32 must be asked for.
    arguments: dict[str, Any] = {"dtype": "bfloat16" if config.precision is Precision.PURE_BF16 else "float32"}
    arguments |= config.model_dump(include={"attn_implementation", "experts_implementation"}, exclude_none=True)
    if workload.task is Task.CAUSAL_LM and workload.model.kind == "encoder":
        arguments["is_decoder"] = True
    if (spread := config.parallelism).tensor_parallel > 1:
        degrees: dict[str, Any] = {"tp_size": spread.tensor_parallel}
        if spread.data_parallel > 1:
            degrees["fsdp_size"] = spread.data_parallel
            if spread.offload == "parameters":
                degrees["fsdp_cpu_offload"] = True
        arguments["distributed_config"] = degrees
    return arguments | routing_fields(config.experts_per_token, config.expert_capacity)


def routing_fields(experts_per_token: int | None, expert_capacity: int | None) -> dict[str, Any]:
    """Return the fields of a model's config that say where tokens go, as far as they are to be changed."""
    fields = {"num_experts_per_tok": experts_per_token, "expert_capacity": expert_capacity}
    return {name: value for name, value in fields.items() if value is not None}


def parallel_variables(config: TrainConfig) -> dict[str, str]:
    """Return the variables of accelerate's `ParallelismConfig`, for tokens that ranks share and FSDP's replicas."""
    spread, further = config.parallelism, {}
    if spread.replicas > 1:
        degrees = {"DP_REPLICATE": spread.replicas, "DP_SHARD": spread.sharding_ranks}
    elif spread.sequence_parallel == 1:
        return {}
    elif spread.sharding in FSDP_KINDS:
        degrees = {"CP": spread.sequence_parallel, "DP_SHARD": spread.data_parallel}
    else:
        degrees = {"SP": spread.sequence_parallel, "DP_REPLICATE": spread.data_parallel}
        further = {"PARALLELISM_CONFIG_SP_ATTN_IMPLEMENTATION": str(config.attn_implementation)}
    sizes = {f"PARALLELISM_CONFIG_{name}_SIZE": str(degree) for name, degree in degrees.items()}
    return {"ACCELERATE_USE_PARALLELISM_CONFIG": "true", **sizes, **further}


def loading_bytes(config: TrainConfig, parameters: int) -> int:
    """Return the bytes of the host's memory that the weights take with which a rank of FSDP begins; 0 without it."""
    if building_device(config, "cuda", to_compare=False) != "cpu":
        return 0
    return parameters * (2 if config.precision is Precision.PURE_BF16 else 4)


def building_device(config: TrainConfig, device: str, *, to_compare: bool) -> str:
    """Return the device on which a rank builds its model, which the libraries then put on `device`.

    FSDP takes weights from the host, unit by unit, so that no device ever holds all of them. Weights that have to be
    equal however they are split (`to_compare`) are drawn on the host too. Quantized ones are packed on the device.
    """
    spread = config.parallelism
    on_host = spread.sharding in FSDP_KINDS or (to_compare and spread.world_size > 1)
    return "cpu" if on_host and config.quantization is None else device


def effective_tf32(config: TrainConfig, hardware: Hardware) -> bool:
    """Return whether the Trainer's products in fp32 run as TF32: torch begins with it, or the user or a compiler asks.

    With `torch_compile`, TrainingArguments switch it on unless fp16 is set (`training_args.py`, "9. TF32"), and
    accelerate does where there is no autocast, whatever `tf32` says (`state.py`).
    """
    if not hardware.has_tf32:
        return False
    if config.tf32 or hardware.starts_with_tf32:
        return True
    if config.torch_compile_backend is None or config.precision is Precision.FP16:
        return False
    return not compiler_refuses_tf32(config)


def compiler_refuses_tf32(config: TrainConfig) -> bool:
    """Return whether TF32 that TrainingArguments switch on makes inductor's max-autotune raise.

    It asks `torch.get_float32_matmul_precision`, which raises if only the newer `fp32_precision` was set, as
    transformers does; accelerate sets the older one too where there is no autocast.
    """
    return (config.torch_compile_mode or "").startswith("max-autotune") and config.mixed_precision != "no"


def transformers_version(hardware: Hardware) -> tuple[int, int]:
    """Return major and minor of the installed transformers, the oldest that is supported if it isn't known."""
    major, minor = hardware.versions.get("transformers", "5.17").split(".")[:2]
    return int(major), int(minor)


def _under_old_name(arguments: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of checkpointing by their older names, which newer versions keep."""
    names = {f"activation_checkpointing{part}": f"gradient_checkpointing{part}" for part in ("", "_kwargs")}
    return {old: arguments[new] for new, old in names.items() if new in arguments}


# Nothing is saved, pushed, evaluated, reported or drawn during a trial, whose data hold the model's columns alone.
_HARNESS: dict[str, Any] = {
    "save_strategy": "no",
    "push_to_hub": False,
    "eval_strategy": "no",
    "eval_on_start": False,
    "logging_strategy": "no",
    "report_to": "none",
    "disable_tqdm": True,
    "remove_unused_columns": False,
    "dataloader_drop_last": True,
}

_ONE_TO_ONE = {name: known for name, known in KNOBS.items() if known.argument is not None}

# Defaults of TrainingArguments (a test compares them) that a configuration needn't name.
_DEFAULTS: dict[str, Any] = {
    "tf32": None,
    "use_cpu": False,
    "gradient_checkpointing": False,
    "gradient_checkpointing_kwargs": None,
    "activation_checkpointing": False,
    "activation_checkpointing_kwargs": None,
    "torch_compile": False,
    **dict.fromkeys(("fsdp", "fsdp_config", "deepspeed")),
    **{name: knob.field.default for name, knob in _ONE_TO_ONE.items() if knob.argument == "unless default"},
}

# TrainingArguments that the search decides. A baseline's values for these become its TrainConfig.
SEARCHED_ARGUMENTS = frozenset(
    {*_ONE_TO_ONE, *_DEFAULTS, *OF_DDP, "gradient_accumulation_steps", "bf16", "fp16", "dataloader_persistent_workers"}
)

# Arguments of TRL that are knobs.
OF_TRL = frozenset({"generation_batch_size", "pad_to_multiple_of", "precompute_ref_log_probs"})

# Arguments of trials of the user's own code alone: it decides which columns are removed; nothing is evaluated or saved.
OWN_HARNESS: dict[str, Any] = {
    **{n: value for n, value in _HARNESS.items() if n not in ("remove_unused_columns", "dataloader_drop_last")},
    "load_best_model_at_end": False,
    "auto_find_batch_size": False,
    "resume_from_checkpoint": None,
}
