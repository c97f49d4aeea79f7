"""Checks of what the model is made of, and of how samples are cut: a part of `effects`.

The adapter that was asked for is the one that is trained, on weights packed as was asked for; experts and fused kernels
are the chosen ones; and the model is spread over devices as was asked for. Much of the last can fail silently: ranks
that train copies of their own, FSDP that becomes DDP, weights too small to be split. So the model's wrapper and the
shards themselves are looked at. Each check returns what was seen, or raises NoEffectError.
"""

from __future__ import annotations

import functools
from collections import Counter
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from transformers.trainer_pt_utils import BatchRebalanceSampler

from autotune.errors import NoEffectError
from autotune.training.adapters import BITFIT, CLASSIFICATION_HEADS, adapter_arguments
from autotune.training.loss import base_model
from autotune.training.parallel_arguments import FSDP_KINDS, ZERO_STAGES
from autotune.training.random_weights import quantization_of, quantized_layers
from autotune.values.adapters import is_new_weight
from autotune.values.config import Parallelism, Precision, TrainConfig

# What of an adapter's arguments peft resolves to names of its own.
_RESOLVED = {"target_modules", "target_parameters", "feedforward_modules"}

# What steps in for AdamW where DeepSpeed offloads its states.
_ADAM_OF_THE_HOST = "deepspeed.ops.adam.cpu_adam.DeepSpeedCPUAdam"

# Shards are padded, and DeepSpeed keeps small parameters whole: a rank may hold so much more than its part.
_SLACK = 1.5


def require(is_in_effect: object, seen: str) -> None:
    """Raise NoEffectError, which says what was seen, unless a setting is in effect."""
    if not is_in_effect:
        raise NoEffectError(seen)


def adapter(config: TrainConfig, model: Any) -> str:
    """Return what is trained."""
    sizes = [(name, p.numel()) for name, p in model.named_parameters() if p.requires_grad]
    trained, total = sum(size for _, size in sizes), sum(p.numel() for p in model.parameters())
    new = sum(size for name, size in sizes if is_new_weight(name))
    if config.adapter is None:
        require(not new, f"no adapter was asked for, but {new} parameters of adapters are trained")
        return f"none, {trained} parameters trained"
    kind = config.adapter.kind
    arguments = adapter_arguments(config.adapter)
    if arguments["peft_type"] == BITFIT:
        return f"{kind}, {_trained_biases(model)} biases among {trained} parameters trained"
    require(trained != total, f"{kind} was asked for, but {trained} of {total} parameters are trained")
    require(new, f"{kind} was asked for, but no adapter is trained")
    for name in arguments.keys() - _RESOLVED:  # peft's own config has all that was asked for
        actual, wanted = getattr(model.active_peft_config, name), arguments[name]
        require(actual == wanted, f"{kind} was asked for, but {name} is {actual}, not {wanted}")
    return f"{kind}, {trained} of {total} parameters trained"


def _trained_biases(model: nn.Module) -> int:
    """Return how many biases are trained, and nothing else but the head of a classifier."""
    trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    biases = [p.numel() for name, p in trained if name.endswith("bias")]
    others = [n for n, _ in trained if not n.endswith("bias") and n.split(".")[0] not in CLASSIFICATION_HEADS]
    require(biases and not others, f"bitfit was asked for, but {others[0] if others else 'nothing'} is trained")
    return sum(biases)


def quantization(config: TrainConfig, model: nn.Module) -> str:
    """Return how base weights are packed."""
    wanted = config.quantization
    layers = Counter(quantization_of(layer) for _, layer in quantized_layers(model))
    kinds = "/".join(layers) or "not quantized"
    if wanted is None:
        require(not layers, f"no quantized weights were asked for, but those of layers are {kinds}")
        return "none"
    require(set(layers) == {wanted}, f"{wanted} weights were asked for, but they are {kinds}")
    for name, layer in quantized_layers(model):
        is_packed = layer.weight.dtype in (torch.uint8, torch.int8)
        require(is_packed, f"{wanted} weights were asked for, but those of {name} are not packed")
    return f"{wanted} in {layers[wanted]} layers"


def experts(config: TrainConfig, model: Any) -> str:
    """Return the implementation of the experts; their number per token and capacity are checked, too."""
    base = base_model(model)
    text = base.config.get_text_config() if hasattr(base, "config") else None  # a user's module has none
    for name, field in (("experts_per_token", "num_experts_per_tok"), ("expert_capacity", "expert_capacity")):
        wanted, actual = getattr(config, name), getattr(text, field, None)
        require(wanted in (None, actual), f"{name} {wanted} was asked for, but the model has {actual}")
    if config.experts_implementation is None:
        return "none to choose"
    wanted, actual = config.experts_implementation, getattr(text, "_experts_implementation", None)
    require(actual == wanted, f"experts {wanted} were asked for, but {actual} ran")
    return str(actual)


