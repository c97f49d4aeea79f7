"""Rules of legality for several devices; a part of `rules`.

They hold for torch 2.13, transformers 5.23, accelerate 1.15 and DeepSpeed 0.19.
"""

from collections.abc import Callable, Iterator, Mapping

from autotune.training.arguments import FSDP_KINDS, UNIT_PARAMETERS, ZERO_STAGES, transformers_version
from autotune.values.config import OF_DDP, Precision, TrainConfig
from autotune.values.hardware import Hardware
from autotune.values.model import ModelFacts, Task
from autotune.values.techniques import OPTIMIZERS
from autotune.values.workload import Workload

# Yields reasons why a configuration can't run, of which the first counts.
Rule = Callable[[TrainConfig, Workload, ModelFacts, Hardware], Iterator[str]]


def _devices(config: TrainConfig, workload: Workload, facts: ModelFacts, hardware: Hardware) -> Iterator[str]:
    spread = config.parallelism
    if spread.model_parallel > 1 and workload.own_step is None:
        yield "model parallel is for a loop of your own (find(step=...)), which shares a sample in its own way"
    if spread.world_size % spread.shared_by:
        degrees = ((name, getattr(spread, f"{name}_parallel")) for name in ("tensor", "sequence", "model"))
        together = " x ".join(f"{name} parallel {degree}" for name, degree in degrees if degree > 1)
        yield f"{together} does not divide the {spread.world_size} devices"
    if hardware.count is not None and spread.world_size > hardware.count:
        yield f"{spread.world_size} devices are more than the {hardware.count} that a trial may use (--devices)"
    nodes, each = hardware.nodes_of(spread.world_size)
    if nodes > 1 and each % spread.tensor_parallel:
        yield f"tensor parallel {spread.tensor_parallel} stays within a machine, and does not divide its {each} devices"
    if spread.world_size > 1 and OPTIMIZERS[config.optim].updates_in_backward:
        yield f"{config.optim} updates weights in the backward pass, before ranks have added up their gradients"


def _idle_knobs(config: TrainConfig, workload: Workload, facts: ModelFacts, hardware: Hardware) -> Iterator[str]:
    spread = config.parallelism
    is_ddp = spread.sharding == "none" and spread.data_parallel > 1 and spread.tensor_parallel == 1
    if not is_ddp and any(getattr(spread, name) is not None for name in OF_DDP):
        yield f"{', '.join(OF_DDP)} are DDP's: several devices without sharding"
    if spread.wrapping != "layers" and spread.sharding not in FSDP_KINDS:
        yield "wrapping is FSDP's"
    if spread.replicas > 1 and (spread.sharding not in FSDP_KINDS or spread.tensor_parallel > 1):
        yield "replicas are FSDP's, without tensor parallel"
    elif spread.replicas > 1 and (spread.data_parallel % spread.replicas or spread.data_parallel == spread.replicas):
        yield f"{spread.replicas} replicas don't share {spread.data_parallel} devices equally, with several for each"
    if spread.offload != "none" and spread.sharding == "none":
        yield f"offload of {spread.offload} is FSDP's and DeepSpeed's: it needs sharding (--fix sharding=zero_3)"
    if spread.sharding != "none" and spread.sharding_ranks == 1 and spread.offload == "none":
        yield f"{spread.sharding} has nothing to split: there is one data-parallel rank"


def accumulates(config: TrainConfig, workload: Workload) -> bool:
    together = config.per_device_train_batch_size * config.parallelism.data_parallel
    return workload.global_batch_size is not None and workload.global_batch_size > together


def _fsdp(config: TrainConfig, workload: Workload, facts: ModelFacts, hardware: Hardware) -> Iterator[str]:
    spread = config.parallelism
    if spread.sharding not in FSDP_KINDS:
        return
    if hardware.is_cpu:
        yield "FSDP on a CPU: accelerate knows it on accelerators alone, and the Trainer would silently run DDP"
    if spread.offload == "optimizer":
        yield "FSDP offloads weights, gradients and optimizer states together (--fix offload=parameters)"
    if facts.not_fsdp is not None:
        yield f"FSDP: {workload.model.model_type}: {facts.not_fsdp}"
    if config.quantization is not None:
        yield f"FSDP: accelerate leaves packed weights ({config.quantization}) unsharded, so nothing would be saved"
    if spread.wrapping == "size":
        if config.checkpointing == "full":
            yield "FSDP checkpoints its units, and those by size lie within each other"
        if facts.layers and facts.parameters // facts.layers <= UNIT_PARAMETERS:
            millions = UNIT_PARAMETERS // 10**6
            yield f"FSDP: no layer of {workload.model.name} has the {millions} million parameters of a unit by size"
    yield from _on_shards(config, "FSDP")


