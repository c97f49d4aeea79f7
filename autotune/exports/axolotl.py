"""axolotl's YAML. Its names and defaults are those of `axolotl.utils.schemas` (0.19), where a test has it read.

What differs from a plain Trainer unless it is said: bf16 by itself, a cosine schedule, reentrant checkpointing, fused
kernels for LoRA.
"""

from __future__ import annotations

from typing import Any

from autotune.exports import launch_files
from autotune.exports.dialect import (
    lost_knobs,
    own_settings,
    require_causal_lm,
    require_lora,
    sharding_files,
    spread_lost,
    trainer_arguments,
    weights_lost,
)
from autotune.exports.draft import Draft
from autotune.exports.winner import Winner, lost_arguments
from autotune.exports.yaml_text import yaml_text
from autotune.training.arguments import effective_tf32, routing
from autotune.values.config import Precision, TrainConfig

FILE = "axolotl.yaml"

_NAMES = {
    "learning_rate": "learning_rate",
    "lr_scheduler_type": "lr_scheduler",
    "weight_decay": "weight_decay",
    "adam_beta1": "adam_beta1",
    "adam_beta2": "adam_beta2",
    "adam_epsilon": "adam_epsilon",
    "max_grad_norm": "max_grad_norm",
    "seed": "seed",
    "dataloader_num_workers": "dataloader_num_workers",
    "dataloader_pin_memory": "dataloader_pin_memory",
    "dataloader_prefetch_factor": "dataloader_prefetch_factor",
}

# Of the user's own arguments, what it has by a name of its own, and what by the same.
_OWN_NAMES = {
    "num_train_epochs": "num_epochs",
    "per_device_eval_batch_size": "eval_batch_size",
    **{name: name for name in (
        "max_steps", "logging_steps", "save_strategy", "save_steps", "save_total_limit", "save_only_model",
        "neftune_noise_alpha", "torch_empty_cache_steps", "lr_scheduler_kwargs", "optim_args", "optim_target_modules",
        "remove_unused_columns", "dataloader_drop_last", "accelerator_config", "metric_for_best_model",
        "ddp_timeout", "ddp_broadcast_buffers", "resume_from_checkpoint", "hub_model_id", "hub_strategy",
        "hub_revision",
    )},
}  # fmt: skip

# Where it reports to, by the words of `report_to`.
_REPORTERS = {
    name: f"use_{name.removesuffix('_ml')}" for name in ("wandb", "mlflow", "tensorboard", "comet_ml", "trackio")
}


def axolotl(winner: Winner) -> Draft:
    """Return axolotl's file.

    Raises:
        InputError: It can't train this task, or this adapter.
    """
    require_causal_lm(winner, "axolotl")
    require_lora(winner, "axolotl")
    lost = _lost(winner)
    document = {**_model(winner), **_data(winner), **_training(winner), **_devices(winner)}
    command = _command(winner)
    about = "`datasets` is yours to name; the rest is as it was measured."
    text = yaml_text(winner, f"axolotl: {command}", document, lost, about=about)
    return Draft({FILE: text, **sharding_files(winner)}, (command,), tuple(lost))


def _command(winner: Winner) -> str:
    if not launch_files.needs_launcher(winner.config):
        return f"axolotl train {FILE}"
    return f"axolotl train {FILE} --launcher torchrun -- --nproc_per_node {winner.config.parallelism.world_size}"


def _lost(winner: Winner) -> list[str]:
    config = winner.config
    packs = config.packing and config.attn_implementation not in _PACKING_KERNELS
    return [
        *weights_lost(winner, "axolotl"),
        *lost_knobs(config, but=frozenset({"offload", "experts", "experts_per_token", "expert_capacity"})),
        *([f"packing of a micro-batch: it wants {' or '.join(_PACKING_KERNELS)}"] if packs else []),
        *spread_lost(winner),
        *(["ddp_static_graph"] if config.parallelism.ddp_static_graph else []),
        *lost_arguments(winner, {"seed", *_own_names(winner), *_said_otherwise(winner)}),
    ]


