"""Rules of legality: configurations that device, installation or model can't run, refused without a trial.

Each rule is a function that returns the reason why a configuration is refused, or None. Rules follow from facts; what
only a run can show is left to the trial.
"""

from __future__ import annotations

from autotune.space import adapter_rules, parallel_rules
from autotune.training.arguments import asks_for_tf32_the_old_way
from autotune.values.config import Precision, TrainConfig
from autotune.values.hardware import TF32_VARIABLE, Hardware
from autotune.values.model import FLASH_PACKAGES, HUB_EXPERTS, ModelFacts, Task
from autotune.values.techniques import CHECKPOINTING, OPTIMIZERS
from autotune.values.workload import Workload

# https://github.com/huggingface/transformers/pull/10956: activations of T5's feed-forward leave fp16's range.
_OVERFLOWS_IN_FP16 = frozenset({"t5", "mt5", "umt5", "longt5", "switch_transformers"})

# Models with a learned bias of attention, which inductor hands to efficient attention in a layout that it refuses
# ("(*bias): last dimension must be contiguous") where a checkpointed layer runs again: seen of t5-3b, torch 2.11.
_BIASED = frozenset({"t5", "mt5", "umt5"})

# Models that pass images in fp32 to a convolution, which fails with bf16 weights; all audio models do the same.
_FP32_PIXELS = frozenset({"resnet", "convnext", "convnextv2", "swin", "swinv2"})

# Triton compiles kernel launchers in C: https://github.com/triton-lang/triton/blob/main/python/triton/runtime/build.py
_NEEDS_CC = "needs a C compiler on CUDA, with which Triton builds what loads its kernels (gcc, clang or $CC)"

# What records CUDA graphs; the second micro-step raises "output of CUDAGraphs that has been overwritten".
_GRAPHS = ("reduce-overhead", "max-autotune", "cudagraphs")

_HALF = (Precision.FP16, Precision.BF16, Precision.PURE_BF16)


def refusals(config: TrainConfig, workload: Workload, facts: ModelFacts, hardware: Hardware) -> list[str]:
    """Return the reasons why `config` can't run; empty: it is legal."""
    reasons = (rule(config, workload, facts, hardware) for rule in _RULES)
    return [reason for reason in reasons if reason is not None]


def _micro_batch(config: TrainConfig, workload: Workload, facts: ModelFacts, hardware: Hardware) -> str | None:
    try:
        workload.accumulation_steps(config)
    except ValueError as error:
        return str(error)
    return None


def _precision(config: TrainConfig, workload: Workload, facts: ModelFacts, hardware: Hardware) -> str | None:
    if config.precision is Precision.FP16:
        if hardware.is_cpu:
            return "fp16 on a CPU silently stays fp32 in the Trainer"
        if workload.model.model_type in _OVERFLOWS_IN_FP16:
            return f"{workload.model.model_type} overflows in fp16; bf16 has fp32's range"
    if config.precision is Precision.PURE_BF16:
        if workload.model.model_type in _FP32_PIXELS:
            return f"{workload.model.model_type} in transformers does not cast images to its weights' bf16"
        if workload.task.takes_audio:
            return f"{workload.model.model_type} in transformers does not cast sound to its weights' bf16"
    if config.precision in (Precision.BF16, Precision.PURE_BF16) and not hardware.has_bf16:
        return f"{hardware.name} has no bf16 (compute capability 8.0 or newer)"
    return None


