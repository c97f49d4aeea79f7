"""Checks that each knob of a configuration took effect in the Trainer.

Libraries have silent no-ops: fp16 on a CPU stays fp32, a kernel falls back, FSDP becomes DDP, a flag is ignored by some
models. A trial in which a knob did nothing would be a wrong measurement, so it is refused with the reason.
"""

import functools
from collections import Counter
from contextlib import ExitStack
from typing import Any
from unittest.mock import patch

import torch
from torch import nn
from torch._dynamo import OptimizedModule
from torch._dynamo.utils import counters
from torch._functorch import config as partitioning
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointWrapper
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.attention import SDPBackend
from torch.nn.parallel import DistributedDataParallel
from transformers import DataCollatorWithFlattening, PreTrainedModel, TrainerCallback
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.pytorch_utils import Conv1D
from transformers.trainer_pt_utils import BatchRebalanceSampler

from autotune.errors import NoEffectError
from autotune.training.adapters import BITFIT, CLASSIFICATION_HEADS, adapter_arguments
from autotune.training.arguments import FSDP_KINDS, ZERO_STAGES, effective_tf32
from autotune.training.loss import base_model
from autotune.training.random_weights import quantization_of, quantized_layers
from autotune.values.config import Parallelism, Precision, TrainConfig
from autotune.values.hardware import Hardware
from autotune.values.techniques import CHECKPOINTING, OPTIMIZERS, is_new_weight

# Each has a method of its name in `EffectsProbe`, which returns what is in effect, or raises NoEffectError.
KNOBS = (
    "precision", "tf32", "optim", "checkpointing", "attn_implementation", "experts_implementation", "use_liger_kernel",
    "chunked_loss", "torch_compile_backend", "activation_memory_budget", "dataloader_num_workers",
    "train_sampling_strategy", "packing", "pad_to_multiple_of", "torch_empty_cache_steps", "expandable_segments",
    "adapter", "quantization", "parallelism",
)  # fmt: skip

# Forwards that put out the dtype in which they compute. Other layers of these names have a forward of their own: packed
# ones put out the dtype of their input, and Falcon's add an fp32 bias to a product in 16 bits.
_PLAIN = (nn.Linear.forward, nn.Conv2d.forward, nn.Conv1d.forward, Conv1D.forward)


