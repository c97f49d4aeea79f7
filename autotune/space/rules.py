"""Rules of legality: configurations that device, installation or model can't run, refused without a trial.

Each rule yields reasons why a configuration is refused, of which the first counts. Rules follow from facts: of device,
model (`ModelFacts`) and techniques. Trials find the rest.
"""

import functools
from collections.abc import Iterable, Iterator

from autotune.space.parallel_rules import RULES as PARALLEL_RULES
from autotune.space.parallel_rules import Rule, accumulates
from autotune.training.adapters import ATTENTION_MODULES, EXPERT_PARAMETERS, IA3_MODULES
from autotune.training.arguments import compiler_refuses_tf32
from autotune.values.config import Precision, TrainConfig
from autotune.values.hardware import TF32_VARIABLE, Hardware
from autotune.values.model import CASTING_IMAGES, CONV1D_TYPES, FLASH_PACKAGES, ModelFacts, Task
from autotune.values.techniques import CHECKPOINTING, OPTIMIZERS, Adapter, PrefixAdapter
from autotune.values.workload import Workload

# Triton compiles kernel launchers in C: https://github.com/triton-lang/triton/blob/main/python/triton/runtime/build.py
_NEEDS_CC = "needs a C compiler on CUDA, with which Triton builds launchers of its kernels (gcc, clang or $CC)"


def refusals(
    config: TrainConfig, workload: Workload, facts: ModelFacts, hardware: Hardware, among: Iterable[Rule] | None = None
) -> Iterator[str]:
    """Yield the first reason of each rule that has one; `among`: of these rules alone."""
    for rule in RULES if among is None else among:
        if (reason := next(rule(config, workload, facts, hardware), None)) is not None:
            yield reason


def _micro_batch(config: TrainConfig, workload: Workload, facts: ModelFacts, hardware: Hardware) -> Iterator[str]:
    try:
        workload.accumulation_steps(config)
    except ValueError as error:
        yield str(error)


def _precision(config: TrainConfig, workload: Workload, facts: ModelFacts, hardware: Hardware) -> Iterator[str]:
    model_type = workload.model.model_type
    if config.precision is Precision.FP16 and hardware.is_cpu:
        yield "fp16 on a CPU silently stays fp32 in the Trainer"
    # https://github.com/huggingface/transformers/pull/10956: activations of the feed-forward leave fp16's range.
    if config.precision is Precision.FP16 and model_type in ("t5", "mt5", "umt5", "longt5", "switch_transformers"):
        yield f"{model_type} overflows in fp16{'; bf16 is wide enough' * hardware.has_bf16}"
    # DeBERTa fills scores of 16 bits with fp32's least number; torch transforms bf16 (FNet) in a CPU's autocast alone.
    in_16_bits = ("deberta",) if hardware.is_cpu and config.precision is Precision.BF16 else ("deberta", "fnet")
    if config.precision is not Precision.FP32 and model_type in in_16_bits:
        yield f"{model_type} in transformers fails in 16 bits; use fp32"
    images = "images" * (workload.task is Task.IMAGE_CLASSIFICATION and model_type not in CASTING_IMAGES)
    if config.precision is Precision.PURE_BF16 and (uncast := "sound" * workload.task.takes_audio or images):
        yield f"{model_type} in transformers does not cast {uncast} to its weights' bf16"
    if config.precision in (Precision.BF16, Precision.PURE_BF16) and not hardware.has_bf16:
        yield f"{hardware.name} has no bf16 (compute capability 8.0 or newer)"
    if config.precision is Precision.FP8:
        if not hardware.has_fp8:
            yield f"{hardware.name} has no products in fp8 (compute capability 8.9 or newer)"
        if "torchao" not in hardware.versions:
            yield "fp8 needs the package torchao"
        if config.torch_compile_backend != "inductor":
            yield "fp8 pays only where inductor fuses its casts (--fix compile=inductor)"
        if config.adapter is not None or workload.own_code is not None or workload.recipe is not None:
            yield "fp8 replaces linear layers of whole models: not beside adapters, in your code or in TRL's trainers"
        if not facts.linear_modules or workload.model.model_type in CONV1D_TYPES:
            yield f"{workload.model.model_type} has no linear layers that could multiply in fp8"


