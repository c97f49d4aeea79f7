"""Libraries of another time and kernels that patch a model, put onto a model of the installed libraries.

What a published measurement was made with differs from what is installed: how the loss is computed, whether keys and
values are repeated before fused attention, how a mixture of experts is looped over, which kernels were patched in.
:func:`as_of` returns the change that makes a model on the meta device keep and take what it did then. It is about sizes
and lifetimes; values are never computed. Called by `predictor`, through the `change` of `autotune.cost.profiler`.

Sources, read at the versions named: transformers 4.15, 4.45.2 and 4.48.1 (`modeling_*.py`, `loss/loss_utils.py`), peft
0.13.2, trl 0.13.0, torch 1.10 (`derivatives.yaml`), and the plugins of foundation-model-stack/fms-acceleration
(`fms_acceleration_foak`, `fms_acceleration_peft`), whose kernels come from unsloth and Liger.
"""

from __future__ import annotations

import contextlib
import functools
import types
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import nn

from autotune.units import GIB
from autotune.values.catalogue import Gpu
from published import kernels
from published.quantized import LoraPacked, PackedLinear, Quantization, quantize

Version = tuple[int, ...]


@dataclass(frozen=True)
class Software:
    """What a model was trained with; (99,): the version that is installed."""

    transformers: Version = (99,)
    torch: Version = (99,)
    fast_loss: bool = False  # Triton cross entropy that overwrites the logits with their gradient
    fast_norm: bool = False  # RMSNorm as one kernel
    fast_rope: bool = False  # rotary embedding as one kernel, in place
    linear_loss: bool = False  # output head and cross entropy fused, in chunks
    fused_lora: bool = False  # LoRA on packed weights as one function for query, key and value
    autocast: bool = False
    quantization: Quantization | None = None
    # What of the weights that aren't packed was put in fp32 (`prepare_model_for_kbit_training`).
    upcast: Literal["none", "norms", "all"] = "none"
    lora: dict[str, Any] | None = field(default=None, hash=False)  # arguments of `peft.LoraConfig`
    lora_in_base_dtype: bool = False  # adapters have the type of the weights, not fp32
    checkpointing: bool = True
    reentrant: bool = True  # before transformers 5
    holds_inputs: bool = False  # hooks held the inputs of layers, as torch's first FSDP did where weights are frozen
    spare_block: bool = False  # one more tensor of the size of the fast loss's input (`SparingCrossEntropy`)


# Model types whose logits were not put in fp32 for the loss before transformers 4.50 made all share one function.
_LOSS_IN_MODEL_DTYPE = frozenset({"gpt_bigcode", "gpt2", "gpt_neox", "opt", "bloom", "falcon", "codegen"})

# Model types that repeated keys and values for all heads before flash attention, until 4.48 changed attention.
_REPEATED = frozenset({"mistral", "mixtral", "qwen2", "qwen2_moe", "phi3", "starcoder2", "stablelm"})


def as_of(software: Software) -> Callable[[Any], Any]:
    """Return what turns a model of the installed libraries into one of `software`."""

    def change(model: Any) -> Any:
        base = model
        _old_experts(base, software)
        if software.quantization is not None:
            for parameter in base.parameters():
                parameter.requires_grad_(False)
            quantize(base, software.quantization, keep=("gate",) if software.quantization.kind == "gptq" else ())
        _upcast(base, software)
        _attention(base, software)
        _loss(base, software)
        _checkpointing(base, software)
        if software.lora is not None:
            model = _with_lora(base, software)
        _kernels(base, software)
        if software.holds_inputs:
            _hold_inputs(base)
        return model

    return change


def _old_experts(model: Any, software: Software) -> None:
    """Put the experts of a mixture as modules of their own, looped over, as before transformers 5."""
    if software.transformers >= (5,) or model.config.model_type != "mixtral":
        return
    for layer in model.model.layers:
        layer.mlp = LoopedExperts(model.config).to(dtype=next(layer.parameters()).dtype)


class LoopedExperts(nn.Module):
    """`MixtralSparseMoeBlock` of transformers 4."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.top_k, self.count = config.num_experts_per_tok, config.num_local_experts
        with torch.device("meta"):
            self.gate = nn.Linear(config.hidden_size, self.count, bias=False)
            self.experts = nn.ModuleList([_Expert(config) for _ in range(self.count)])

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        shape = hidden.shape
        hidden = hidden.view(-1, shape[-1])
        weights = torch.nn.functional.softmax(self.gate(hidden), dim=1, dtype=torch.float)
        weights, chosen = torch.topk(weights, self.top_k, dim=-1)
        weights /= weights.sum(dim=-1, keepdim=True)
        weights = weights.to(hidden.dtype)
        final = torch.zeros_like(hidden)
        mask = torch.nn.functional.one_hot(chosen, num_classes=self.count).permute(2, 1, 0)
        for number, expert in enumerate(self.experts):
            slot, token = torch.where(mask[number])
            state = hidden[None, token].reshape(-1, shape[-1])
            state = expert(state) * weights[token, slot, None]
            final.index_add_(0, token, state.to(hidden.dtype))
        return final.reshape(shape)


class _Expert(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        width, inner = config.hidden_size, config.intermediate_size
        self.w1, self.w3 = (nn.Linear(width, inner, bias=False) for _ in range(2))
        self.w2 = nn.Linear(inner, width, bias=False)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        hidden = torch.nn.functional.silu(self.w1(hidden)) * self.w3(hidden)
        return self.w2(hidden)


def _upcast(model: Any, software: Software) -> None:
    """Put norms, or all that isn't packed, in fp32: embeddings and head may have been cast back to bf16 by trl."""
    for name, module in model.named_modules():
        if software.upcast == "norms" and ("norm" in name or isinstance(module, nn.LayerNorm)):
            module.to(torch.float32)
        elif software.upcast == "all" and not isinstance(module, PackedLinear):
            for parameter in module.parameters(recurse=False):
                parameter.data = parameter.data.to(torch.float32)


