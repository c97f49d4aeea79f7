"""LLaMA-Factory's YAML. Its names and defaults are those of `llamafactory.hparams` (0.9), where a test has it read.

What differs from a plain Trainer unless it is said: checkpointing is on, and reentrant; adapters of rank 8; samples are
cut at 2,048 tokens.
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
from autotune.exports.winner import DEFAULTS, EVALUATING, Winner, lost_arguments
from autotune.exports.yaml_text import yaml_text
from autotune.values.config import Precision

FILE = "llama_factory.yaml"

# LLaMA-Factory's words for the kernels of attention (`AttentionFunction`).
_KERNELS = {"sdpa": "sdpa", "eager": "disabled", "flash_attention_2": "fa2", "flash_attention_3": "fa3"}


def llama_factory(winner: Winner) -> Draft:
    """Return LLaMA-Factory's file.

    Raises:
        InputError: It can't train this task, or this adapter.
    """
    require_causal_lm(winner, "llama-factory")
    require_lora(winner, "llama-factory")
    lost = _lost(winner)
    document = {**_model(winner), **_method(winner), **_data(winner), **_training(winner)}
    command = _command(winner)
    about = "`dataset` and `template` are yours to name; the rest is as it was measured."
    text = yaml_text(winner, f"LLaMA-Factory: {command}", document, lost, about=about)
    return Draft({FILE: text, **sharding_files(winner)}, (command,), tuple(lost))


def _command(winner: Winner) -> str:
    if not launch_files.needs_launcher(winner.config):
        return f"llamafactory-cli train {FILE}"
    ranks = winner.config.parallelism.world_size
    return f"FORCE_TORCHRUN=1 NPROC_PER_NODE={ranks} llamafactory-cli train {FILE}"


def _lost(winner: Winner) -> list[str]:
    config = winner.config
    lost = [*lost_knobs(config), *spread_lost(winner), *lost_arguments(winner, {"seed", *_own_names(winner)})]
    if config.packing:
        lost.append("packing of a micro-batch: `neat_packing` makes blocks of a fixed length, another training")
    if config.adapter is not None:  # whose base is left as it was loaded; what is trained is made float32 again
        lost += weights_lost(winner, "LLaMA-Factory")
    return lost


def _model(winner: Winner) -> dict[str, Any]:
    config, spec = winner.config, winner.workload.model
    found: dict[str, Any] = {"model_name_or_path": winner.reference}
    if spec.revision is not None and spec.source != "directory":
        found["model_revision"] = spec.revision
    found["trust_remote_code"] = spec.trust_remote_code
    if config.attn_implementation in _KERNELS:
        found["flash_attn"] = _KERNELS[config.attn_implementation]
    found["disable_gradient_checkpointing"] = config.checkpointing == "none"
    found["use_reentrant_gc"] = config.checkpointing == "reentrant"
    found["enable_liger_kernel"] = config.use_liger_kernel
    return found


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
        **own_settings(winner, {name: name for name in _own_names(winner)}),
        "per_device_train_batch_size": config.per_device_train_batch_size,
        "gradient_accumulation_steps": winner.accumulation,
        "optim": config.optim,
        **trainer_arguments(winner, {name: name for name in _SAME}),
        "bf16": config.precision is Precision.BF16,
        "fp16": config.precision is Precision.FP16,
        "train_sampling_strategy": config.train_sampling_strategy,
    }
    if "tf32" in winner.arguments:
        found["tf32"] = winner.arguments["tf32"]
    found |= {name: winner.arguments[name] for name in _AS_THEY_ARE if name in winner.arguments}
    if "deepspeed" in winner.arguments:
        found["deepspeed"] = launch_files.FILE_NAMES[launch_files.DEEPSPEED]
    return found


_SAME = (
    "learning_rate", "lr_scheduler_type", "warmup_steps", "weight_decay", "adam_beta1", "adam_beta2", "adam_epsilon",
    "max_grad_norm", "seed", "dataloader_num_workers", "dataloader_pin_memory", "dataloader_prefetch_factor",
)  # fmt: skip

# Of the user's own TrainingArguments, which LLaMA-Factory's are a class of, what it sets by itself, and what the
# transformers that it takes (up to 5.6) haven't.
_NOT_ITS = frozenset(
    {"remove_unused_columns", "liger_kernel_config", "dataloader_multiprocessing_context", "dataloader_in_order"}
)


def _own_names(winner: Winner) -> list[str]:
    """Return the names of the user's own arguments that it takes by the same names."""
    return [name for name in winner.own_arguments if name not in {"seed", *_NOT_ITS, *EVALUATING, *DEFAULTS}]


# Of TrainingArguments what the search has decided, where the answer has it.
_AS_THEY_ARE = (
    "torch_compile", "torch_compile_backend", "torch_compile_mode", "use_cpu", "optim_target_modules", "fsdp",
    "fsdp_config", "ddp_backend", "ddp_bucket_cap_mb", "ddp_static_graph", "ddp_find_unused_parameters",
)  # fmt: skip