def _tf32(config: TrainConfig, workload: Workload, facts: ModelFacts, hardware: Hardware) -> Iterator[str]:
    if config.tf32 and not hardware.has_tf32:
        yield f"{hardware.name} has no tf32 (Ampere or newer)"
    if hardware.starts_with_tf32 and hardware.has_tf32:
        if not config.tf32:
            yield f"{TF32_VARIABLE} has torch begin with TF32, which the Trainer's arguments don't switch off"
        return
    is_theirs = workload.own_code is not None and "tf32" in workload.own_code.held
    if config.tf32 and compiler_refuses_tf32(config) and not is_theirs:
        yield f"{config.torch_compile_mode} raises in mixed precision where tf32 is asked for: torch mixes interfaces"


def _attention(config: TrainConfig, workload: Workload, facts: ModelFacts, hardware: Hardware) -> Iterator[str]:
    if (kernel := config.attn_implementation) is None:
        return
    if kernel not in facts.attn_implementations:
        yield f"{workload.model.model_type} offers no {kernel} attention"
    if kernel.startswith("flash_attention"):
        if hardware.is_cpu:
            yield "flash attention needs a CUDA device"
        if (package := FLASH_PACKAGES[kernel]) not in hardware.versions:
            yield f"flash attention needs the package {package}"
        if hardware.capability is not None and hardware.capability < (8, 0):
            yield f"flash attention needs compute capability 8.0 or newer (Ampere), which {hardware.name} hasn't"
        if config.precision is Precision.FP32:
            yield "flash attention computes in fp16 or bf16 only"
    if kernel == "flex_attention" and hardware.is_cpu:
        yield "flex attention has no backward on the CPU"
    if kernel == "flex_attention" and not hardware.has_cc:
        yield f"flex attention {_NEEDS_CC}"


def _optimizer(config: TrainConfig, workload: Workload, facts: ModelFacts, hardware: Hardware) -> Iterator[str]:
    row = OPTIMIZERS[config.optim]
    if row.unusable is not None:
        yield f"{config.optim}: {row.unusable}"
    if row.device == "cuda" and hardware.is_cpu:
        paged = "; on the CPU bitsandbytes silently doesn't page" if "paged" in config.optim else ""
        yield f"{config.optim} needs CUDA{paged}"
    if row.package is not None and row.package not in hardware.versions:
        yield f"{config.optim} needs the package {row.package}"
    trains_bf16 = config.precision is Precision.PURE_BF16 and config.mixed_precision == "no"
    if not row.takes_bf16 and trains_bf16 and not hardware.is_cpu:
        yield f"{config.optim}: bitsandbytes has no kernel of it for gradients in bf16"
    if row.compiles and hardware.is_cpu and hardware.cxx is None:
        yield f"{config.optim} compiles its step, which needs a C++ compiler on the CPU (g++)"
    if row.compiles and not hardware.is_cpu and not hardware.has_cc:
        yield f"{config.optim} compiles its step, which {_NEEDS_CC}"
    if row.updates_in_backward and accumulates(config, workload):
        yield f"{config.optim} updates weights during the backward pass, which gradient accumulation forbids"
    if row.targets and not facts.linear_modules:
        yield f"{config.optim} projects the gradients of linear layers, and {workload.model.model_type} has none"
    if row.targets and config.adapter is not None:
        yield f"{config.optim} projects full gradients; an adapter's are low-rank already"


def _checkpointing(config: TrainConfig, workload: Workload, facts: ModelFacts, hardware: Hardware) -> Iterator[str]:
    if config.checkpointing == "none":
        return
    if not facts.supports_checkpointing:
        yield f"{workload.model.model_type} has no activation checkpointing"
    kind = CHECKPOINTING[config.checkpointing]
    if kind.offload and hardware.is_cpu:
        yield "checkpointing offload holds activations in pinned memory of the host, which needs a CUDA device"
    if kind.every > 1 and (facts.layers or kind.every) < kind.every:
        yield f"checkpointing {config.checkpointing}: {workload.model.name} has {facts.layers} layers"