def _tf32(config: TrainConfig, workload: Workload, facts: ModelFacts, hardware: Hardware) -> str | None:
    if config.tf32 and not hardware.has_tf32:
        return f"{hardware.name} has no tf32 (Ampere or newer)"
    if hardware.starts_with_tf32 and hardware.has_tf32:
        variable = f"{TF32_VARIABLE} has torch begin with TF32"
        return None if config.tf32 else f"{variable}, which the Trainer's arguments don't switch off"
    is_theirs = workload.own_code is not None and "tf32" in workload.own_code.held
    if config.tf32 and asks_for_tf32_the_old_way(config) and not is_theirs:
        return f"{config.torch_compile_mode} raises in mixed precision where tf32 is asked for: torch mixes interfaces"
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
        package = FLASH_PACKAGES[kernel]
        if package not in hardware.versions:
            return f"flash attention needs the package {package}"
        if hardware.capability is not None and hardware.capability < (8, 0):
            return f"flash attention needs compute capability 8.0 or newer (Ampere), which {hardware.name} hasn't"
        if config.precision not in _HALF:
            return "flash attention computes in fp16 or bf16 only"
    if kernel == "flex_attention" and hardware.is_cpu:
        return "flex attention has no backward on the CPU"
    if kernel == "flex_attention" and not hardware.has_cc:
        return f"flex attention {_NEEDS_CC}"
    return None


def _optimizer(config: TrainConfig, workload: Workload, facts: ModelFacts, hardware: Hardware) -> str | None:
    row = OPTIMIZERS[config.optim]
    if row.unusable is not None:
        return f"{config.optim}: {row.unusable}"
    if row.device == "cuda" and hardware.is_cpu:
        paged = "; on the CPU bitsandbytes silently doesn't page" if "paged" in config.optim else ""
        return f"{config.optim} needs CUDA{paged}"
    if row.package is not None and row.package not in hardware.versions:
        return f"{config.optim} needs the package {row.package}"
    if not row.takes_bf16 and config.precision is Precision.PURE_BF16 and not hardware.is_cpu:
        return f"{config.optim}: bitsandbytes has no kernel of it for gradients in bf16"
    if row.compiles and hardware.is_cpu and hardware.cxx is None:
        return f"{config.optim} compiles its step, which needs a C++ compiler on the CPU (g++)"
    if row.compiles and not hardware.is_cpu and not hardware.has_cc:
        return f"{config.optim} compiles its step, which {_NEEDS_CC}"
    if row.updates_in_backward and parallel_rules.accumulates(config, workload):
        return f"{config.optim} updates weights during the backward pass, which gradient accumulation forbids"
    if row.targets and not facts.linear_modules:
        return f"{config.optim} projects the gradients of linear layers, and {workload.model.model_type} has none"
    if row.targets and config.adapter is not None:
        return f"{config.optim} projects full gradients; an adapter's are low-rank already"
    return None


def _checkpointing(config: TrainConfig, workload: Workload, facts: ModelFacts, hardware: Hardware) -> str | None:
    if config.checkpointing == "none":
        return None
    if not facts.supports_checkpointing:
        return f"{workload.model.model_type} has no activation checkpointing"
    kind = CHECKPOINTING[config.checkpointing]
    if kind.offload and hardware.is_cpu:
        return "checkpointing offload holds activations in pinned memory of the host, which needs a CUDA device"
    if kind.every > 1 and (facts.layers or kind.every) < kind.every:
        return f"checkpointing {config.checkpointing}: {workload.model.name} has {facts.layers} layers"
    return None


def _compile(config: TrainConfig, workload: Workload, facts: ModelFacts, hardware: Hardware) -> str | None:
    if config.activation_memory_budget is not None:
        if config.torch_compile_backend != "inductor" or config.checkpointing != "none":
            return "activation_memory_budget is of models that inductor compiles, without checkpointing"
        if workload.recipe is not None:
            return "activation_memory_budget: TRL's trainers are not measured with it"
    if config.torch_compile_backend is None:
        return "a mode of torch.compile needs a backend" if config.torch_compile_mode else None
    if config.torch_compile_mode is not None and config.torch_compile_backend != "inductor":
        return f"modes of torch.compile are inductor's; {config.torch_compile_backend} has none"
    if config.torch_compile_backend == "inductor":
        if hardware.is_cpu and hardware.cxx is None:
            return "inductor needs a C++ compiler on the CPU (g++)"
        if not hardware.is_cpu and "triton" not in hardware.versions:
            return "inductor needs the package triton on CUDA"
        if not hardware.is_cpu and not hardware.has_cc:
            return f"inductor {_NEEDS_CC}"
        biased = workload.model.model_type in _BIASED and config.attn_implementation == "sdpa"
        if biased and not hardware.is_cpu and config.checkpointing != "none":
            return f"inductor with checkpointing on CUDA breaks the sdpa attention of {workload.model.model_type}"
    if config.torch_compile_backend == "cudagraphs" and hardware.is_cpu:
        return "cudagraphs does nothing on a CPU"
    graphs = config.torch_compile_mode if config.torch_compile_backend == "inductor" else config.torch_compile_backend
    if graphs in _GRAPHS and not hardware.is_cpu and parallel_rules.accumulates(config, workload):
        overwrite = f"CUDA graphs ({graphs}) overwrite gradients that accumulate"
        return f"{overwrite}; max-autotune-no-cudagraphs records none"
    return None