def _on_shards(config: TrainConfig, of: str) -> Iterator[str]:
    row = OPTIMIZERS[config.optim]
    # Optimizers that update element by element with torch's own operations, so that they work on shards.
    if config.optim in {"adamw_torch", "adamw_torch_fused", "sgd", "adagrad", "rmsprop"}:
        return
    if row.package == "bitsandbytes":
        yield f"{of}: {config.optim}: bitsandbytes' kernels take plain tensors, and shards are DTensors"
    if row.targets or config.optim == "adafactor":
        yield f"{of}: {config.optim} works on whole matrices, of which a rank has a shard"
    yield f"{of}: {config.optim} is not known to update shards; adamw_torch_fused does"


def _zero(config: TrainConfig, workload: Workload, facts: ModelFacts, hardware: Hardware) -> Iterator[str]:
    spread = config.parallelism
    stage = ZERO_STAGES.get(spread.sharding)
    if stage is None:
        return
    if "deepspeed" not in hardware.versions:
        yield f"{spread.sharding} needs the package deepspeed"
    if hardware.is_cpu and hardware.cxx is None:
        yield f"{spread.sharding}: DeepSpeed compiles what it needs on a CPU, which takes a C++ compiler (g++)"
    if config.precision is Precision.PURE_BF16:
        yield "DeepSpeed keeps fp32 masters of bf16 weights: that is precision bf16, not pure_bf16"
    if spread.tensor_parallel > 1:
        yield "tensor parallel by transformers' plan goes with FSDP, not with DeepSpeed"
    if config.quantization is not None and stage == 3:
        packed = f"packed ones ({config.quantization})"
        yield f"zero_3 splits every weight, which {packed} can't be; zero_2 leaves them whole"
    if config.torch_compile_backend is not None:
        yield "torch.compile under DeepSpeed goes through its engine, which the Trainer's trial can't verify"
    if spread.offload == "parameters" and stage < 3:
        yield f"{spread.sharding} keeps whole weights on each device; zero_3 can offload them"
    # Those that accelerate replaces by DeepSpeed's for the host (`map_pytorch_optim_to_deepspeed`). For Adagrad it
    # fails, since it passes an argument that DeepSpeed's lacks.
    if spread.offload != "none" and config.optim not in ("adamw_torch", "adamw_torch_fused"):
        yield f"DeepSpeed's optimizer of the host stands in for torch's AdamW, not for {config.optim}"
    if OPTIMIZERS[config.optim].package != "bitsandbytes":
        yield from _on_shards(config, "DeepSpeed")


def _tensor(config: TrainConfig, workload: Workload, facts: ModelFacts, hardware: Hardware) -> Iterator[str]:
    spread, degree = config.parallelism, config.parallelism.tensor_parallel
    if degree == 1:
        return
    if transformers_version(hardware) < (5, 23):  # its `DistributedConfig` grew these degrees over several versions
        yield "tensor parallel needs transformers 5.23"
    if hardware.is_cpu:
        yield "tensor parallel on a CPU: accelerate refuses it through the Trainer (ParallelismConfig and MULTI_CPU)"
    if facts.tensor_parallel_heads is None:
        yield f"transformers has no tensor-parallel plan for {workload.model.model_type}"
    elif facts.tensor_parallel_heads % degree:
        yield f"tensor parallel {degree} does not divide the {facts.tensor_parallel_heads} heads of a layer"
    if spread.data_parallel > 1 and spread.sharding != "fsdp_full":
        yield f"tensor parallel {degree} on {spread.world_size} devices goes with fsdp_full for the rest of them"
    if spread.wrapping != "layers":
        yield "tensor parallel beside FSDP goes by transformers' own plan of units, layer by layer"
    changed: dict[str, object] = {"an adapter": config.adapter, "packed weights": config.quantization}
    changed |= {"Liger's kernels": config.use_liger_kernel, "torch.compile": config.torch_compile_backend}
    reason = "transformers' plan is for the model's own layers as they are"
    yield from (f"tensor parallel with {other}: {reason}" for other, asked in changed.items() if asked)
    yield from _on_shards(config, "tensor parallel")