def _compile(config: TrainConfig, workload: Workload, facts: ModelFacts, hardware: Hardware) -> Iterator[str]:
    if config.activation_memory_budget is not None:
        if config.torch_compile_backend != "inductor" or config.checkpointing != "none":
            yield "activation_memory_budget is of models that inductor compiles, without checkpointing"
        if workload.recipe is not None:
            yield "activation_memory_budget: TRL's trainers are not measured with it"
    if config.torch_compile_backend is None and config.torch_compile_mode:
        yield "a mode of torch.compile needs a backend"
    if config.torch_compile_mode is not None and config.torch_compile_backend != "inductor":
        yield f"modes of torch.compile are inductor's; {config.torch_compile_backend} has none"
    if config.torch_compile_backend == "inductor":
        if hardware.is_cpu and hardware.cxx is None:
            yield "inductor needs a C++ compiler on the CPU (g++)"
        if not hardware.is_cpu and "triton" not in hardware.versions:
            yield "inductor needs the package triton on CUDA"
        if not hardware.is_cpu and not hardware.has_cc:
            yield f"inductor {_NEEDS_CC}"
        if hardware.capability is not None and hardware.capability < (7, 0):  # `create_backend` of torch's scheduler
            yield f"inductor needs compute capability 7.0 or newer (Volta), which {hardware.name} hasn't"
        # Where a checkpointed layer runs again, inductor hands efficient attention the learned bias in a layout that it
        # refuses ("(*bias): last dimension must be contiguous"): t5-3b, torch 2.11.
        biased = workload.model.model_type in ("t5", "mt5", "umt5") and config.attn_implementation == "sdpa"
        if biased and not hardware.is_cpu and config.checkpointing != "none":
            yield f"inductor with checkpointing on CUDA breaks the sdpa attention of {workload.model.model_type}"
    if config.torch_compile_backend == "cudagraphs" and hardware.is_cpu:
        yield "cudagraphs does nothing on a CPU"
    # The second micro-step raises "output of CUDAGraphs that has been overwritten".
    if config.records_graphs and not hardware.is_cpu and accumulates(config, workload):
        graphs = f"CUDA graphs ({config.torch_compile_mode or config.torch_compile_backend})"
        yield f"{graphs} overwrite gradients that accumulate; max-autotune-no-cudagraphs records none"


def _experts(config: TrainConfig, workload: Workload, facts: ModelFacts, hardware: Hardware) -> Iterator[str]:
    if (kind := config.experts_implementation) not in (None, *facts.experts_implementations):
        own = f"computes experts in its own way: transformers offers no experts_implementation {kind} for it"
        yield f"{workload.model.model_type} {own if facts.experts else 'has no experts'}"
    for name in ("experts_per_token", "expert_capacity"):
        if getattr(config, name) is not None and getattr(facts, name) is None:
            yield f"{workload.model.model_type} has no {name} to set"
    if (config.experts_per_token or 0) > facts.experts:
        yield f"{config.experts_per_token} experts a token are more than the {facts.experts} of a layer"


def _gpu_alone(config: TrainConfig, workload: Workload, facts: ModelFacts, hardware: Hardware) -> Iterator[str]:
    if config.torch_empty_cache_steps is not None and hardware.is_cpu:
        yield "torch_empty_cache_steps empties the cache of a GPU's allocator; a CPU has none"
    if config.expandable_segments and hardware.is_cpu:
        yield "expandable_segments are of a GPU's allocator; a CPU has none"
    if config.non_blocking and not config.dataloader_pin_memory:
        yield "non_blocking needs dataloader_pin_memory, and a CPU has nothing to copy to"
    theirs = workload.fixed_arguments.get("accelerator_config") or {}
    if config.non_blocking and (theirs if workload.own_code or isinstance(theirs, str) else theirs.get("non_blocking")):
        yield "non_blocking is as your accelerator_config has it"
    if not config.use_liger_kernel:
        return
    if hardware.is_cpu:
        yield "Liger's kernels are written in Triton and need a CUDA device"
    if "liger-kernel" not in hardware.versions:
        yield "use_liger_kernel needs the package liger-kernel"
    if not hardware.has_cc:
        yield f"use_liger_kernel {_NEEDS_CC}"
    if not facts.liger:
        yield f"liger-kernel has no kernels for {workload.model.model_type}; the Trainer would silently go without"
    if config.torch_compile_backend is not None:
        yield "Liger's kernels fail when they are compiled, or give a wrong loss (Liger-Kernel issues 1327, 1338)"