def _attention(model: Any, software: Software) -> None:
    implementation = model.config._attn_implementation
    if software.transformers < (4, 48) and model.config.model_type in _REPEATED:
        if implementation == "flash_attention_2":
            model.config._attn_implementation = kernels.REPEATED_FLASH
    elif software.torch < (1, 11) and implementation == "eager":
        model.config._attn_implementation = kernels.EAGER_OF_2022


def _loss(model: Any, software: Software) -> None:
    """Compute the loss of a language model as transformers did then."""
    head = model.get_output_embeddings()
    if head is None or (software.transformers >= (4, 50) and not software.fast_loss):
        return
    in_fp32 = model.config.model_type not in _LOSS_IN_MODEL_DTYPE
    early = in_fp32 and software.transformers < (4, 46)
    if early:  # the name `logits` was bound to the copy in fp32, so that the original ended
        head.register_forward_hook(lambda module, inputs, output: output.float())
    entropy = torch.nn.functional.cross_entropy
    if software.fast_loss:
        entropy = kernels.SparingCrossEntropy.loss if software.spare_block else kernels.FastCrossEntropy.loss

    def loss_function(logits: Any, labels: Any, vocab_size: int, **_: Any) -> Any:
        if in_fp32:
            logits = logits.float()
        shifted = logits[..., :-1, :].contiguous()
        following = labels[..., 1:].contiguous()
        return entropy(shifted.view(-1, vocab_size), following.view(-1))

    model.loss_function = loss_function


def _checkpointing(model: Any, software: Software) -> None:
    """Checkpoint as transformers 4 did by default, reentrantly, and keep what GPTBigCode's cache then held."""
    if software.transformers >= (5,):
        return
    if software.reentrant:
        model._set_gradient_checkpointing = types.MethodType(_set_reentrant, model)
    if model.config.model_type == "gpt_bigcode":
        _keep_cache(model)


# What a layer calls first, on its own input.
_FIRST = ("input_layernorm", "ln_1")


def _hold_inputs(model: Any) -> None:
    """Put a hook on the input of each layer where it needs a gradient, and never let go.

    The hook refers to the input, and the input to the hook: `_register_post_backward_reshard_only_hook` in
    torch/distributed/fsdp/_runtime_utils.py. It ran within the checkpoint before transformers 5, so what is hooked here
    is the layer's first module.
    """

    def hold(module: Any, args: Any) -> None:
        tensors = [t for t in args if isinstance(t, torch.Tensor) and t.requires_grad]
        if torch.is_grad_enabled() and tensors:
            torch.autograd.graph.register_multi_grad_hook(tensors, lambda gradients: None)

    layers = set(model._no_split_modules or ())
    for module in model.modules():
        if type(module).__name__ in layers:
            next(getattr(module, name) for name in _FIRST if hasattr(module, name)).register_forward_pre_hook(hold)


def _set_reentrant(model: Any, enable: bool = True, gradient_checkpointing_func: Any = None) -> None:
    if gradient_checkpointing_func is not None:
        contexts = gradient_checkpointing_func.keywords["context_fn"]
        gradient_checkpointing_func = functools.partial(_Reentrant.apply, contexts)
    type(model)._set_gradient_checkpointing(model, enable, gradient_checkpointing_func)


