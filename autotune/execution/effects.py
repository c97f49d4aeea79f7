"""Checks that what a configuration asked for really took effect in the Trainer.

Libraries have silent no-ops: fp16 on a CPU stays fp32, a kernel falls back, a flag is ignored by some models. A trial
in which a knob did nothing would be a wrong measurement, so it is refused with the reason.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any
from unittest.mock import patch

import torch
from torch import nn
from torch._dynamo import OptimizedModule
from torch.nn import functional
from torch.nn.attention import SDPBackend
from transformers import PreTrainedModel, TrainerCallback
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.pytorch_utils import Conv1D

from autotune.execution import model_effects
from autotune.execution.model_effects import require
from autotune.training.arguments import effective_tf32
from autotune.training.batches import PackCollator
from autotune.training.loss import base_model
from autotune.values.adapters import is_new_weight
from autotune.values.config import Precision, TrainConfig
from autotune.values.hardware import Hardware
from autotune.values.techniques import CHECKPOINTING, OPTIMIZERS, CheckpointingKind

_OUTPUT_DTYPE = {
    Precision.FP32: torch.float32,
    Precision.FP16: torch.float16,
    Precision.BF16: torch.bfloat16,
    Precision.PURE_BF16: torch.bfloat16,
}


# Layers whose output is what they computed in. Others of these names have a forward of their own: packed ones put out
# what they were given, and Falcon's add an fp32 bias to a product in 16 bits.
_PLAIN = (nn.Linear.forward, nn.Conv2d.forward, nn.Conv1d.forward, Conv1D.forward)


class EffectsProbe(TrainerCallback):  # type: ignore[misc]  # transformers is untyped
    """Looks at the first training step from inside; leaves nothing behind that later steps would pay for.

    Knobs that the user's own code decides (`theirs`) are not looked at.
    """

    def __init__(self, config: TrainConfig, hardware: Hardware, *, theirs: frozenset[str] = frozenset()) -> None:
        self._config = config
        self._hardware = hardware
        self._theirs = theirs
        self._dtypes: set[torch.dtype] = set()
        self._calls: Counter[str] = Counter()
        self._sdpa_backends: set[str] = set()
        self._hooks = ExitStack()  # taken away after the first step
        self._seen: dict[str, Any] = {}

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Watch one layer and the checkpointed calls, for the first step alone."""
        self._seen = kwargs
        emptied = self._counted("emptied", torch.cuda.empty_cache)
        self._hooks.enter_context(patch.object(torch.cuda, "empty_cache", emptied))
        if self._config.torch_compile_backend is None:  # hooks would change what is compiled
            self._watch_dtype(kwargs["model"])
            self._watch_checkpointing(kwargs["model"])
            self._watch_sdpa()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Take the hooks away."""
        self._hooks.close()

    def _watch_dtype(self, model: nn.Module) -> None:
        for name, module in model.named_modules():
            if type(module).forward in _PLAIN and not is_new_weight(f"{name}."):  # peft keeps an adapter's in fp32
                self._hooks.enter_context(module.register_forward_hook(self._note_dtype))
                return

    def _note_dtype(self, module: nn.Module, inputs: Any, output: torch.Tensor) -> None:
        if torch.is_grad_enabled():  # TRL generates without autocast
            self._dtypes.add(output.dtype)

    def _watch_checkpointing(self, model: nn.Module) -> None:
        self._count_checkpoints(model)
        original = PreTrainedModel._set_gradient_checkpointing

        def set_again(module: PreTrainedModel, *args: Any, **kwargs: Any) -> None:
            original(module, *args, **kwargs)
            self._count_checkpoints(module)

        # TRL switches checkpointing off while it generates, and on again with another function.
        self._hooks.enter_context(patch.object(PreTrainedModel, "_set_gradient_checkpointing", set_again))

    def _count_checkpoints(self, model: nn.Module) -> None:
        for module in model.modules():
            original = getattr(module, "_gradient_checkpointing_func", None)
            if original is not None:
                counted = self._counted("checkpointed", original)
                self._hooks.enter_context(patch.object(module, "_gradient_checkpointing_func", counted))

    def _watch_sdpa(self) -> None:
        original = functional.scaled_dot_product_attention

        def watch(*args: Any, **kwargs: Any) -> torch.Tensor:
            self._sdpa_backends.add(_sdpa_backend(*args, **kwargs))
            return original(*args, **kwargs)

        self._hooks.enter_context(patch.object(functional, "scaled_dot_product_attention", watch))

    def _sdpa(self) -> str:
        """Return which of torch's attention kernels ran, to add to the implementation."""
        return f" ({', '.join(sorted(self._sdpa_backends))})" if self._sdpa_backends else ""

    def _counted(self, what: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def count(*args: Any, **kwargs: Any) -> Any:
            self._calls[what] += 1
            return function(*args, **kwargs)

        return count

    def verify(self, trainer: Any, model: Any) -> dict[str, str]:
        """Return what was seen in effect, by knob, or raise NoEffectError for what wasn't."""
        loader = self._seen["train_dataloader"]
        looks: dict[str, Callable[[], str]] = {
            "precision": lambda: self._precision(trainer, model),
            "tf32": lambda: _tf32(self._config, self._hardware),
            "optim": lambda: _optimizer(self._config, trainer.optimizer, model),
            "checkpointing": lambda: self._checkpointing(model),
            "attn_implementation": lambda: _attention(self._config, model) + self._sdpa(),
            "experts_implementation": lambda: model_effects.experts(self._config, model),
            "use_liger_kernel": lambda: model_effects.liger(self._config, model),
            "chunked_loss": lambda: model_effects.chunked_loss(self._config, model),
            "torch_compile_backend": lambda: _compiled(self._config, trainer),
            "activation_memory_budget": lambda: model_effects.activations(self._config),
            "dataloader_num_workers": lambda: _workers(self._config, loader),
            "train_sampling_strategy": lambda: model_effects.sampling(self._config, loader),
            "packing": lambda: _packing(self._config, loader),
            "torch_empty_cache_steps": lambda: self._cache(trainer),
            "expandable_segments": lambda: model_effects.segments(self._config, is_cpu=self._hardware.is_cpu),
            "adapter": lambda: model_effects.adapter(self._config, model),
            "quantization": lambda: model_effects.quantization(self._config, model),
            "parallelism": lambda: model_effects.parallelism(self._config, trainer, model),
        }
        return {knob: "as your code has it" if knob in self._theirs else look() for knob, look in looks.items()}

    def _precision(self, trainer: Any, model: nn.Module) -> str:
        wanted, asked = _OUTPUT_DTYPE[self._config.precision], self._config.precision
        casts = model_effects.casts_weights(self._config)
        autocasts, needs_it = trainer.accelerator.native_amp, asked in (Precision.FP16, Precision.BF16) and not casts
        ignored = f"{asked} was asked for, but autocast is off: the device's library ignores it"
        require(autocasts or not needs_it, ignored)
        outputs = _names(self._dtypes)
        require(self._dtypes <= {wanted}, f"{asked} was asked for, but layers put out {outputs}")
        weights = Counter(p.dtype for p in model.parameters() if p.is_floating_point())
        expected = wanted if casts else torch.bfloat16 if asked is Precision.PURE_BF16 else torch.float32
        is_as_asked = not weights or weights.most_common(1)[0][0] is expected or self._config.adapter is not None
        require(is_as_asked, f"{asked} was asked for, but weights are {_names(weights)}")
        return f"weights {_names(weights)}, layer outputs {outputs or ('autocast on' if autocasts else 'as weights')}"

    def _checkpointing(self, model: nn.Module) -> str:
        calls = self._calls["checkpointed"]
        flagged = sum(bool(getattr(m, "gradient_checkpointing", False)) for m in model.modules())
        asked, compiles = self._config.checkpointing, self._config.torch_compile_backend is not None
        if units := model_effects.checkpointed_units(model):
            require(asked == "full", f"checkpointing {asked} was asked for, but FSDP checkpoints")
            return f"{units} units of FSDP"
        if asked == "none":
            unasked = "no checkpointing was asked for, but the model checkpoints its activations"
            require(not calls and not flagged, unasked)
            return "none"
        require(flagged, "checkpointing was asked for, but no layer of the model has it switched on")
        require(calls or compiles, "checkpointing was asked for and switched on, but no layer was checkpointed")
        _check_kind(CHECKPOINTING[asked], model)
        return f"{calls} checkpointed calls in the first step" if calls else "switched on"

    def _cache(self, trainer: Any) -> str:
        """Say how often the cache is emptied: the Trainer does so in steps whose number, from 0, this divides."""
        wanted, actual = self._config.torch_empty_cache_steps, trainer.args.torch_empty_cache_steps
        times, asked = self._calls["emptied"], f"torch_empty_cache_steps {wanted} was asked for"
        require(actual == wanted, f"{asked}, but {actual} is set")
        require(times or not wanted, f"{asked}, but the first step emptied no cache")
        return f"every {wanted} steps, {times} times in the first" if wanted else "never emptied"


def _check_kind(kind: CheckpointingKind, model: nn.Module) -> None:
    """Raise NoEffectError unless the layers that should be are checkpointed, and by the implementation asked for."""
    layers = [m for m in model.modules() if isinstance(m, GradientCheckpointingLayer)]
    switched_on = [m for m in layers if m.gradient_checkpointing]
    is_every = len(switched_on) == -(-len(layers) // kind.every)
    require(is_every, f"every {kind.every} layers were to be checkpointed, but {len(switched_on)} of them are")
    for layer in switched_on:
        actual = getattr(layer._gradient_checkpointing_func, "keywords", {}).get("use_reentrant")
        require(not actual, f"use_reentrant=False was asked for, but it is {actual}")


def _names(dtypes: Any) -> str:
    return "/".join(sorted(str(d).removeprefix("torch.") for d in dtypes))


def _tf32(config: TrainConfig, hardware: Hardware) -> str:
    if not hardware.has_tf32:  # what is set for others has no effect
        return "none"
    actual, expected = str(torch.backends.cuda.matmul.fp32_precision), effective_tf32(config, hardware)
    require((actual == "tf32") == expected, f"tf32 should be {expected}, but matrix products in fp32 are {actual}")
    return actual


def _optimizer(config: TrainConfig, optimizer: Any, model: nn.Module) -> str:
    inner = model_effects.inner_optimizer(optimizer)
    name = f"{type(inner).__module__}.{type(inner).__name__}"
    facts = OPTIMIZERS[config.optim]
    of_host, asked = model_effects.optimizer_of_host(config), f"optimizer {config.optim} was asked for"
    require(name == (of_host or facts.class_name), f"{asked}, but {name} ran")
    if of_host is not None:
        return name
    own = getattr(inner, "args", None)
    for key, value in facts.attributes:
        actual = getattr(inner, key, getattr(own, key, inner.param_groups[0].get(key)))
        require(actual == value or (value is None and not actual), f"{asked}, but {key} is {actual}")
    seen = name + "".join(f" {key}={value}" for key, value in facts.attributes)
    return seen + _embedding_states(inner, model) if ("optim_bits", 8) in facts.attributes else seen


def _embedding_states(optimizer: Any, model: nn.Module) -> str:
    """Return a remark that states of embeddings are in 32 bits, as bitsandbytes advises and the Trainer has it."""
    tables = [m.weight for m in model.modules() if isinstance(m, nn.Embedding) and m.weight in optimizer.state]
    states = {optimizer.state[table]["state1"].dtype for table in tables}
    require(states <= {torch.float32}, f"states of embeddings should be kept in 32 bits, but are {_names(states)}")
    return ", embeddings' states in float32" if states else ""


def _attention(config: TrainConfig, model: Any) -> str:
    if config.attn_implementation is None:
        return "no attention"
    wanted, actual = config.attn_implementation, getattr(base_model(model).config, "_attn_implementation", None)
    require(actual == wanted, f"attention {wanted} was asked for, but {actual} ran")
    return str(actual)


def _sdpa_backend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> str:
    """Return the name of the kernel that torch chooses for a call of `scaled_dot_product_attention`."""
    query, key, value = (_as_cast(tensor) for tensor in (query, key, value))
    mask = None if attn_mask is None else _as_cast(attn_mask)
    choice = torch._fused_sdp_choice(query, key, value, mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
    return str(SDPBackend(choice).name).removesuffix("_ATTENTION").lower()


def _as_cast(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor that looks as autocast will hand it on; rotary positions leave queries and keys in fp32."""
    device = tensor.device.type
    if tensor.dtype is not torch.float32 or not torch.is_autocast_enabled(device):
        return tensor
    like = torch.empty_like(tensor, dtype=torch.get_autocast_dtype(device))
    return like.requires_grad_(tensor.requires_grad)


def _compiled(config: TrainConfig, trainer: Any) -> str:
    is_compiled = isinstance(trainer.model_wrapped, OptimizedModule)
    if config.torch_compile_backend is None:
        require(not is_compiled, "no compilation was asked for, but the model is compiled")
        return "none"
    from torch._dynamo.utils import counters

    graphs = counters["stats"].get("unique_graphs", 0)
    asked = f"compile with {config.torch_compile_backend} was asked for"
    require(is_compiled and graphs, f"{asked}, but no graph was compiled")
    breaks = sum(counters["graph_break"].values())
    return f"{config.torch_compile_backend}: {graphs} graphs, {breaks} graph breaks"


def _workers(config: TrainConfig, loader: Any) -> str:
    actual = getattr(loader, "num_workers", 0)
    asked, factor = config.dataloader_num_workers, config.dataloader_prefetch_factor
    require(actual == asked, f"{asked} data-loader workers were asked for, but {actual} ran")
    ahead = getattr(loader, "prefetch_factor", None)
    require(not actual or not factor or ahead == factor, f"prefetching {factor} was asked for, but {ahead} ran")
    return str(actual)


def _packing(config: TrainConfig, loader: Any) -> str:
    packed = isinstance(getattr(loader, "collate_fn", None), PackCollator)
    rows = "one row each" if packed else "a row a sample"
    require(packed == config.packing, f"packing {config.packing} was asked for, but micro-batches are {rows}")
    return rows