def _adapter(config: TrainConfig, workload: Workload, facts: ModelFacts, hardware: Hardware) -> Iterator[str]:
    found, model_type, linear = config.adapter, workload.model.model_type, facts.linear_modules
    if found is None:
        return
    if workload.task is Task.IMAGE_TEXT_TO_TEXT and found.kind in ("vera", "bitfit"):
        yield f"{found.kind} can't be kept out of the vision part of {model_type}; lora can"
    if found.prompt_length:
        yield from _prompt(found, config, workload, facts)
        return
    if found.kind == "bitfit":
        if facts.biases == 0:
            yield f"bitfit trains biases, and {model_type} has none"
        return
    if not linear:
        yield f"{model_type} has no linear layers for {found.kind}"
    if found.kind == "ia3" and not _any_named(linear, IA3_MODULES):
        yield f"no layer of {model_type} is known to ia3 as keys, values or feed-forward"
    if found.kind in ("loha", "lokr") and model_type in CONV1D_TYPES:
        yield f"peft's {found.kind} doesn't know the layers of {model_type}; its lora does"
    targets = getattr(found, "target_modules", None)
    if targets == "attention" and not _any_named(linear, ATTENTION_MODULES):
        yield f"no layer of {model_type} is known as a projection of attention; use all-linear"
    # peft's LoRA adapts the fused experts of these models with all-linear too, as when experts were linear layers.
    has_experts = _any_named(facts.expert_parameters, EXPERT_PARAMETERS)
    is_lora = found.kind in ("lora", "rslora", "dora")
    if targets == "all-linear+experts" or (targets == "all-linear" and is_lora and has_experts):
        if not has_experts:
            yield f"{model_type} has no experts whose weights are fused; use all-linear"
        if found.kind not in ("lora", "rslora"):  # which alone take peft's target_parameters
            yield f"peft's {found.kind} can't be put on the fused weights of experts (its lora can); use attention"
        if getattr(found, "dropout", 0.0):
            yield f"peft's {found.kind} on the fused weights of experts has no dropout (--fix adapter-dropout=0)"


def _quantization(config: TrainConfig, workload: Workload, facts: ModelFacts, hardware: Hardware) -> Iterator[str]:
    if config.quantization is None:
        return
    if config.adapter is None:
        yield f"{config.quantization} weights can't be trained, only an adapter on them (--fix adapter=lora)"
    elif config.adapter.kind in ("loha", "lokr", "bitfit", "own"):
        yield f"{config.adapter.kind} can't be trained on {config.quantization} weights; lora can"
    if "bitsandbytes" not in hardware.versions:
        yield f"{config.quantization} weights need the package bitsandbytes"
    if not facts.linear_modules:
        yield f"{workload.model.model_type} has no linear layers that bitsandbytes could quantize"