def _own_names(winner: Winner) -> dict[str, str]:
    """Return its names of those of the user's own arguments that it takes with the value that they have."""
    own = winner.own_arguments
    known = {name: _OWN_NAMES[name] for name in own if name in _OWN_NAMES}
    refused = {
        "max_steps": own.get("max_steps") == -1,  # no limit: the epochs count
        "logging_steps": not isinstance(own.get("logging_steps"), int),
        "save_steps": own.get("save_strategy", "steps") != "steps",
        **dict.fromkeys(("hub_model_id", "hub_strategy", "hub_revision"), not own.get("push_to_hub")),
    }
    return {name: its for name, its in known.items() if not refused.get(name)}


def _said_otherwise(winner: Winner) -> list[str]:
    """Return the names of the user's own arguments that it says in another way than by a value."""
    own = winner.own_arguments
    said = {
        "report_to": bool(_reporters(winner)),
        "push_to_hub": bool(own.get("push_to_hub") and own.get("hub_model_id")),
        "ddp_find_unused_parameters": "ddp_find_unused_parameters" in _devices(winner),
    }
    return [name for name, is_said in said.items() if is_said]


def _reporters(winner: Winner) -> dict[str, bool]:
    """Return where it reports to; nothing if there is one that it doesn't know."""
    given = winner.own_arguments.get("report_to", [])
    names = list(map(str, given if isinstance(given, list) else [given]))
    return {_REPORTERS[name]: True for name in names} if all(name in _REPORTERS for name in names) else {}


# Kernels with which axolotl flattens a micro-batch (`ATTN_IMPLS_SUPPORTING_PACKING`), of those that are tried here.
_PACKING_KERNELS = ("flash_attention_2", "flash_attention_3")


def _model(winner: Winner) -> dict[str, Any]:
    config, spec = winner.config, winner.workload.model
    found: dict[str, Any] = {"base_model": winner.reference, "strict": False}
    if spec.revision is not None and spec.source != "directory":
        found["revision_of_model"] = spec.revision
    if spec.trust_remote_code:
        found["trust_remote_code"] = True
    if config.attn_implementation is not None:
        found["attn_implementation"] = config.attn_implementation
    if config.experts_implementation is not None:
        found["experts_implementation"] = config.experts_implementation
    routed = routing(config.experts_per_token, config.expert_capacity)
    if routed:
        found["overrides_of_model_config"] = routed
    return {**found, **(_LIGER if config.use_liger_kernel else {}), **_adapter(winner)}


# What transformers' own `apply_liger_kernel` does where it isn't told.
_LIGER: dict[str, Any] = {
    "plugins": ["axolotl.integrations.liger.LigerPlugin"],
    "liger_rope": True,
    "liger_rms_norm": True,
    "liger_glu_activation": True,
    "liger_fused_linear_cross_entropy": True,
}

# Fused kernels that axolotl switches on for LoRA unless it is told.
_LORA_KERNELS = ("lora_mlp_kernel", "lora_qkv_kernel", "lora_o_kernel", "lora_embedding_kernel")


def _adapter(winner: Winner) -> dict[str, Any]:
    adapter, packed = winner.peft_arguments, winner.result.arguments.quantization or {}
    if adapter is None:
        return {}
    four = bool(packed.get("load_in_4bit"))
    found: dict[str, Any] = {
        "adapter": "qlora" if four else "lora",
        "load_in_8bit": bool(packed.get("load_in_8bit")),
        "load_in_4bit": four,
        "lora_r": adapter["r"],
        "lora_alpha": adapter["lora_alpha"],
        "lora_dropout": adapter["lora_dropout"],
    }
    if four:
        found["bnb_config_kwargs"] = {key: value for key, value in packed.items() if key.startswith("bnb_")}
    if adapter["target_modules"] == "all-linear":
        found["lora_target_linear"] = True
    else:
        found["lora_target_modules"] = adapter["target_modules"]
    if "target_parameters" in adapter:
        found["lora_target_parameters"] = adapter["target_parameters"]
    if adapter.get("use_rslora"):
        found["peft_use_rslora"] = True
    if adapter.get("use_dora"):
        found["peft_use_dora"] = True
    return {**found, **dict.fromkeys(_LORA_KERNELS, False)}