def _sequence(config: TrainConfig, workload: Workload, facts: ModelFacts, hardware: Hardware) -> Iterator[str]:
    spread, degree = config.parallelism, config.parallelism.sequence_parallel
    if degree == 1:
        return
    named = f"sequence parallel {degree}"
    if workload.task is not Task.CAUSAL_LM:
        yield f"{named} shares the tokens of causal models; the task is {workload.task}"
    if spread.sharding not in (*ZERO_STAGES, *FSDP_KINDS):
        yield f"{named} goes with FSDP (--fix sharding=fsdp_full) or DeepSpeed's ZeRO (--fix sharding=zero_3)"
    if spread.tensor_parallel > 1:
        yield f"{named} has groups beside data parallelism alone, without tensor parallel"
    parts = 2 * degree if spread.context_parallel > 1 else degree  # in a ring each device has an early and a late part
    if workload.sequence_length % parts:
        yield f"{named} does not divide the {workload.sequence_length} tokens of a sample into {parts} parts"
    if workload.dataset is not None:  # the Trainer weighs micro-batches alike, or parts of a sample must be alike
        yield f"{named}: samples must have one length"
    yield from (_context_parallel if spread.context_parallel > 1 else _ulysses)(config, workload, facts, hardware)
    yield from _untried(named, {"a Trainer of TRL's": workload.recipe, "your own code": workload.is_users_own})


def _untried(named: str, others: Mapping[str, object]) -> Iterator[str]:
    yield from (f"{named}: {other} has not been run so" for other, asked in others.items() if asked)


def _context_parallel(config: TrainConfig, workload: Workload, facts: ModelFacts, hardware: Hardware) -> Iterator[str]:
    spread, named = config.parallelism, f"sequence parallel {config.parallelism.context_parallel} beside FSDP"
    if hardware.is_cpu:
        yield f"{named}: torch passes keys and values on around its attention for CUDA alone"
    if config.attn_implementation != "sdpa":
        yield f"{named}: the Trainer takes sdpa alone, not {config.attn_implementation}"
    # In fp32 torch takes its math kernel for grouped keys, which fails on shared tokens.
    if config.precision is Precision.FP32 or (hardware.capability or (0, 0)) < (8, 0):
        yield f"{named} goes around flash attention: 16 bits, and compute capability 8.0 or higher"
    if not facts.has_self_attn:
        yield f"{named}: accelerate knows attention by the name self_attn, which this model's doesn't have"
    if _has_windows(workload):
        yield f"{named}: accelerate refuses layers that attend to a window"
    untried = {"torch.compile": config.torch_compile_backend, "packed weights": config.quantization}
    yield from _untried(named, {**untried, "replicas": spread.replicas > 1})


def _ulysses(config: TrainConfig, workload: Workload, facts: ModelFacts, hardware: Hardware) -> Iterator[str]:
    spread, heads, degree = config.parallelism, facts.tensor_parallel_heads, config.parallelism.sequence_parallel
    named = f"sequence parallel {degree}"
    if spread.sharding != "zero_3":
        yield f"{named}: beside {spread.sharding} DeepSpeed makes gradients {degree} times as large; zero_3 is right"
    if config.attn_implementation != "sdpa":
        yield f"{named}: DeepSpeed has been run around sdpa, not around {config.attn_implementation}"
    if not facts.counts_keys:
        yield f"{named}: DeepSpeed reads num_key_value_heads, which configs of {workload.model.model_type} don't have"
    if heads is None or heads % degree:
        yield f"{named} does not divide the heads of a layer ({heads or 'unknown'})"
    if hardware.is_cpu and spread.data_parallel > 1:
        yield f"{named}: over gloo torch can't gather losses in a group without rank 0 (on a CPU all ranks may share)"
    if _has_windows(workload):
        yield f"{named}: DeepSpeed drops the mask of sdpa, which keeps layers to their window"
    untried = {"offload": spread.offload != "none", "an adapter": config.adapter, "Liger": config.use_liger_kernel}
    yield from _untried(named, untried)


def _has_windows(workload: Workload) -> bool:
    model = workload.model.config
    if "layer_types" in model:
        return bool(set(model["layer_types"] or ()) - {"full_attention"})
    return bool(model.get("sliding_window") and model.get("use_sliding_window", True))


RULES: tuple[Rule, ...] = (_devices, _idle_knobs, _fsdp, _zero, _tensor, _sequence)