def _prompt(found: Adapter, config: TrainConfig, workload: Workload, facts: ModelFacts) -> Iterator[str]:
    model, task = workload.model, workload.task
    # The wrappers of these in peft handle the labels of virtual tokens (peft.TaskType).
    if task not in (Task.CAUSAL_LM, Task.SEQ2SEQ_LM, Task.SEQUENCE_CLASSIFICATION):
        yield f"peft has no {found.kind} for {task}"
    longest, length = facts.max_sequence_length, workload.sequence_length
    if longest is not None and length + found.prompt_length > longest:
        room = f"{length} tokens and {found.prompt_length} virtual ones"
        yield f"{found.kind}: {room} are more than the {longest} positions of {model.name}"
    if isinstance(found, PrefixAdapter):
        if facts.takes_prefix is False:
            yield f"{model.model_type} takes no keys and values from outside for {task}, which prefix needs"
        if config.checkpointing != "none":
            yield "prefix needs the cache of keys and values, which checkpointing takes away"
    elif task is Task.SEQUENCE_CLASSIFICATION and model.kind != "encoder":
        yield f"{model.model_type} finds the end of a sample by its token ids, which {found.kind} takes away"


@functools.cache  # asked of every configuration, and always of the same
def _any_named(names: tuple[str, ...], known: tuple[str, ...]) -> bool:
    """Return whether one of `names`, last components of module names, equals or ends one of `known`."""
    ends = {name.rpartition(".")[2] for name in known} | set(known)
    return any(name in ends for name in names)


def _chunked_loss(config: TrainConfig, workload: Workload, facts: ModelFacts, hardware: Hardware) -> Iterator[str]:
    if not config.chunked_loss:
        return
    if workload.recipe is not None:
        yield "chunked_loss: TRL works out the loss of a recipe itself"
    if not facts.chunks_loss:
        yield f"chunked_loss: the loss of {workload.model.model_type} isn't that of a linear head's logits alone"
    if config.use_liger_kernel:
        yield "chunked_loss: Liger's kernels have it already"
    if workload.fixed_arguments.get("label_smoothing_factor"):
        yield "chunked_loss: label_smoothing_factor is worked out from all logits"
    spread = config.parallelism
    # FSDP2 has the last unit, of the norm and the head, gathered until its backward pass.
    if spread.tensor_parallel > 1 or spread.sharding == "zero_3" or spread.wrapping == "size":
        yield "chunked_loss: the head's weights are in parts, which are gathered for the head alone"


_ONE_LENGTH = "the samples have one length, or lengths that aren't known (--data reads yours)"


def _sampling(config: TrainConfig, workload: Workload, facts: ModelFacts, hardware: Hardware) -> Iterator[str]:
    if config.train_sampling_strategy in ("random", "sequential"):
        return
    said = "balancing by tokens" if config.is_balanced else "grouping by length"
    if not (workload.lengths and workload.lengths.differ):
        yield f"{said}: {_ONE_LENGTH}"
    if config.packing:
        yield f"packed batches have no padding that {said} could save"
    if config.is_balanced and not accumulates(config, workload):
        yield f"{said} moves samples between the micro-batches of a step, which has one"
    if config.is_balanced and config.parallelism.data_parallel != config.parallelism.world_size:
        yield f"{said}: transformers' sampler deals samples out to all ranks, of which some should have the same"
    if workload.recipe is not None or (config.is_balanced and workload.is_users_own):
        yield f"{said} is tried with the models' own training alone, without code of yours or a recipe"


def _packing(config: TrainConfig, workload: Workload, facts: ModelFacts, hardware: Hardware) -> Iterator[str]:
    if not config.packing or workload.own_code is not None:
        return
    if workload.task is not Task.CAUSAL_LM:
        yield f"packing joins the texts of causal models; the task is {workload.task}"
    if not (workload.lengths and workload.lengths.differ):
        yield f"packing: {_ONE_LENGTH}"
    if not facts.packs:
        yield f"packing: {workload.model.model_type} lets the samples of a row see each other"
    if config.attn_implementation == "eager":
        yield "packing with eager attention would hold the scores of every sample against all others"
    if config.adapter is not None and config.adapter.prompt_length:
        yield f"packing: {config.adapter.kind} puts its virtual tokens before a row, not before each sample"