class _Reentrant(torch.autograd.Function):
    """`torch.utils.checkpoint(use_reentrant=True)`, once the default, for the meta device.

    It runs a layer again as a whole when its backward pass begins, and holds the layer's output meanwhile. `contexts`
    returns what a forward pass and its repetition run in.
    """

    @staticmethod
    def forward(ctx: Any, contexts: Callable[[], tuple[Any, Any]], function: Any, *inputs: Any) -> Any:
        ctx.function, ctx.contexts = function, contexts
        ctx.positions = [i for i, value in enumerate(inputs) if isinstance(value, torch.Tensor)]
        ctx.inputs = [None if i in ctx.positions else value for i, value in enumerate(inputs)]
        ctx.save_for_backward(*(inputs[i] for i in ctx.positions))
        with torch.no_grad():
            return function(*inputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        inputs = list(ctx.inputs)
        for position, tensor in zip(ctx.positions, ctx.saved_tensors, strict=True):
            inputs[position] = tensor.detach().requires_grad_(tensor.requires_grad)
        _, again = ctx.contexts()
        with torch.enable_grad(), again if again is not None else contextlib.nullcontext():
            outputs = ctx.function(*inputs)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        pairs = [
            (output, gradient)
            for output, gradient in zip(outputs, gradients, strict=True)
            if isinstance(output, torch.Tensor) and output.requires_grad
        ]
        torch.autograd.backward([output for output, _ in pairs], [gradient for _, gradient in pairs])
        return None, None, *(value.grad if isinstance(value, torch.Tensor) else None for value in inputs)


def _keep_cache(model: Any) -> None:
    """Keep the projections of query, key and value until the forward pass has returned.

    GPTBigCode alone did not switch its cache off under checkpointing, and what it kept were views of them.
    """
    kept: list[Any] = []
    forward = model.forward

    def keeping(*args: Any, **kwargs: Any) -> Any:
        handles = [layer.attn.c_attn.register_forward_hook(keep) for layer in model.transformer.h]
        try:
            output = forward(*args, **kwargs)
        finally:
            for handle in handles:
                handle.remove()
        output.cache = list(kept)
        kept.clear()
        return output

    def keep(module: Any, inputs: Any, output: Any) -> None:
        kept.append(output.detach())

    model.forward = keeping


def _with_lora(model: Any, software: Software) -> Any:
    from peft import LoraConfig, get_peft_model

    if software.checkpointing:  # the libraries do, since a reentrant checkpoint needs an input with a gradient
        model.enable_input_require_grads()
    config = LoraConfig(**(software.lora or {}))
    config._register_custom_module({PackedLinear: LoraPacked})
    model = get_peft_model(model, config, autocast_adapter_dtype=not software.lora_in_base_dtype)
    for module in model.modules():
        if isinstance(module, LoraPacked):
            module.autocast = software.autocast
        if software.lora_in_base_dtype and hasattr(module, "lora_A"):
            module.lora_A.to(model.dtype)
            module.lora_B.to(model.dtype)
    return model


def _kernels(model: Any, software: Software) -> None:
    """Patch kernels in, as `fms_acceleration_foak` does by the rules of each model type."""
    llama_like = model.config.model_type in ("llama", "mistral", "mixtral", "granite")
    for module in list(model.modules()):
        if software.fast_norm and llama_like and type(module).__name__.endswith("RMSNorm"):
            module.weight.requires_grad_(False)  # the kernel returns no gradient for it
            module.forward = types.MethodType(kernels.FastNorm.forward_of, module)
        if software.fast_rope and llama_like and type(module).__name__.endswith("Attention"):
            module.forward = _with_globals(module, apply_rotary_pos_emb=kernels.FastRope.both)
        if software.fused_lora and isinstance(getattr(module, "q_proj", None), LoraPacked):
            kernels.FusedLora.put_on(module)
    if software.linear_loss and model.config.model_type in ("llama", "mistral", "granite"):
        model.forward = types.MethodType(_forward_with_linear_loss, model)


def _with_globals(module: Any, **replaced: Any) -> Any:
    """Return the module's forward method with other globals, so that the library stays as it is."""
    method = type(module).forward
    method = getattr(method, "__wrapped__", method)
    function = types.FunctionType(
        method.__code__, {**method.__globals__, **replaced}, method.__name__, method.__defaults__, method.__closure__
    )
    function.__kwdefaults__ = method.__kwdefaults__
    return types.MethodType(function, module)


def _forward_with_linear_loss(model: Any, input_ids: Any, attention_mask: Any, labels: Any, **kwargs: Any) -> Any:
    from transformers.modeling_outputs import CausalLMOutputWithPast

    hidden = model.model(input_ids=input_ids, attention_mask=attention_mask, **kwargs)[0]
    shifted = hidden[..., :-1, :].contiguous().view(-1, hidden.shape[-1])
    loss = kernels.LinearCrossEntropy.apply(shifted, model.lm_head.weight)
    return CausalLMOutputWithPast(loss=loss, logits=None)


# What a process takes of a device beside torch's allocator, by device and generation of torch.
#
# One constant each, measured by others on an idle process; nothing here is fitted to the rows that are scored. It is
# the CUDA context with kernels loaded:
#
# - torch up to 1.12 loads all of its kernels at once. 1,343 MiB on a V100 (the guide's own reading, transformers
#   `perf_train_gpu_one.mdx`), 1.78 GiB on an A100 (torch 1.10.2; stas00/ml-engineering, `training/performance`).
# - torch from 1.13 on (CUDA 11.7) loads a kernel when it is first used: 0.47 GiB with none, 0.92 GiB with all of them
#   (A100, torch 2.1.1; the same source). A training run loads many of torch's, and those of flash attention, Triton and
#   bitsandbytes besides: 0.92 GiB is taken.
#
# Workspaces of cuBLAS come out of torch's allocator.
def context_bytes(gpu: Gpu, torch_version: Version) -> float:
    if torch_version >= (1, 13):
        return 0.92 * GIB
    return (1.78 if gpu.capability and gpu.capability >= (8, 0) else 1343 / 1024) * GIB