def liger(config: TrainConfig, model: nn.Module) -> str:
    """Return how many modules run Liger's kernels."""

    def is_liger(module: nn.Module) -> bool:
        forward = getattr(module.forward, "__func__", module.forward)
        return "liger_kernel" in type(module).__module__ or "liger_kernel" in getattr(forward, "__module__", "")

    patched = sum(map(is_liger, model.modules()))
    asked = "was asked for" if config.use_liger_kernel else "was not asked for"
    require(bool(patched) == config.use_liger_kernel, f"Liger {asked}, but {patched} modules run its kernels")
    return f"{patched} modules" if patched else "none"


def chunked_loss(config: TrainConfig, model: Any) -> str:
    """Return whether the head leaves hidden states to the loss."""
    is_chunked = isinstance(vars(base_model(model)).get("_loss_function"), functools.partial)
    wanted = config.chunked_loss
    require(is_chunked == wanted, f"chunked_loss {wanted} was asked for, but it is {is_chunked}")
    return "in chunks" if is_chunked else "of all logits"


def activations(config: TrainConfig) -> str:
    """Return which share of its activations a compiled model keeps."""
    from torch._functorch import config as partitioning

    wanted = 1.0 if config.activation_memory_budget is None else config.activation_memory_budget
    share = partitioning.activation_memory_budget
    require(share == wanted, f"activation_memory_budget {wanted:g} was asked for, but it is {share:g}")
    return f"{share:.0%} kept" if config.activation_memory_budget is not None else "all kept"


def segments(config: TrainConfig, *, is_cpu: bool) -> str:
    """Return how many of the allocator's segments are expandable."""
    found = [] if is_cpu else torch.cuda.memory_snapshot()  # type: ignore[no-untyped-call]
    expandable = sum(segment["is_expandable"] for segment in found)
    asked = "was asked for" if config.expandable_segments else "was not asked for"
    seen = f"expandable_segments {asked}, but {expandable} of {len(found)} segments are"
    require(bool(expandable) == config.expandable_segments, seen)
    return f"{expandable} of {len(found)}" if expandable else "none"


def parallelism(config: TrainConfig, trainer: Any, model: nn.Module) -> str:
    """Return how the training was spread."""
    spread = config.parallelism
    ranks = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
    wanted, known = spread.world_size, trainer.args.world_size
    seen = f"{wanted} devices were asked for, but {ranks} ranks ran, of which the Trainer knew {known}"
    require(ranks == wanted == known, seen)
    wrapper = getattr(trainer.model_wrapped, "_orig_mod", trainer.model_wrapped)
    if spread.tensor_parallel > 1:
        return _tensor(spread, model)
    if spread.sharding in ZERO_STAGES:
        return _zero(spread, wrapper)
    if spread.sharding in FSDP_KINDS:
        return _fsdp(spread, wrapper, trainer)
    return _ddp(spread, wrapper)


def _ddp(spread: Parallelism, wrapper: Any) -> str:
    kind = type(wrapper).__name__
    is_ddp = isinstance(wrapper, DistributedDataParallel)
    if spread.world_size == 1:
        is_split = is_ddp or any(isinstance(p, DTensor) for p in wrapper.parameters())
        require(not is_split, f"one device was asked for, but the model is wrapped as {kind}")
        return "one device"
    require(is_ddp, f"{spread.world_size} copies were to be kept alike by DDP, but the model is a {kind}")
    wanted, actual = spread.ddp_static_graph, wrapper.static_graph
    require(wanted == bool(actual), f"a static graph {wanted} was asked for, but it is {actual}")
    cap_mb, bucket_mb = spread.ddp_bucket_cap_mb, wrapper.bucket_bytes_cap / (1 << 20)
    require(cap_mb in (None, bucket_mb), f"buckets of {cap_mb} MB were asked for, but they are of {bucket_mb:g}")
    return f"DDP over {spread.world_size}, buckets of {bucket_mb:g} MB{', static graph' * spread.ddp_static_graph}"


def _fsdp(spread: Parallelism, wrapper: nn.Module, trainer: Any) -> str:
    units, asked = _units(wrapper), f"{spread.sharding} was asked for"
    require(units, f"{asked}, but the model is wrapped as {type(wrapper).__name__}")
    for name, parameter in wrapper.named_parameters():
        require(isinstance(parameter, DTensor), f"{asked}, but {name} is not split")
    plugin = trainer.accelerator.state.fsdp_plugin
    reshards, policy = plugin.reshard_after_forward, plugin.cpu_offload
    require(bool(reshards) == (spread.sharding == "fsdp_full"), f"{asked}, but reshard_after_forward={reshards}")
    offloads = type(policy).__name__ == "CPUOffloadPolicy"
    is_as_asked = offloads == (spread.offload == "parameters")
    require(is_as_asked, f"offload of {spread.offload} was asked for, but the policy is {policy}")
    # Embedding and head are units in any case.
    layers = (module for module in wrapper.modules() if isinstance(module, nn.ModuleList))
    require(any(map(_units, layers)), f"units of {spread.wrapping} were asked for, but no layer is a unit of its own")
    _check_share(_local_share(wrapper), spread.data_parallel)
    return f"FSDP2 over {spread.data_parallel}, {units} units{', offloaded' * offloads}"


