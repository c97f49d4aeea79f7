"""axolotl's YAML, with the names and defaults of `axolotl.utils.schemas` (0.19), which a test reads it with.

Its defaults differ from a plain Trainer: bf16, a cosine schedule, reentrant checkpointing, fused kernels
for LoRA.
"""

from __future__ import annotations

from typing import Any

from autotune.exports import dialect
from autotune.exports.launch_files import needs_launcher, variables
from autotune.exports.winner import Draft, Winner, lost_arguments
from autotune.training.arguments import effective_tf32, routing
from autotune.values.config import Precision

FILE = "axolotl.yaml"

# Requires-Dist in the metadata of its package on PyPI.
_REQUIRES = (
    "axolotl 0.19.0 requires transformers 5.16.1, torch 2.11.0 to 2.13.0, accelerate 1.13.0 and peft 0.20.0 "
    "(its package on PyPI, 2026-11-22)"
)

# TrainingArguments -> axolotl's names: the hyperparameters and data loading, which every file has ...
_NAMES = {
    name: name for name in (
        "learning_rate", "lr_scheduler_type", "weight_decay", "adam_beta1", "adam_beta2", "adam_epsilon",
        "max_grad_norm", "seed", "dataloader_num_workers", "dataloader_pin_memory", "dataloader_prefetch_factor",
    )
} | {"lr_scheduler_type": "lr_scheduler"}  # fmt: skip

