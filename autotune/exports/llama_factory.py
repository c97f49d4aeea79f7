"""LLaMA-Factory's YAML, with the names and defaults of `llamafactory.hparams` (0.9), which a test reads it with.

Its defaults differ from a plain Trainer: reentrant checkpointing, adapters of rank 8, samples cut at
2,048 tokens.
"""

from __future__ import annotations

from typing import Any

from autotune.exports import dialect
from autotune.exports.launch_files import needs_launcher, variables
from autotune.exports.winner import DEFAULTS, EVALUATING, Draft, Winner, lost_arguments
from autotune.values.config import Precision
from autotune.values.techniques import CHECKPOINTING

FILE = "llama_factory.yaml"

# Requires-Dist in the metadata of its package on PyPI.
_REQUIRES = (
    "LLaMA-Factory 0.9.5 requires transformers 4.55.0 to 5.6.0, torch from 2.4.0 on, accelerate up to 1.11.0 and peft "
    "0.18.0 or 0.18.1 (its package on PyPI, 2026-11-22)"
)

# Attention kernels -> LLaMA-Factory's names (`AttentionFunction`).
_KERNELS = {"sdpa": "sdpa", "eager": "disabled", "flash_attention_2": "fa2", "flash_attention_3": "fa3"}

# Its arguments are a subclass of TrainingArguments. Every file has these, ...
_ALWAYS = (
    "learning_rate", "lr_scheduler_type", "warmup_steps", "weight_decay", "adam_beta1", "adam_beta2", "adam_epsilon",
    "max_grad_norm", "seed", "dataloader_num_workers", "dataloader_pin_memory", "dataloader_prefetch_factor",
)  # fmt: skip

# ... and these if the search has decided them.
_IF_DECIDED = (
    "torch_compile", "torch_compile_backend", "torch_compile_mode", "use_cpu", "optim_target_modules", "fsdp",
    "fsdp_config", "ddp_backend", "ddp_bucket_cap_mb", "ddp_static_graph", "ddp_find_unused_parameters",
)  # fmt: skip

# The user's arguments that it sets itself, or that the transformers it runs on (up to 5.6) doesn't have.
_NOT_ITS = frozenset(
    {"remove_unused_columns", "liger_kernel_config", "dataloader_multiprocessing_context", "dataloader_in_order"}
)


def llama_factory(winner: Winner) -> Draft:
    """Return LLaMA-Factory's file.

    Raises:
        InputError: It can't train this task, or this adapter.
    """
    dialect.require_lora_of_causal_lm(winner, "llama-factory")
    command = f"llamafactory-cli train {FILE}"
    if needs_launcher(winner.config):
        command = f"FORCE_TORCHRUN=1 NPROC_PER_NODE={winner.config.parallelism.world_size} {command}"
    command = f"{variables(winner.config)}{command}"
    document = {**_model(winner), **_method(winner), **_data(winner), **_training(winner)}
    return dialect.yaml_draft(
        winner, "LLaMA-Factory", FILE,
        command=command, document=document, lost=_lost(winner), yours="`dataset` and `template` are",
        requires=_REQUIRES,
    )  # fmt: skip


def _lost(winner: Winner) -> list[str]:
    config = winner.config
    lost = dialect.lost_spacing(winner)
    if config.checkpointing != "none" and CHECKPOINTING[config.checkpointing].offload:
        lost.append(f"checkpointing {config.checkpointing}: layers' inputs stay on the device")
    if config.experts_implementation is not None:
        lost.append(f"experts_implementation {config.experts_implementation}: the library's default runs")
    if config.experts_per_token is not None:
        lost.append(f"experts_per_token {config.experts_per_token}: the model's own number is used")
    if config.expert_capacity is not None:
        lost.append(f"expert_capacity {config.expert_capacity}: the model's own is used")
    lost += [*dialect.lost_sharing(winner), *lost_arguments(winner, {"seed", *_user_settings(winner)})]
    if config.packing:
        lost.append("packing of a micro-batch: `neat_packing` makes blocks of a fixed length, another training")
    if config.adapter is not None:  # the base stays as it was loaded; trained weights are made float32 again
        lost += dialect.lost_weights(winner, "LLaMA-Factory")
    return lost


def _user_settings(winner: Winner) -> dict[str, Any]:
    """Return those of the plain arguments that it takes."""
    left_out = {"seed", *_NOT_ITS, *EVALUATING, *DEFAULTS}
    return {name: value for name, value in winner.plain_arguments.items() if name not in left_out}


def _model(winner: Winner) -> dict[str, Any]:
    config = winner.config
    found = {
        "model_name_or_path": winner.reference,
        "model_revision": winner.revision,
        "trust_remote_code": winner.workload.model.trust_remote_code,
        "flash_attn": _KERNELS.get(str(config.attn_implementation)),
        "disable_gradient_checkpointing": config.checkpointing == "none",
        "use_reentrant_gc": config.checkpointing == "reentrant",
        "enable_liger_kernel": config.use_liger_kernel,
    }
    return dialect.given(found)


def _method(winner: Winner) -> dict[str, Any]:
    adapter, packed = winner.peft_arguments, winner.result.arguments.quantization
    found: dict[str, Any] = {
        "stage": "pt",
        "do_train": True,
        "finetuning_type": "full" if adapter is None else "lora",
        "pure_bf16": winner.config.precision is Precision.PURE_BF16,
    }
    if adapter is not None:
        targets = adapter["target_modules"]
        found |= {
            "lora_rank": adapter["r"],
            "lora_alpha": adapter["lora_alpha"],
            "lora_dropout": adapter["lora_dropout"],
            "lora_target": "all" if targets == "all-linear" else ",".join(targets),
            "use_rslora": bool(adapter.get("use_rslora")),
            "use_dora": bool(adapter.get("use_dora")),
        }
    if packed is not None:
        found |= {"quantization_bit": 8 if packed.get("load_in_8bit") else 4, "quantization_method": "bnb"}
        if packed.get("load_in_4bit"):
            found |= {
                "quantization_type": packed["bnb_4bit_quant_type"],
                "double_quantization": packed["bnb_4bit_use_double_quant"],
            }
    return found


def _data(winner: Winner) -> dict[str, Any]:
    return {
        "dataset": "YOUR_DATASET",
        "template": "default",
        "cutoff_len": winner.workload.sequence_length,
        "packing": False,
    }


def _training(winner: Winner) -> dict[str, Any]:
    config = winner.config
    found = {
        "output_dir": "out",
        "num_train_epochs": 1.0,
        **_user_settings(winner),
        "per_device_train_batch_size": config.per_device_train_batch_size,
        "gradient_accumulation_steps": winner.accumulation,
        "optim": config.optim,
        **dialect.trainer_arguments(winner, {name: name for name in _ALWAYS}),
        "bf16": config.precision is Precision.BF16,
        "fp16": config.precision is Precision.FP16,
        "train_sampling_strategy": "random" if config.is_balanced else config.train_sampling_strategy,
    }
    if "tf32" in winner.arguments:
        found["tf32"] = winner.arguments["tf32"]
    found |= {name: winner.arguments[name] for name in _IF_DECIDED if name in winner.arguments}
    if "deepspeed" in winner.arguments:
        found["deepspeed"] = dialect.DEEPSPEED_FILE
    return found
