"""Rules of legality: what a device, an installation or a model can't do, known without spending a trial.

Pure. Each rule is a function that returns the reason why a configuration is refused, or None. A rule belongs here when
it follows from facts; what only a run can tell is left to the run.
"""

from __future__ import annotations

from collections.abc import Callable

from autotune.architecture import ModelFacts
from autotune.config import Precision, TrainConfig, Workload
from autotune.hardware import Hardware

Rule = Callable[[TrainConfig, Workload, ModelFacts, Hardware], str | None]

# https://github.com/huggingface/transformers/pull/10956: activations of T5's feed-forward leave fp16's range.
_OVERFLOWS_IN_FP16 = frozenset({"t5", "mt5", "umt5", "longt5", "switch_transformers"})

# Heads that hand the images to a convolution as they come, in fp32, which bf16 weights refuse.
_FP32_PIXELS = frozenset({"resnet", "convnext", "convnextv2", "swin", "swinv2"})

_HALF = (Precision.FP16, Precision.BF16, Precision.PURE_BF16)


def refusals(config: TrainConfig, workload: Workload, facts: ModelFacts, hardware: Hardware) -> list[str]:
    """Return all that speaks against running `config`."""
    reasons = (rule(config, workload, facts, hardware) for rule in _RULES)
    return [reason for reason in reasons if reason is not None]


def _micro_batch(config: TrainConfig, workload: Workload, facts: ModelFacts, hardware: Hardware) -> str | None:
    total, micro = workload.global_batch_size, config.per_device_train_batch_size
    if total is not None and total % micro:
        return f"a micro-batch of {micro} does not divide the global batch of {total}"
    return None


def _precision(config: TrainConfig, workload: Workload, facts: ModelFacts, hardware: Hardware) -> str | None:
    if config.precision is Precision.FP16:
        if hardware.is_cpu:
            return "fp16 on a CPU silently stays fp32 in the Trainer"
        if workload.model.model_type in _OVERFLOWS_IN_FP16:
            return f"{workload.model.model_type} overflows in fp16; bf16 has fp32's range"
    if config.precision is Precision.PURE_BF16 and workload.model.model_type in _FP32_PIXELS:
        return f"{workload.model.model_type} in transformers does not cast images to its weights' bf16"
    if config.precision in (Precision.BF16, Precision.PURE_BF16) and not hardware.has_bf16:
        return f"{hardware.name} has no bf16 (compute capability 8.0 or newer)"
    return None


def _tf32(config: TrainConfig, workload: Workload, facts: ModelFacts, hardware: Hardware) -> str | None:
    if config.tf32 and not hardware.has_tf32:
        return f"{hardware.name} has no tf32 (Ampere or newer)"
    return None


def _attention(config: TrainConfig, workload: Workload, facts: ModelFacts, hardware: Hardware) -> str | None:
    kernel = config.attn_implementation
    if kernel is None:
        return None
    if kernel not in facts.attn_implementations:
        return f"{workload.model.model_type} offers no {kernel} attention"
    if kernel.startswith("flash_attention"):
        if hardware.is_cpu:
            return "flash attention needs a CUDA device"
        if "flash-attn" not in hardware.versions:
            return "flash attention needs the package flash-attn"
        if config.precision not in _HALF:
            return "flash attention computes in fp16 or bf16 only"
    if kernel == "flex_attention" and hardware.is_cpu:
        return "flex attention has no backward on the CPU"
    return None


def _optimizer(config: TrainConfig, workload: Workload, facts: ModelFacts, hardware: Hardware) -> str | None:
    if "paged" in config.optim and hardware.is_cpu:
        return "paged optimizer states need CUDA; on the CPU bitsandbytes silently doesn't page"
    if ("8bit" in config.optim or "paged" in config.optim) and "bitsandbytes" not in hardware.versions:
        return f"{config.optim} needs the package bitsandbytes"
    return None


def _checkpointing(config: TrainConfig, workload: Workload, facts: ModelFacts, hardware: Hardware) -> str | None:
    if config.checkpointing != "none" and not facts.supports_checkpointing:
        return f"{workload.model.model_type} has no activation checkpointing"
    return None


def _compile(config: TrainConfig, workload: Workload, facts: ModelFacts, hardware: Hardware) -> str | None:
    if config.torch_compile_backend == "inductor":
        if hardware.is_cpu and hardware.cxx is None:
            return "inductor needs a C++ compiler on the CPU (g++)"
        if not hardware.is_cpu and "triton" not in hardware.versions:
            return "inductor needs the package triton on CUDA"
    if config.torch_compile_backend == "cudagraphs" and hardware.is_cpu:
        return "cudagraphs does nothing on a CPU"
    return None


def _adapter(config: TrainConfig, workload: Workload, facts: ModelFacts, hardware: Hardware) -> str | None:
    if config.adapter is not None and not facts.linear_modules:
        return f"{workload.model.model_type} has no linear layers for LoRA"
    return None


_RULES: tuple[Rule, ...] = (
    _micro_batch,
    _precision,
    _tf32,
    _attention,
    _optimizer,
    _checkpointing,
    _compile,
    _adapter,
)