def _routing(config: TrainConfig, workload: Workload, facts: ModelFacts, hardware: Hardware) -> str | None:
    for name, own in (("experts_per_token", facts.experts_per_token), ("expert_capacity", facts.expert_capacity)):
        wanted = getattr(config, name)
        if wanted is not None and own is None:
            return f"{workload.model.model_type} has no {name} to set"
    if (config.experts_per_token or 0) > facts.experts:
        return f"{config.experts_per_token} experts a token are more than the {facts.experts} of a layer"
    return None


def _experts(config: TrainConfig, workload: Workload, facts: ModelFacts, hardware: Hardware) -> str | None:
    kind = config.experts_implementation
    if kind is None:
        return None
    if kind not in facts.experts_implementations:
        has = "has experts of its own way" if facts.experts else "has no experts"
        return f"{workload.model.model_type} {has}: transformers offers no experts_implementation {kind} for it"
    if kind in HUB_EXPERTS and "kernels" not in hardware.versions:
        return f"experts_implementation {kind} needs the package kernels and its kernel cached"
    if kind in HUB_EXPERTS and hardware.is_cpu:
        return f"experts_implementation {kind} needs a CUDA device"
    return None


def _liger(config: TrainConfig, workload: Workload, facts: ModelFacts, hardware: Hardware) -> str | None:
    if not config.use_liger_kernel:
        return None
    if hardware.is_cpu:
        return "Liger's kernels are written in Triton and need a CUDA device"
    if "liger-kernel" not in hardware.versions:
        return "use_liger_kernel needs the package liger-kernel"
    if not hardware.has_cc:
        return f"use_liger_kernel {_NEEDS_CC}"
    if not facts.liger:
        return f"liger-kernel has no kernels for {workload.model.model_type}; the Trainer would silently go without"
    return None


def _allocator(config: TrainConfig, workload: Workload, facts: ModelFacts, hardware: Hardware) -> str | None:
    if config.torch_empty_cache_steps is not None and hardware.is_cpu:
        return "torch_empty_cache_steps empties the cache of a GPU's allocator; a CPU has none"
    if config.expandable_segments and hardware.is_cpu:
        return "expandable_segments are of a GPU's allocator; a CPU has none"
    return None


def _sampling(config: TrainConfig, workload: Workload, facts: ModelFacts, hardware: Hardware) -> str | None:
    """Return why another order of the samples, or another cut of a step, can't save padding."""
    if config.train_sampling_strategy in ("random", "sequential"):
        return None
    said = "balancing by tokens" if config.is_balanced else "grouping by length"
    if not _lengths_differ(workload):
        return f"{said}: all samples have one length (real data, --data, have many)"
    if config.packing:
        return f"packed batches have no padding that {said} could save"
    if config.is_balanced and not parallel_rules.accumulates(config, workload):
        return f"{said} moves samples between the micro-batches of a step, which has one"
    if config.is_balanced and config.parallelism.data_parallel != config.parallelism.world_size:
        return f"{said}: transformers' sampler deals samples out to all ranks, of which some should have the same"
    if workload.recipe is not None or (config.is_balanced and workload.is_users_own):
        return f"{said} is tried with the models' own training alone, without code of yours or a recipe"
    return None


