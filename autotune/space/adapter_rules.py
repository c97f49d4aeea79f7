"""Rules of legality for adapters, quantized base weights and a loss in chunks; a part of `rules`.

They follow from the facts of each kind of adapter (`values.adapters`) and of the model (`ModelFacts`).
"""

from __future__ import annotations

import functools

from autotune.training.adapters import ATTENTION_MODULES, EXPERT_PARAMETERS, IA3_MODULES
from autotune.training.parallel_arguments import FSDP_KINDS
from autotune.values.adapters import Adapter, PrefixAdapter
from autotune.values.config import Precision, TrainConfig
from autotune.values.hardware import Hardware
from autotune.values.model import ModelFacts, Task
from autotune.values.workload import Workload

# Model types whose layers are transformers' Conv1D, which peft's LoHa and LoKr don't know.
_CONV1D = frozenset({"gpt2", "imagegpt", "openai-gpt"})

# Kinds that peft's LoraConfig makes.
_LORA = ("lora", "rslora", "dora")

# Tasks whose wrapper in peft handles the labels of virtual tokens (peft.TaskType).
_PROMPTED = (Task.CAUSAL_LM, Task.SEQ2SEQ_LM, Task.SEQUENCE_CLASSIFICATION)


def adapter(config: TrainConfig, workload: Workload, facts: ModelFacts, hardware: Hardware) -> str | None:
    """Return why the adapter can't be put on the model."""
    found = config.adapter
    if found is None:
        return None
    if workload.task is Task.IMAGE_TEXT_TO_TEXT and found.kind in ("vera", "bitfit"):
        return f"{found.kind} can't be kept out of the vision part of {workload.model.model_type}; lora can"
    if found.prompt_length:
        return _prompt(found, config, workload, facts)
    if found.kind == "bitfit":
        return f"bitfit trains biases, and {workload.model.model_type} has none" if facts.biases == 0 else None
    return _on_layers(found, workload.model.model_type, facts)


def quantization(config: TrainConfig, workload: Workload, facts: ModelFacts, hardware: Hardware) -> str | None:
    """Return why the base weights can't be quantized."""
    if config.quantization is None:
        return None
    if config.adapter is None:
        return f"{config.quantization} weights can't be trained, only an adapter on them (--fix adapter=lora)"
    if not config.adapter.on_quantized:
        return f"{config.adapter.kind} can't be trained on {config.quantization} weights; lora can"
    if config.adapter.kind == "ia3" and config.precision is Precision.PURE_BF16 and config.quantization != "int8":
        # `Linear4bit` of peft/tuners/ia3/bnb.py: its input is made fp32 and its output stays so, beside queries in bf16
        return f"ia3 on {config.quantization} weights: peft returns keys and values in fp32 unless autocast is on"
    if "bitsandbytes" not in hardware.versions:
        return f"{config.quantization} weights need the package bitsandbytes"
    if not facts.linear_modules:
        return f"{workload.model.model_type} has no linear layers that bitsandbytes could quantize"
    return None


def _on_layers(found: Adapter, model_type: str, facts: ModelFacts) -> str | None:
    """Return why an adapter of linear layers can't be put on the model."""
    linear = facts.linear_modules
    if not linear:
        return f"{model_type} has no linear layers for {found.kind}"
    if found.kind == "ia3" and not _any_named(linear, IA3_MODULES):
        return f"no layer of {model_type} is known to ia3 as keys, values or feed-forward"
    if found.kind in ("loha", "lokr") and model_type in _CONV1D:
        return f"peft's {found.kind} doesn't know the layers of {model_type}; its lora does"
    targets = getattr(found, "target_modules", None)
    if targets == "attention" and not _any_named(linear, ATTENTION_MODULES):
        return f"no layer of {model_type} is known as a projection of attention; use all-linear"
    # peft's LoRA adapts the fused experts of these models with all-linear too, as when experts were linear layers.
    old_way = targets == "all-linear" and found.kind in _LORA and _any_named(facts.expert_parameters, EXPERT_PARAMETERS)
    if targets == "all-linear+experts" or old_way:
        return _on_experts(found, model_type, facts)
    return None


def _on_experts(found: Adapter, model_type: str, facts: ModelFacts) -> str | None:
    if not _any_named(facts.expert_parameters, EXPERT_PARAMETERS):
        return f"{model_type} has no experts whose weights are fused; use all-linear"
    if not found.on_experts:
        return f"peft's {found.kind} can't be put on the fused weights of experts (its lora can); use attention"
    if getattr(found, "dropout", 0.0):
        return f"peft's {found.kind} on the fused weights of experts has no dropout (--fix adapter-dropout=0)"
    return None


def _prompt(found: Adapter, config: TrainConfig, workload: Workload, facts: ModelFacts) -> str | None:
    """Return why virtual tokens can't be put before the real ones."""
    model, task = workload.model, workload.task
    if task not in _PROMPTED:
        return f"peft has no {found.kind} for {task}"
    longest, length = facts.max_sequence_length, workload.sequence_length
    if longest is not None and length + found.prompt_length > longest:
        room = f"{length} tokens and {found.prompt_length} virtual ones"
        return f"{found.kind}: {room} are more than the {longest} positions of {model.name}"
    if isinstance(found, PrefixAdapter):
        if facts.takes_prefix is False:
            return f"{model.model_type} takes no keys and values from outside for {task}, which prefix needs"
        if config.checkpointing != "none":
            return "prefix needs the cache of keys and values, which checkpointing takes away"
    elif task is Task.SEQUENCE_CLASSIFICATION and model.kind != "encoder":
        return f"{model.model_type} finds the end of a sample by its token ids, which {found.kind} takes away"
    return None


@functools.cache  # asked of every configuration, and always of the same
def _any_named(names: tuple[str, ...], known: tuple[str, ...]) -> bool:
    """Return whether one of `names`, last components of module names, equals or ends one of `known`."""
    ends = {name.rpartition(".")[2] for name in known} | set(known)
    return any(name in ends for name in names)


def chunked_loss(config: TrainConfig, workload: Workload, facts: ModelFacts, hardware: Hardware) -> str | None:
    """Return why head and loss can't be worked out in chunks."""
    if not config.chunked_loss:
        return None
    if workload.recipe is not None:
        return "chunked_loss: TRL works out the loss of a recipe itself"
    if not facts.chunks_loss:
        return f"chunked_loss: the loss of {workload.model.model_type} isn't that of a linear head's logits alone"
    if config.use_liger_kernel:
        return "chunked_loss: Liger's kernels have it already"
    if workload.fixed_arguments.get("label_smoothing_factor"):
        return "chunked_loss: label_smoothing_factor is worked out from all logits"
    spread = config.parallelism
    if spread.tensor_parallel > 1 or spread.sharding in (*FSDP_KINDS, "zero_3"):
        return "chunked_loss: the head's weights are in parts, which are gathered for the head alone"
    return None
