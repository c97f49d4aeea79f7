"""The one mapping from a configuration to what transformers and peft are given.

Pure. A :class:`TrainingPlan` has two parts: what the configuration *means* (`tuned`, `model`, `adapter`), which the
export writes, and what only a trial needs (`harness`). The trial trains with both, so what was measured is what is
exported.
"""

from __future__ import annotations

from typing import Any

from pydantic import Field

from autotune.config import LoraAdapter, Precision, TrainConfig, Workload
from autotune.hardware import Hardware
from autotune.values import Value

# transformers 5.23 renamed gradient_checkpointing (kept as an alias until 6) to activation_checkpointing.
_RENAMED_CHECKPOINTING = (5, 23)

# Names of the attention projections in the families of the catalogue; peft matches the end of a module's name.
ATTENTION_MODULES = (
    "q_proj", "k_proj", "v_proj", "o_proj", "out_proj", "qkv_proj", "query_key_value", "query", "key", "value",
    "q", "k", "v", "o", "c_attn", "in_proj", "query_proj", "key_proj", "value_proj", "q_lin", "k_lin", "v_lin",
    "out_lin", "qkv", "Wqkv",
)  # fmt: skip


class TrainingPlan(Value):
    """Arguments for `TrainingArguments`, for the model and for the adapter."""

    tuned: dict[str, Any] = Field(description="TrainingArguments: what the configuration means")
    harness: dict[str, Any] = Field(description="TrainingArguments: what only a trial needs")
    model: dict[str, Any] = Field(description="keyword arguments of from_pretrained or from_config")
    adapter: dict[str, Any] | None = Field(description="keyword arguments of peft.LoraConfig")
    quantization: dict[str, Any] | None = Field(
        default=None, description="quantization_config; no search space offers quantized bases yet"
    )


def plan(config: TrainConfig, workload: Workload, hardware: Hardware) -> TrainingPlan:
    """Return what `config` means for `workload` on `hardware`.

    Raises:
        ValueError: The micro-batch doesn't divide the global batch.
    """
    fixed = dict(workload.fixed_arguments)
    if config.dataloader_num_workers == 0:
        fixed.pop("dataloader_prefetch_factor", None)  # TrainingArguments refuses it without workers
    return TrainingPlan(
        tuned={"seed": workload.seed, **fixed, **_tuned(config, workload, hardware)},
        harness=dict(_HARNESS),
        model=_model(config),
        adapter=adapter_arguments(config.adapter) if config.adapter else None,
    )


def _tuned(config: TrainConfig, workload: Workload, hardware: Hardware) -> dict[str, Any]:
    arguments: dict[str, Any] = {
        "per_device_train_batch_size": config.per_device_train_batch_size,
        "gradient_accumulation_steps": workload.accumulation_steps(config),
        "optim": config.optim,
        "bf16": config.precision is Precision.BF16,
        "fp16": config.precision is Precision.FP16,
        "dataloader_num_workers": config.dataloader_num_workers,
        "dataloader_pin_memory": config.dataloader_pin_memory,
        "dataloader_persistent_workers": config.dataloader_num_workers > 0,
        **_checkpointing(config, hardware),
    }
    if config.tf32:  # said only where it is wanted: False would take from convolutions what torch gives by default
        arguments["tf32"] = True
    if hardware.is_cpu:
        arguments["use_cpu"] = True
    if config.torch_compile_backend is not None:
        arguments |= {"torch_compile": True, "torch_compile_backend": config.torch_compile_backend}
    return arguments


def _checkpointing(config: TrainConfig, hardware: Hardware) -> dict[str, Any]:
    version = tuple(int(p) for p in hardware.versions.get("transformers", "5.17").split(".")[:2])
    name = "activation_checkpointing" if version >= _RENAMED_CHECKPOINTING else "gradient_checkpointing"
    if config.checkpointing == "none":
        return {name: False}
    return {name: True, f"{name}_kwargs": {"use_reentrant": False}}


def _model(config: TrainConfig) -> dict[str, Any]:
    # Since transformers 5 from_pretrained takes the checkpoint's own dtype: master weights in fp32 must be asked for.
    arguments: dict[str, Any] = {"dtype": "bfloat16" if config.precision is Precision.PURE_BF16 else "float32"}
    if config.attn_implementation is not None:
        arguments["attn_implementation"] = config.attn_implementation
    return arguments


def adapter_arguments(adapter: LoraAdapter) -> dict[str, Any]:
    """Return the keyword arguments of `peft.LoraConfig` for an adapter."""
    targets: str | list[str] = "all-linear" if adapter.target_modules == "all-linear" else list(ATTENTION_MODULES)
    return {
        "r": adapter.rank,
        "lora_alpha": adapter.alpha,
        "lora_dropout": adapter.dropout,
        "target_modules": targets,
    }


# Nothing is saved, pushed, evaluated, reported or drawn during a trial, and NaN losses are shown as they are: the
# Trainer's default is to log them as 0.0. The data of a trial hold the columns of the model and nothing else, in an
# order that the seed alone decides, so that every trial trains on the same samples.
_HARNESS: dict[str, Any] = {
    "save_strategy": "no",
    "push_to_hub": False,
    "eval_strategy": "no",
    "eval_on_start": False,
    "logging_strategy": "no",
    "logging_nan_inf_filter": False,
    "report_to": "none",
    "disable_tqdm": True,
    "remove_unused_columns": False,
    "dataloader_drop_last": True,
    "train_sampling_strategy": "sequential",
}

# TrainingArguments that the search decides. A baseline's values for these become its TrainConfig.
SEARCHED_ARGUMENTS = frozenset(
    {
        "per_device_train_batch_size", "gradient_accumulation_steps", "optim", "bf16", "fp16", "tf32", "use_cpu",
        "gradient_checkpointing", "gradient_checkpointing_kwargs", "activation_checkpointing",
        "activation_checkpointing_kwargs", "torch_compile", "torch_compile_backend", "dataloader_num_workers",
        "dataloader_pin_memory", "dataloader_persistent_workers",
    }
)  # fmt: skip