def _data(winner: Winner) -> dict[str, Any]:
    return {
        "datasets": [{"path": winner.workload.dataset or "YOUR-DATA.jsonl", "ds_type": "json", "type": "completion"}],
        "val_set_size": 0.0,
        "sequence_len": winner.workload.sequence_length,
        "sample_packing": False,
        "pad_to_sequence_len": False,
    }


def _training(winner: Winner) -> dict[str, Any]:
    config = winner.config
    return {
        "output_dir": "out",
        "num_epochs": 1,
        **own_settings(winner, _own_names(winner)),
        **_reporters(winner),
        "micro_batch_size": config.per_device_train_batch_size,
        "gradient_accumulation_steps": winner.accumulation,
        "optimizer": config.optim,
        **trainer_arguments(winner, _NAMES),
        **_warmup(winner),
        **_precision(config),
        "tf32": effective_tf32(config, winner.result.hardware),
        **_checkpointing(config),
        "group_by_length": config.train_sampling_strategy == "group_by_length",
        "curriculum_sampling": config.train_sampling_strategy == "sequential",
        "batch_flattening": config.packing and config.attn_implementation in _PACKING_KERNELS,
        **_projected(winner),
        **_compile(config),
    }


def _devices(winner: Winner) -> dict[str, Any]:
    """Return how the training is sharded: by DeepSpeed's own file, or as accelerate knows FSDP2."""
    if "deepspeed" in winner.arguments:
        return {"deepspeed": launch_files.FILE_NAMES[launch_files.DEEPSPEED]}
    settings = winner.arguments.get("fsdp_config")
    if settings is None:
        ddp = ("ddp_bucket_cap_mb", "ddp_find_unused_parameters")
        return {name: winner.arguments[name] for name in ddp if name in winner.arguments}
    own = {name: value for name, value in settings.items() if name not in ("version", "cpu_offload")}
    if settings.get("cpu_offload"):
        own["offload_params"] = True
    return {"fsdp_version": settings["version"], "fsdp_config": own}


def _warmup(winner: Winner) -> dict[str, Any]:
    """Return the warm-up: so many steps, or their share of all."""
    warmup = winner.hyperparameter("warmup_steps")
    return {"warmup_ratio": warmup} if 0 < warmup < 1 else {"warmup_steps": int(warmup)}


def _projected(winner: Winner) -> dict[str, Any]:
    """Return the layers whose gradients the optimizer projects, where the search has chosen them."""
    chosen = "optim_target_modules" in winner.arguments and "optim_target_modules" not in winner.own_arguments
    return {"optim_target_modules": "all_linear"} if chosen else {}


def _precision(config: TrainConfig) -> dict[str, Any]:
    mixed = {"bf16": config.precision is Precision.BF16, "fp16": config.precision is Precision.FP16}
    pure = {"bfloat16": True} if config.precision is Precision.PURE_BF16 else {}
    return {**mixed, **pure}


def _checkpointing(config: TrainConfig) -> dict[str, Any]:
    if config.checkpointing == "none":
        return {"gradient_checkpointing": False}
    reentrant = config.checkpointing == "reentrant"
    offload = {"activation_offloading": "hidden_states"} if config.checkpointing == "offload" else {}
    return {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": reentrant}, **offload}


def _compile(config: TrainConfig) -> dict[str, Any]:
    if config.torch_compile_backend is None:
        return {"torch_compile": False}
    found: dict[str, Any] = {"torch_compile": True, "torch_compile_backend": config.torch_compile_backend}
    if config.torch_compile_mode is not None:
        found["torch_compile_mode"] = config.torch_compile_mode
    return found