def _padding(config: TrainConfig, workload: Workload, facts: ModelFacts, hardware: Hardware) -> Iterator[str]:
    if config.pad_to_multiple_of is None:
        return
    if not (workload.lengths and workload.lengths.differ):
        yield f"pad_to_multiple_of: {_ONE_LENGTH}"
    if config.packing:
        yield "packed batches have no padding to a multiple"
    if workload.generates:
        yield "pad_to_multiple_of: TRL pads what it has generated by itself"
    longest, most = workload.lengths.maximum if workload.lengths else 0, facts.max_sequence_length
    padded = -(-longest // config.pad_to_multiple_of) * config.pad_to_multiple_of
    if most is not None and padded > most:
        yield f"samples of {longest} tokens padded to {padded} exceed the {most} positions of {workload.model.name}"


def _recipe(config: TrainConfig, workload: Workload, facts: ModelFacts, hardware: Hardware) -> Iterator[str]:
    recipe, at_once, micro = workload.recipe, config.generation_batch_size, config.per_device_train_batch_size
    if config.precompute_ref_log_probs and (recipe is None or not recipe.kind.precomputes):
        yield "precompute_ref_log_probs: nothing here has a reference model that could run beforehand"
    if at_once is not None:
        if recipe is None or not recipe.kind.generates:
            yield "generation_batch_size: nothing is generated here"
        elif at_once % recipe.generations or at_once % micro:
            both = f"{recipe.generations} generations and a micro-batch of {micro}"
            yield f"{at_once} completions at once are no multiple of {both}"
        if (workload.global_batch_size or 0) % at_once:
            yield f"{at_once} completions at once don't divide the global batch of {workload.global_batch_size}"
        if at_once == workload.global_batch_size:
            yield f"{at_once} completions at once are all of a step, as they are by default"
    if recipe is None:
        return
    kind = CHECKPOINTING.get(config.checkpointing)
    if kind is not None and (kind.every > 1 or kind.offload) and (recipe.kind.generates or recipe.kind.precomputes):
        yield f"checkpointing {config.checkpointing}: TRL switches it off in each step, and on again for all layers"
    if recipe.name == "kto" and micro < 2:
        yield "kto compares the samples of a micro-batch: 2 or more"
    if not config.parallelism.is_single or config.packing:
        yield "a recipe is tuned on one device, without packing"
    if config.quantization is not None and config.precision is Precision.FP16:
        yield f"{config.quantization}: TRL trains adapters on it in bf16, whose gradients fp16's loss scaler refuses"
    adapter = config.adapter and config.adapter.kind
    if adapter == "bitfit":
        yield "bitfit: TRL takes adapters of peft, which hasn't it"
    if adapter == "vera" and config.quantization and (recipe.kind.generates or config.mixed_precision == "no"):
        yield f"vera on {config.quantization}: TRL casts a part of its weights to bf16 and computes without autocast"
    if config.precompute_ref_log_probs and adapter is not None:
        yield "precompute_ref_log_probs: an adapter's own base is the reference, which takes no memory"


def _user_code(config: TrainConfig, workload: Workload, facts: ModelFacts, hardware: Hardware) -> Iterator[str]:
    if (code := workload.own_code) is None:
        return
    for knob, held in code.held.items():
        if getattr(config, knob) != held.value:
            yield f"{knob} stays as it is: {held.reason}"
    if config.parallelism.tensor_parallel > 1:
        yield "tensor parallel: your code makes its model by itself, and transformers shards one while it makes it"
    for barred in code.barred:
        if getattr(config, barred.knob) == barred.value:
            yield f"{barred.knob} {barred.value}: {barred.reason}"


RULES: tuple[Rule, ...] = (
    _micro_batch, _precision, _tf32, _attention, _optimizer, _checkpointing, _compile, _experts, _gpu_alone, _adapter,
    _quantization, _chunked_loss, _sampling, _packing, _padding, _recipe, _user_code, *PARALLEL_RULES,
)  # fmt: skip

# Those that a baseline may break and train.
OF_OWN_WAYS = (_sampling, _user_code)

# Those whose reasons depend on the size of the micro-batch, by which gradients accumulate or not; and all others.
OF_MICRO_BATCHES = (_micro_batch, _optimizer, _compile, _sampling, _recipe, _user_code)
OF_THE_REST = tuple(rule for rule in RULES if rule not in OF_MICRO_BATCHES)