def _packing(config: TrainConfig, workload: Workload, facts: ModelFacts, hardware: Hardware) -> str | None:
    """Return why samples can't be packed into one row."""
    if not config.packing:
        return None
    if workload.task is not Task.CAUSAL_LM:
        return f"packing joins the texts of causal models; the task is {workload.task}"
    if not _lengths_differ(workload):
        return "packing: all samples have one length, so there is no padding (real data, --data, have many)"
    if not facts.packs:
        return f"packing: {workload.model.model_type} lets the samples of a row see each other"
    if config.attn_implementation == "eager":
        return "packing with eager attention would hold the scores of every sample against all others"
    if config.adapter is not None and config.adapter.prompt_length:
        return f"packing: {config.adapter.kind} puts its virtual tokens before a row, not before each sample"
    return None


def _recipe(config: TrainConfig, workload: Workload, facts: ModelFacts, hardware: Hardware) -> str | None:
    """Return what TRL's Trainer of the recipe forbids, or why a knob of TRL's does nothing here."""
    recipe, at_once, micro = workload.recipe, config.generation_batch_size, config.per_device_train_batch_size
    if config.precompute_ref_log_probs and (recipe is None or not recipe.kind.precomputes):
        return "precompute_ref_log_probs: nothing here has a reference model that could run beforehand"
    if at_once is not None:
        if recipe is None or not recipe.kind.generates:
            return "generation_batch_size: nothing is generated here"
        if at_once % recipe.generations or at_once % micro:
            return (
                f"{at_once} completions at once are no multiple of {recipe.generations} generations and a micro-batch "
                f"of {micro}"
            )
        if (workload.global_batch_size or 0) % at_once:
            return f"{at_once} completions at once don't divide the global batch of {workload.global_batch_size}"
        if at_once == workload.global_batch_size:
            return f"{at_once} completions at once are all of a step, as they are by default"
    if recipe is None:
        return None
    kind = CHECKPOINTING.get(config.checkpointing)
    if kind is not None and (kind.every > 1 or kind.offload) and (recipe.kind.generates or recipe.kind.precomputes):
        return f"checkpointing {config.checkpointing}: TRL switches it off in each step, and on again for all layers"
    if recipe.name == "kto" and micro < 2:
        return "kto compares the samples of a micro-batch: 2 or more"
    if not config.parallelism.is_single or config.packing:
        return "a recipe is tuned on one device, without packing"
    if config.adapter is not None and config.adapter.kind == "bitfit":
        return "bitfit: TRL takes adapters of peft, which hasn't it"
    if config.precompute_ref_log_probs and config.adapter is not None:
        return "precompute_ref_log_probs: an adapter's own base is the reference, which takes no memory"
    return None


def _lengths_differ(workload: Workload) -> bool:
    return workload.lengths is not None and workload.lengths.minimum < workload.lengths.maximum


def _user_code(config: TrainConfig, workload: Workload, facts: ModelFacts, hardware: Hardware) -> str | None:
    """Return which changed knob the user's own code doesn't admit, and why."""
    code = workload.own_code
    if code is None:
        return None
    for knob, held in code.held.items():
        if getattr(config, knob) != held.value:
            return f"{knob} stays as it is: {held.reason}"
    if not config.parallelism.is_single:
        return "a training of your own is one process on one device"
    for barred in code.barred:
        if getattr(config, barred.knob) == barred.value:
            return f"{barred.knob} {barred.value}: {barred.reason}"
    return None


_RULES: tuple[parallel_rules.Rule, ...] = (
    _micro_batch,
    _precision,
    _tf32,
    _attention,
    _optimizer,
    _checkpointing,
    _compile,
    _experts,
    _routing,
    _liger,
    _allocator,
    adapter_rules.adapter,
    adapter_rules.quantization,
    adapter_rules.chunked_loss,
    _sampling,
    _packing,
    _recipe,
    _user_code,
    *parallel_rules.RULES,
)