def _units(model: nn.Module) -> int:
    from torch.distributed.fsdp import FSDPModule

    return sum(isinstance(module, FSDPModule) for module in model.modules())


def _zero(spread: Parallelism, engine: Any) -> str:
    stage, kind, asked = ZERO_STAGES[spread.sharding], type(engine).__name__, f"{spread.sharding} was asked for"
    require(kind == "DeepSpeedEngine", f"{asked}, but the model is wrapped as {kind}")
    ran = engine.zero_optimization_stage()
    require(ran == stage, f"{asked}, but the stage is {ran}")
    actual = (_device_of(engine.zero_offload_optimizer()), _device_of(engine.zero_offload_param()))
    wanted = (
        "cpu" if spread.offload != "none" else "none",
        "cpu" if spread.offload == "parameters" else "none",
    )
    require(actual == wanted, f"optimizer and parameters were to be offloaded to {wanted}, but are to {actual}")
    _check_share(_zero_share(engine, stage), spread.sharding_ranks)
    degree, shared = spread.sequence_parallel, engine.sequence_parallel_size
    require(shared == degree, f"sequence parallel {degree} was asked for, but it is {shared}")
    place = "" if spread.offload == "none" else f", {spread.offload} offloaded to the host"
    beside = f", sequence parallel {shared}" if shared > 1 else ""
    return f"DeepSpeed ZeRO-{stage} over {spread.sharding_ranks}{beside}{place}"


def _zero_share(engine: Any, stage: int) -> float:
    """Return which part this rank holds of what its stage splits: optimizer states, and weights with stage 3."""
    parameters = [p for p in engine.module.parameters() if p.requires_grad]
    if stage == 3:
        return float(sum(p.ds_tensor.numel() for p in parameters) / sum(p.ds_numel for p in parameters))
    held = sum(tensor.numel() for tensor in engine.optimizer.single_partition_of_fp32_groups)
    return float(held / sum(p.numel() for p in parameters))


def _device_of(offload: Any) -> str:
    """Return where a part of DeepSpeed's configuration offloads to: 'none' or 'cpu'."""
    device = getattr(offload, "device", None)
    return "none" if device is None else str(getattr(device, "value", device))


def _tensor(spread: Parallelism, model: Any) -> str:
    wanted, degree = spread.tensor_parallel, getattr(model, "_tp_size", None)
    require(degree == wanted, f"tensor parallel {wanted} was asked for, but it is {degree}")
    share = _local_share(model)
    _check_share(share, 2)  # what the plan doesn't name stays whole
    if spread.data_parallel > 1:
        _check_share(share, spread.data_parallel)
    beside = f", FSDP2 over {spread.data_parallel}" if spread.data_parallel > 1 else ""
    return f"tensor parallel {degree}{beside}"


def _local_share(model: nn.Module) -> float:
    """Return which part of all weights lies on this rank."""
    held = sum(p.to_local().numel() if isinstance(p, DTensor) else p.numel() for p in model.parameters())
    return held / sum(p.numel() for p in model.parameters())


def _check_share(share: float, ranks: int) -> None:
    """Raise NoEffectError if a rank holds far more than its part."""
    is_split = ranks == 1 or share <= min(_SLACK / ranks, 0.99)
    require(is_split, f"{ranks} ranks were to split it, but this one holds {share:.0%}")


def inner_optimizer(optimizer: Any) -> Any:
    """Return the optimizer inside the wrappers of accelerate and DeepSpeed."""
    while hasattr(optimizer, "optimizer"):
        optimizer = optimizer.optimizer
    return optimizer


def optimizer_of_host(config: TrainConfig) -> str | None:
    """Return the class that stands in for the optimizer where DeepSpeed offloads its states; None where it doesn't."""
    if config.parallelism.sharding not in ZERO_STAGES or config.parallelism.offload == "none":
        return None
    return _ADAM_OF_THE_HOST


def casts_weights(config: TrainConfig) -> bool:
    """Return whether DeepSpeed trains 16-bit weights with masters in fp32, and there is no autocast."""
    return config.parallelism.sharding in ZERO_STAGES and config.precision in (Precision.BF16, Precision.FP16)


def checkpointed_units(model: nn.Module) -> int:
    """Return how many of its units FSDP checkpoints."""
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointWrapper

    return sum(isinstance(module, CheckpointWrapper) for module in model.modules())


def sampling(config: TrainConfig, loader: Any) -> str:
    """Return how samples are cut into micro-batches; accelerate wraps the sampler where there are several ranks."""
    batches = getattr(loader, "batch_sampler", None)
    balanced = isinstance(getattr(batches, "batch_sampler", batches), BatchRebalanceSampler)
    asked = f"{config.train_sampling_strategy} was asked for"
    require(balanced == config.is_balanced, f"{asked}, but {type(batches).__name__} ran")
    return "of the same cost in tokens" if balanced else "of the same number of samples"