class EffectsProbe(TrainerCallback):  # type: ignore[misc]  # transformers is untyped
    """Looks at all knobs but `theirs`, which the user's code decides; its hooks go after the first step."""

    def __init__(self, config: TrainConfig, hardware: Hardware, *, theirs: frozenset[str] = frozenset()) -> None:
        self._config, self._hardware, self._theirs = config, hardware, theirs
        self._dtypes: set[torch.dtype] = set()  # that layers put out
        self._calls: Counter[str] = Counter()
        self._kernels: set[str] = set()  # torch's, of attention
        self._context_parallel = 1  # devices among which attention passes on keys and values
        self._hooks = ExitStack()  # taken away after the first step

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        model = kwargs["model"]
        self._count(torch.cuda, "empty_cache")
        if self._config.torch_compile_backend is not None:  # hooks would change the compiled graphs
            return
        attention, switch = nn.functional.scaled_dot_product_attention, PreTrainedModel._set_gradient_checkpointing

        def put_out(module: nn.Module, inputs: Any, output: torch.Tensor) -> None:
            if torch.is_grad_enabled():  # TRL generates without autocast
                self._dtypes.add(output.dtype)

        @functools.wraps(attention)  # torch puts its ring in the place of that name
        def attend(*args: Any, **kwargs: Any) -> torch.Tensor:
            query = args[0] if args else kwargs["query"]
            self._context_parallel = query.device_mesh.size() if isinstance(query, DTensor) else 1
            self._kernels.add(attention_kernel(*args, **kwargs))
            return attention(*args, **kwargs)

        def switch_again(module: PreTrainedModel, *args: Any, **kwargs: Any) -> None:
            switch(module, *args, **kwargs)
            self._count_checkpoints(module)

        # The model's own, as peft keeps an adapter's in fp32; a head with an own forward leaves logits to its loss.
        own = ((n, m) for n, m in model.named_modules() if "forward" not in vars(m))
        plain = (m for n, m in own if type(m).forward in _PLAIN and not is_new_weight(f"{n}."))
        if (layer := next(plain, None)) is not None:
            self._hooks.enter_context(layer.register_forward_hook(put_out))
        self._count_checkpoints(model)
        # TRL switches checkpointing off while it generates, and on again with another function.
        self._hooks.enter_context(patch.object(PreTrainedModel, "_set_gradient_checkpointing", switch_again))
        self._hooks.enter_context(patch.object(nn.functional, "scaled_dot_product_attention", attend))

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._hooks.close()

    def _count_checkpoints(self, model: nn.Module) -> None:
        for module in model.modules():
            if getattr(module, "_gradient_checkpointing_func", None) is not None:
                self._count(module, "_gradient_checkpointing_func")

    def _count(self, holder: Any, name: str) -> None:
        original = getattr(holder, name)

        def counted(*args: Any, **kwargs: Any) -> Any:
            self._calls[name] += 1
            return original(*args, **kwargs)

        self._hooks.enter_context(patch.object(holder, name, counted))

    def verify(self, trainer: Any, knobs: tuple[str, ...] = KNOBS) -> dict[str, str]:
        """Return what is in effect, by knob; NoEffectError: one isn't as asked for."""
        self._trainer, self._model, self._loader = trainer, trainer.model, trainer.callback_handler.train_dataloader
        return {k: "as your code has it" if k in self._theirs else getattr(self, f"_{k}")() for k in knobs}

    def _precision(self) -> str:
        asked, autocasts = self._config.precision, self._trainer.accelerator.native_amp
        computes_in = {Precision.FP32: torch.float32, Precision.FP16: torch.float16}.get(asked, torch.bfloat16)
        needs_autocast = self._config.mixed_precision != "no"
        # DeepSpeed trains 16-bit weights with masters in fp32, without autocast.
        casts_weights = needs_autocast and self._config.parallelism.sharding in ZERO_STAGES
        ignored = f"{asked} was asked for, but autocast is off: the device's library ignores it"
        _require(autocasts or casts_weights or not needs_autocast, ignored)
        layers, outputs = {type(module).__name__ for module in self._model.modules()}, _names(self._dtypes)
        _same("fp8", asked is Precision.FP8, "Float8Linear" in layers)
        _require(self._dtypes <= {computes_in}, f"{asked} was asked for, but layers put out {outputs}")
        weights = Counter(p.dtype for p in self._model.parameters() if p.is_floating_point())
        expected = computes_in if casts_weights or asked is Precision.PURE_BF16 else torch.float32
        is_as_asked = not weights or weights.most_common(1)[0][0] is expected or self._config.adapter is not None
        _require(is_as_asked, f"{asked} was asked for, but weights are {_names(weights)}")
        return f"weights {_names(weights)}, layer outputs {outputs or ('autocast on' if autocasts else 'as weights')}"

    def _tf32(self) -> str:
        if not self._hardware.has_tf32:  # on others the setting has no effect
            return "none"
        actual, expected = str(torch.backends.cuda.matmul.fp32_precision), effective_tf32(self._config, self._hardware)
        _require((actual == "tf32") == expected, f"tf32 should be {expected}, but matrix products in fp32 are {actual}")
        return actual

    def _optim(self) -> str:
        optimizer, facts, spread = self._trainer.optimizer, OPTIMIZERS[self._config.optim], self._config.parallelism
        while hasattr(optimizer, "optimizer"):  # inside the wrappers of accelerate and DeepSpeed
            optimizer = optimizer.optimizer
        name = f"{type(optimizer).__module__}.{type(optimizer).__name__}"
        asked, class_name = f"optimizer {self._config.optim} was asked for", facts.class_name
        if is_of_host := spread.sharding in ZERO_STAGES and spread.offload != "none":
            class_name = "deepspeed.ops.adam.cpu_adam.DeepSpeedCPUAdam"  # steps in for AdamW
        _require(name == class_name, f"{asked}, but {name} ran")
        if is_of_host:
            return name
        own = getattr(optimizer, "args", None)
        for key, value in facts.attributes:
            actual = getattr(optimizer, key, getattr(own, key, optimizer.param_groups[0].get(key)))
            _require(actual == value or (value is None and not actual), f"{asked}, but {key} is {actual}")
        shown = name + "".join(f" {key}={value}" for key, value in facts.attributes)
        if ("optim_bits", 8) not in facts.attributes:
            return shown
        # The Trainer keeps those of embeddings in 32 bits, as bitsandbytes advises.
        tables = [m.weight for m in self._model.modules() if isinstance(m, nn.Embedding)]
        states = {optimizer.state[table]["state1"].dtype for table in tables if table in optimizer.state}
        _require(states <= {torch.float32}, f"states of embeddings should be kept in 32 bits, but are {_names(states)}")
        return shown + ", embeddings' states in float32" * bool(states)

    def _checkpointing(self) -> str:
        calls, asked = self._calls["_gradient_checkpointing_func"], self._config.checkpointing
        modules = list(self._model.modules())
        if units := sum(isinstance(module, CheckpointWrapper) for module in modules):
            _require(asked == "full", f"checkpointing {asked} was asked for, but FSDP checkpoints")
            return f"{units} units of FSDP"
        flagged = sum(bool(getattr(module, "gradient_checkpointing", False)) for module in modules)
        if asked == "none":
            _require(not calls and not flagged, "no checkpointing was asked for, but the model checkpoints")
            return "none"
        _require(flagged, "checkpointing was asked for, but no layer has it switched on")
        compiles = self._config.torch_compile_backend is not None
        _require(calls or compiles, "checkpointing was asked for and switched on, but no layer was checkpointed")
        layers = [module for module in modules if isinstance(module, GradientCheckpointingLayer)]
        switched_on, every = [layer for layer in layers if layer.gradient_checkpointing], CHECKPOINTING[asked].every
        _same(f"checkpointing every {every} layers of {len(layers)}, so", -(-len(layers) // every), len(switched_on))
        for layer in switched_on:
            actual = getattr(layer._gradient_checkpointing_func, "keywords", {}).get("use_reentrant")
            _require(not actual, f"use_reentrant=False was asked for, but it is {actual}")
        return f"{calls} checkpointed calls in the first step" if calls else "switched on"

    def _attn_implementation(self) -> str:
        if (asked := self._config.attn_implementation) is not None:
            _same("attention", asked, getattr(base_model(self._model).config, "_attn_implementation", None))
        return (asked or "no attention") + (f" ({', '.join(sorted(self._kernels))})" if self._kernels else "")

    def _experts_implementation(self) -> str:
        base = base_model(self._model)
        text = base.config.get_text_config() if hasattr(base, "config") else None  # a user's module has none
        fields = {"experts_per_token": "num_experts_per_tok", "experts_implementation": "_experts_implementation"}
        for knob in (*fields, "expert_capacity"):
            if (asked := getattr(self._config, knob)) is not None:
                _same(knob, asked, getattr(text, fields.get(knob, knob), None))
        return self._config.experts_implementation or "none to choose"

    def _use_liger_kernel(self) -> str:
        patched = sum("liger_kernel" in str(getattr(m.forward, "__module__", "")) for m in self._model.modules())
        _same("use_liger_kernel", self._config.use_liger_kernel, bool(patched))
        return f"{patched} modules" if patched else "none"

    def _chunked_loss(self) -> str:
        is_chunked = isinstance(vars(base_model(self._model)).get("_loss_function"), functools.partial)
        _same("chunked_loss", self._config.chunked_loss, is_chunked)
        return "in chunks" if is_chunked else "of all logits"

    def _torch_compile_backend(self) -> str:
        is_compiled = isinstance(self._trainer.model_wrapped, OptimizedModule)
        if (asked := self._config.torch_compile_backend) is None:
            _require(not is_compiled, "no compilation was asked for, but the model is compiled")
            return "none"
        graphs = counters["stats"].get("unique_graphs", 0)
        _require(is_compiled and graphs, f"compile with {asked} was asked for, but no graph was compiled")
        return f"{asked}: {graphs} graphs, {sum(counters['graph_break'].values())} graph breaks"

    def _activation_memory_budget(self) -> str:
        asked, share = self._config.activation_memory_budget, partitioning.activation_memory_budget
        _same("activation_memory_budget", 1 if asked is None else asked, share)
        return "all kept" if asked is None else f"{share:.0%} kept"

    def _dataloader_num_workers(self) -> str:
        actual, factor = getattr(self._loader, "num_workers", 0), self._config.dataloader_prefetch_factor
        _same("dataloader_num_workers", self._config.dataloader_num_workers, actual)
        if actual and factor:
            _same("dataloader_prefetch_factor", factor, getattr(self._loader, "prefetch_factor", None))
        return str(actual)

    def _train_sampling_strategy(self) -> str:
        batches = getattr(self._loader, "batch_sampler", None)  # accelerate wraps it where there are several ranks
        balanced = isinstance(getattr(batches, "batch_sampler", batches), BatchRebalanceSampler)
        asked = f"{self._config.train_sampling_strategy} was asked for"
        _require(balanced == self._config.is_balanced, f"{asked}, but {type(batches).__name__} ran")
        return "of the same cost in tokens" if balanced else "of the same number of samples"

    def _packing(self) -> str:
        packed = isinstance(getattr(self._loader, "collate_fn", None), DataCollatorWithFlattening)
        _same("packing", self._config.packing, packed)
        return "one row each" if packed else "a row a sample"

    def _pad_to_multiple_of(self) -> str:
        asked = self._config.pad_to_multiple_of or 1
        batch = self._loader.collate_fn([self._loader.dataset[0]]) if asked > 1 else {}
        widths = {value.shape[1] for value in batch.values() if getattr(value, "ndim", 0) == 2}
        _require(not any(width % asked for width in widths), f"multiples of {asked} were asked for, not {widths}")
        return f"to multiples of {asked}" if asked > 1 else "to the longest"

    def _torch_empty_cache_steps(self) -> str:
        # The Trainer empties the cache in steps whose number, from 0, this divides.
        asked, times = self._config.torch_empty_cache_steps, self._calls["empty_cache"]
        _same("torch_empty_cache_steps", asked, self._trainer.args.torch_empty_cache_steps)
        _require(times or not asked, f"emptying was asked for every {asked} steps, but the first emptied no cache")
        return f"every {asked} steps, {times} times in the first" if asked else "never emptied"

    def _expandable_segments(self) -> str:
        segments = [] if self._hardware.is_cpu else torch.cuda.memory_snapshot()  # type: ignore[no-untyped-call]
        asked, expandable = self._config.expandable_segments, sum(segment["is_expandable"] for segment in segments)
        told = f"expandable_segments {asked} was asked for, but {expandable} of {len(segments)} segments are"
        _require(bool(expandable) == asked, told)
        return f"{expandable} of {len(segments)}" if asked else "none"

    def _adapter(self) -> str:
        sizes = {name: p.numel() for name, p in self._model.named_parameters() if p.requires_grad}
        trained, total = sum(sizes.values()), sum(p.numel() for p in self._model.parameters())
        new = sum(size for name, size in sizes.items() if is_new_weight(name))
        if (asked := self._config.adapter) is None:
            _require(not new, f"no adapter was asked for, but {new} parameters of adapters are trained")
            return f"none, {trained} parameters trained"
        kind, arguments = asked.kind, adapter_arguments(asked)
        if arguments["peft_type"] == BITFIT:
            biases = {name: size for name, size in sizes.items() if name.endswith("bias")}
            others = [n for n in sizes if n not in biases and n.split(".")[0] not in CLASSIFICATION_HEADS]
            told = f"bitfit was asked for, but {others[0] if others else 'nothing'} is trained"
            _require(biases and not others, told)
            return f"{kind}, {sum(biases.values())} biases among {trained} parameters trained"
        _require(trained != total, f"{kind} was asked for, but {trained} of {total} parameters are trained")
        _require(new, f"{kind} was asked for, but no adapter is trained")
        # Peft's own config has all that was asked for, some of it resolved to names of its own.
        for name in arguments.keys() - {"target_modules", "target_parameters", "feedforward_modules"}:
            actual, wanted = getattr(self._model.active_peft_config, name), arguments[name]
            _require(actual == wanted, f"{kind} was asked for, but {name} is {actual}, not {wanted}")
        return f"{kind}, {trained} of {total} parameters trained"

    def _quantization(self) -> str:
        asked, layers = self._config.quantization, dict(quantized_layers(self._model))
        kinds = {quantization_of(layer) for layer in layers.values()}
        _same("packing of weights in", asked, "/".join(map(str, kinds)) or None)
        for name, layer in layers.items():
            is_packed = layer.weight.dtype in (torch.uint8, torch.int8)
            _require(is_packed, f"{asked} weights were asked for, but those of {name} are not packed")
        return f"{asked} in {len(layers)} layers" if asked else "none"

    def _parallelism(self) -> str:
        # A split can fail silently, so the model's wrapper and the shards themselves are looked at.
        spread, known = self._config.parallelism, self._trainer.args.world_size
        ranks = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
        told = f"{spread.world_size} devices were asked for, but {ranks} ranks ran, of which the Trainer knew {known}"
        _require(ranks == spread.world_size == known, told)
        wrapper = getattr(self._trainer.model_wrapped, "_orig_mod", self._trainer.model_wrapped)
        if spread.tensor_parallel > 1:
            _same("tensor parallel", spread.tensor_parallel, getattr(self._model, "_tp_size", None))
            _check_shards(self._model, max(2, spread.data_parallel))  # parts that the plan doesn't name stay whole
            beside = f", FSDP2 over {spread.data_parallel}" * (spread.data_parallel > 1)
            return f"tensor parallel {spread.tensor_parallel}{beside}"
        if spread.sharding in ZERO_STAGES:
            return _zero(spread, wrapper)
        _same("context parallel", spread.context_parallel, self._context_parallel)
        return _fsdp(spread, wrapper, self._trainer) if spread.sharding in FSDP_KINDS else _ddp(spread, wrapper)


def attention_kernel(*args: Any, **kwargs: Any) -> str:
    def as_cast(value: Any) -> Any:  # rotary positions leave queries and keys in fp32 for autocast to cast
        value = value.to_local() if isinstance(value, DTensor) else value
        device = value.device.type if isinstance(value, torch.Tensor) and value.dtype is torch.float32 else None
        if device is None or not torch.is_autocast_enabled(device):
            return value
        return torch.empty_like(value, dtype=torch.get_autocast_dtype(device)).requires_grad_(value.requires_grad)

    choice = torch._fused_sdp_choice(*map(as_cast, args), **{name: as_cast(v) for name, v in kwargs.items()})
    return str(SDPBackend(choice).name).removesuffix("_ATTENTION").lower()


def _require(is_in_effect: object, seen: str) -> None:
    if not is_in_effect:
        raise NoEffectError(seen)


def _same(knob: str, asked: object, actual: object) -> None:
    _require(actual == asked, f"{knob} {asked} was asked for, but it is {actual}")


def _names(dtypes: Any) -> str:
    return "/".join(sorted(str(d).removeprefix("torch.") for d in dtypes))


def _ddp(spread: Parallelism, wrapper: Any) -> str:
    kind, is_ddp = type(wrapper).__name__, isinstance(wrapper, DistributedDataParallel)
    if spread.world_size == 1:
        is_split = is_ddp or any(isinstance(p, DTensor) for p in wrapper.parameters())
        _require(not is_split, f"one device was asked for, but the model is wrapped as {kind}")
        return "one device"
    _require(is_ddp, f"{spread.world_size} copies were to be kept alike by DDP, but the model is a {kind}")
    looks, sends, mb = wrapper.find_unused_parameters, wrapper.broadcast_buffers, wrapper.bucket_bytes_cap / (1 << 20)
    actual = {"ddp_find_unused_parameters": looks, "ddp_broadcast_buffers": sends, "ddp_bucket_cap_mb": mb}
    for name, asked in spread.model_dump(include={*actual}, exclude_none=True).items():
        _same(name, asked, actual[name])
    kept = ", outputs not copied" * (not looks) + ", buffers not sent" * (not sends)
    return f"DDP over {spread.world_size}, buckets of {mb:g} MB{kept}"


def _fsdp(spread: Parallelism, wrapper: nn.Module, trainer: Any) -> str:
    units, asked = sum(isinstance(m, FSDPModule) for m in wrapper.modules()), f"{spread.sharding} was asked for"
    _require(units, f"{asked}, but the model is wrapped as {type(wrapper).__name__}")
    for name, parameter in wrapper.named_parameters():
        _require(isinstance(parameter, DTensor), f"{asked}, but {name} is not split")
    plugin = trainer.accelerator.state.fsdp_plugin
    _same("reshard_after_forward", spread.sharding == "fsdp_full", bool(plugin.reshard_after_forward))
    offloads = type(plugin.cpu_offload).__name__ == "CPUOffloadPolicy"
    _same("offloading parameters", spread.offload == "parameters", offloads)
    # Embedding and head are units in any case.
    layers = [layer for m in wrapper.modules() if isinstance(m, nn.ModuleList) for layer in m.modules()]
    told = f"units of {spread.wrapping} were asked for, but no layer is a unit of its own"
    _require(any(isinstance(layer, FSDPModule) for layer in layers), told)
    _check_shards(wrapper, spread.sharding_ranks)
    copies = f", {spread.replicas} replicas" * (spread.replicas > 1)
    copies += f", sequence parallel {spread.context_parallel}" * (spread.context_parallel > 1)
    return f"FSDP2 over {spread.sharding_ranks}{copies}, {units} units{', offloaded' * offloads}"


def _zero(spread: Parallelism, engine: Any) -> str:
    stage, kind, asked = ZERO_STAGES[spread.sharding], type(engine).__name__, f"{spread.sharding} was asked for"
    _require(kind == "DeepSpeedEngine", f"{asked}, but the model is wrapped as {kind}")
    _same("stage", stage, engine.zero_optimization_stage())
    parts = (engine.zero_offload_optimizer(), engine.zero_offload_param())
    devices = (getattr(part, "device", None) or "none" for part in parts)
    actual = tuple(str(getattr(device, "value", device)) for device in devices)
    wanted = ("none" if spread.offload == "none" else "cpu", "cpu" if spread.offload == "parameters" else "none")
    _require(actual == wanted, f"optimizer and parameters were to be offloaded to {wanted}, but are to {actual}")
    parameters = [p for p in engine.module.parameters() if p.requires_grad]
    if stage == 3:
        held, whole = sum(p.ds_tensor.numel() for p in parameters), sum(p.ds_numel for p in parameters)
    else:  # optimizer states
        held = sum(tensor.numel() for tensor in engine.optimizer.single_partition_of_fp32_groups)
        whole = sum(p.numel() for p in parameters)
    _check_share(held / whole, spread.sharding_ranks)
    _same("sequence parallel", shared := spread.sequence_parallel, engine.sequence_parallel_size)
    beside = f", sequence parallel {shared}" * (shared > 1)
    beside += f", {spread.offload} offloaded to the host" * (spread.offload != "none")
    return f"DeepSpeed ZeRO-{stage} over {spread.sharding_ranks}{beside}"


def _check_shards(model: nn.Module, ranks: int) -> None:
    held = sum(p.to_local().numel() if isinstance(p, DTensor) else p.numel() for p in model.parameters())
    _check_share(held / sum(p.numel() for p in model.parameters()), ranks)


def _check_share(share: float, ranks: int) -> None:
    # Shards are padded, and DeepSpeed keeps small parameters whole: a rank may hold half more than its part.
    is_split = ranks == 1 or share <= min(1.5 / ranks, 0.99)
    _require(is_split, f"{ranks} ranks were to split it, but this one holds {share:.0%}")