# ... and those that it has if the user sets them.
_USER_NAMES = {
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

# Values of `report_to` that axolotl has a switch for.
_REPORTERS = {
    name: f"use_{name.removesuffix('_ml')}" for name in ("wandb", "mlflow", "tensorboard", "comet_ml", "trackio")
}

# Kernels with which axolotl flattens a micro-batch (`ATTN_IMPLS_SUPPORTING_PACKING`), of those that are searched.
_PACKING_KERNELS = ("flash_attention_2", "flash_attention_3")

# What transformers' `apply_liger_kernel` does by default.
_LIGER: dict[str, Any] = {
    "plugins": ["axolotl.integrations.liger.LigerPlugin"],
    "liger_rope": True,
    "liger_rms_norm": True,
    "liger_glu_activation": True,
    "liger_fused_linear_cross_entropy": True,
}

# Fused kernels that axolotl switches on for LoRA by default.
_LORA_KERNELS = ("lora_mlp_kernel", "lora_qkv_kernel", "lora_o_kernel", "lora_embedding_kernel")


def axolotl(winner: Winner) -> Draft:
    """Return axolotl's file.

    Raises:
        InputError: It can't train this task, or this adapter.
    """
    dialect.require_lora_of_causal_lm(winner, "axolotl")
    command = f"{variables(winner.config)}axolotl train {FILE}"
    if needs_launcher(winner.config):
        command += f" --launcher torchrun -- --nproc_per_node {winner.config.parallelism.world_size}"
    document = {**_model(winner), **_data(winner), **_training(winner), **_devices(winner)}
    return dialect.yaml_draft(
        winner,
        "axolotl",
        FILE,
        command=command,
        document=document,
        lost=_lost(winner),
        yours="`datasets` is",
        requires=_REQUIRES,
    )


def _lost(winner: Winner) -> list[str]:
    config, given = winner.config, winner.user_arguments
    packs = config.packing and config.attn_implementation not in _PACKING_KERNELS
    otherwise = {
        "report_to": bool(_reporters(winner)),
        "push_to_hub": bool(given.get("push_to_hub") and given.get("hub_model_id")),
        "ddp_find_unused_parameters": "ddp_find_unused_parameters" in _devices(winner),
    }
    said = {"seed", *_user_settings(winner), *(name for name, is_said in otherwise.items() if is_said)}
    return [
        *dialect.lost_weights(winner, "axolotl"),
        *dialect.lost_spacing(winner),
        *([f"packing of a micro-batch: it wants {' or '.join(_PACKING_KERNELS)}"] if packs else []),
        *dialect.lost_sharing(winner),
        *(["ddp_static_graph"] if config.parallelism.ddp_static_graph else []),
        *lost_arguments(winner, said),
    ]


def _user_settings(winner: Winner) -> dict[str, Any]:
    """Return those of the plain arguments, by their own names, that axolotl takes with the values they have."""
    given = winner.plain_arguments
    refused = {
        "max_steps": given.get("max_steps") == -1,  # no limit: the epochs count
        "logging_steps": not isinstance(given.get("logging_steps"), int),
        "save_steps": given.get("save_strategy", "steps") != "steps",
        **dict.fromkeys(("hub_model_id", "hub_strategy", "hub_revision"), not given.get("push_to_hub")),
    }
    return {name: value for name, value in given.items() if name in _USER_NAMES and not refused.get(name)}


def _reporters(winner: Winner) -> dict[str, bool]:
    """Return the switches of `report_to`; none if it names something that axolotl doesn't know."""
    given = winner.user_arguments.get("report_to", [])
    names = list(map(str, given if isinstance(given, list) else [given]))
    return {_REPORTERS[name]: True for name in names} if all(name in _REPORTERS for name in names) else {}


def _model(winner: Winner) -> dict[str, Any]:
    config = winner.config
    found = {
        "base_model": winner.reference,
        "strict": False,
        "revision_of_model": winner.revision,
        "trust_remote_code": winner.workload.model.trust_remote_code or None,
        "attn_implementation": config.attn_implementation,
        "experts_implementation": config.experts_implementation,
        "overrides_of_model_config": routing(config.experts_per_token, config.expert_capacity) or None,
    }
    return {**dialect.given(found), **(_LIGER if config.use_liger_kernel else {}), **_adapter(winner)}


def _adapter(winner: Winner) -> dict[str, Any]:
    adapter, packed = winner.peft_arguments, winner.result.arguments.quantization or {}
    if adapter is None:
        return {}
    four, targets = bool(packed.get("load_in_4bit")), adapter["target_modules"]
    found = {
        "adapter": "qlora" if four else "lora",
        "load_in_8bit": bool(packed.get("load_in_8bit")),
        "load_in_4bit": four,
        "lora_r": adapter["r"],
        "lora_alpha": adapter["lora_alpha"],
        "lora_dropout": adapter["lora_dropout"],
        "bnb_config_kwargs": {k: value for k, value in packed.items() if k.startswith("bnb_")} if four else None,
        "lora_target_linear": targets == "all-linear" or None,
        "lora_target_modules": targets if targets != "all-linear" else None,
        "lora_target_parameters": adapter.get("target_parameters"),
        "peft_use_rslora": adapter.get("use_rslora") or None,
        "peft_use_dora": adapter.get("use_dora") or None,
    }
    return {**dialect.given(found), **dict.fromkeys(_LORA_KERNELS, False)}


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
    warmup = winner.hyperparameter("warmup_steps")
    found = {
        "output_dir": "out",
        "num_epochs": 1,
        **{_USER_NAMES[name]: value for name, value in _user_settings(winner).items()},
        **_reporters(winner),
        "micro_batch_size": config.per_device_train_batch_size,
        "gradient_accumulation_steps": winner.accumulation,
        "optimizer": config.optim,
        **dialect.trainer_arguments(winner, _NAMES),
        **({"warmup_ratio": warmup} if 0 < warmup < 1 else {"warmup_steps": int(warmup)}),
        "bf16": config.precision is Precision.BF16,
        "fp16": config.precision is Precision.FP16,
        **({"bfloat16": True} if config.precision is Precision.PURE_BF16 else {}),
        "tf32": effective_tf32(config, winner.result.hardware),
        "gradient_checkpointing": config.checkpointing != "none",
    }
    checkpointing = {"use_reentrant": config.checkpointing == "reentrant"}
    targets_chosen = "optim_target_modules" in winner.arguments and "optim_target_modules" not in winner.user_arguments
    return found | dialect.given(
        {
            "gradient_checkpointing_kwargs": checkpointing if config.checkpointing != "none" else None,
            "activation_offloading": "hidden_states" if config.checkpointing == "offload" else None,
            "group_by_length": config.train_sampling_strategy == "group_by_length",
            "curriculum_sampling": config.train_sampling_strategy == "sequential",
            "batch_flattening": config.packing and config.attn_implementation in _PACKING_KERNELS,
            "optim_target_modules": "all_linear" if targets_chosen else None,  # by the search
            "torch_compile": config.torch_compile_backend is not None,
            "torch_compile_backend": config.torch_compile_backend,
            "torch_compile_mode": config.torch_compile_mode,
        }
    )


def _devices(winner: Winner) -> dict[str, Any]:
    """Return how the training is spread: DeepSpeed's own file, accelerate's settings of FSDP2, or DDP's."""
    if "deepspeed" in winner.arguments:
        return {"deepspeed": dialect.DEEPSPEED_FILE}
    settings = winner.arguments.get("fsdp_config")
    if settings is None:
        ddp = ("ddp_bucket_cap_mb", "ddp_find_unused_parameters")
        return {name: winner.arguments[name] for name in ddp if name in winner.arguments}
    given = {name: value for name, value in settings.items() if name not in ("version", "cpu_offload")}
    if settings.get("cpu_offload"):
        given["offload_params"] = True
    return {"fsdp_version": settings["version"], "fsdp_config": given}
