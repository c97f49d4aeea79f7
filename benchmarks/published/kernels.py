"""Kernels that projects patch into a model, and attention of another time: what they keep and take, on the meta device.

Read from the public sources: unsloth's Triton kernels as in foundation-model-stack/fms-acceleration
(`cross_entropy_loss.py`, `rms_layernorm.py`, `rope_embedding.py`, `fused_ops/unsloth_lora`), Liger's fused linear cross
entropy (`fused_linear_cross_entropy.py`). Attention has names of its own in transformers' table. Called by `software`.
"""

from __future__ import annotations

import types
from typing import Any

import torch
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS


class FastCrossEntropy(torch.autograd.Function):
    """Cross entropy that keeps the logits and writes their gradient over them; no log-softmax."""

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor) -> torch.Tensor:
        losses, normaliser = (torch.empty(logits.shape[0], dtype=torch.float32, device="meta") for _ in range(2))
        ctx.save_for_backward(logits, normaliser)
        return losses

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        logits, _ = ctx.saved_tensors
        return logits

    @classmethod
    def loss(cls, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return cls.apply(logits).sum() / torch.count_nonzero(labels != -100)


class SparingCrossEntropy(FastCrossEntropy):
    """The same with one more tensor of the size of the logits, for what the allocator holds from `SPARES_SINCE` on.

    With the same kernels and the same allocated peaks (Mistral-7B, 4-bit LoRA, micro-batches of 4 and 8) nvidia-smi
    showed 16,809 and 27,953 MiB with transformers 4.43.3, torch 2.4.0 and trl 0.9.6, and 18,809 and 31,953 MiB with
    4.44.2, 2.4.1 and 0.10.1: one block of the logits in fp32 more (2,000 and 4,000 MiB). Both are in the history of
    fms-acceleration's `scripts/benchmarks/refs/a100_80gb.csv` (commits b6c1455 and 4e81c64). Which of them makes the
    allocator keep it isn't known.
    """

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor) -> torch.Tensor:
        spare = torch.empty_like(logits)
        del spare
        return FastCrossEntropy.forward(ctx, logits)


# The version of transformers that came with it.
SPARES_SINCE = (4, 44)


class FastNorm(torch.autograd.Function):
    """RMSNorm that keeps its input and one number a row, and works on the gradient in place."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, torch.empty(x.shape[:-1], dtype=torch.float32, device="meta"))
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return gradient

    @staticmethod
    def forward_of(module: Any, x: torch.Tensor) -> torch.Tensor:
        return FastNorm.apply(x)


class FastRope(torch.autograd.Function):
    """Rotary embedding in place, forward and backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        batch, length, heads, width = x.shape
        return x.view(batch * length, heads * width).view(batch, length, heads, width)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        batch, length, heads, width = gradient.shape
        return gradient.reshape(batch * length, heads * width).view(batch, length, heads, width)

    @classmethod
    def both(cls, query: Any, key: Any, *_: Any, **__: Any) -> tuple[Any, Any]:  # of (batch, heads, length, width)
        return tuple(cls.apply(x.transpose(1, 2)).transpose(1, 2) for x in (query, key))


class LinearCrossEntropy(torch.autograd.Function):
    """Output head and cross entropy in chunks of tokens; the gradient of the input is all that is kept."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        tokens, width = x.shape
        share = -(-weight.shape[0] // width)
        rows = 1 << (-(-tokens // share) - 1).bit_length()
        of_weight = torch.zeros_like(weight) if ctx.needs_input_grad[1] else None
        of_x = torch.zeros_like(x)
        losses = torch.zeros(tokens, dtype=torch.float32, device="meta")
        # Three chunks stand for all: from the second on, the last chunk's tensors are there when the next begins.
        for _ in range(3):
            part = torch.empty((rows, width), dtype=x.dtype, device="meta")[:rows]
            logits = part @ weight.t()
            logits = logits.float()
            logits = logits.to(x.dtype)
            of_logits = logits * 1.0
            of_x[: of_logits.shape[0]] = (of_logits @ weight)[: of_x.shape[0]]
            if of_weight is not None:
                torch.addmm(of_weight, logits.t(), part, out=of_weight)
        ctx.save_for_backward(of_x, of_weight)
        return losses.sum()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return ctx.saved_tensors


class FusedLora(torch.autograd.Function):
    """Several packed layers with LoRA on one input, as one function: the input and its dropped copies are kept."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, layers: Any, *factors: torch.Tensor) -> Any:
        ctx.layers, ctx.shape = layers, x.shape
        x = x.view(-1, x.shape[-1])
        outputs, dropped = [], []
        for layer, a, b in zip(layers, factors[::2], factors[1::2], strict=True):
            weight = layer.base_layer.unpack()
            output = x @ weight.t()
            del weight
            name = layer.active_adapters[0]
            kept = layer.lora_dropout[name](x)
            output += (kept @ a.to(x.dtype).t()) @ (layer.scaling[name] * b.to(x.dtype).t())
            outputs.append(output.view(*ctx.shape[:-1], -1))
            dropped.append(kept)
        ctx.save_for_backward(x, *factors, *dropped)
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        count = len(ctx.layers)
        x, *rest = ctx.saved_tensors
        factors, dropped = rest[: 2 * count], rest[2 * count :]
        of_factors: list[Any] = []
        flat = [g.reshape(-1, g.shape[-1]) for g in gradients]
        for g, a, b, kept in zip(flat, factors[::2], factors[1::2], dropped, strict=True):
            of_a = kept.t() @ (g @ b.to(x.dtype))
            of_b = (a.to(x.dtype) @ kept.t()) @ g
            of_factors += [of_a.t().to(torch.float32), of_b.t().to(torch.float32)]
        of_x = None
        for layer, g, a, b, kept in zip(ctx.layers, flat, factors[::2], factors[1::2], dropped, strict=True):
            weight = layer.base_layer.unpack()
            if of_x is None:
                of_x = torch.matmul(g, weight, out=x) if count > 1 else torch.matmul(g, weight)
            else:
                of_x += g @ weight
            del weight
            of_x += (kept != 0) * (g @ b.to(x.dtype) @ a.to(x.dtype))
        return of_x.view(ctx.shape), None, *of_factors

    @classmethod
    def put_on(cls, attention: Any) -> None:
        waiting: list[Any] = []
        layers = [attention.q_proj, attention.k_proj, attention.v_proj]

        def following(module: Any, x: torch.Tensor) -> Any:
            if module is layers[0]:
                waiting.extend(cls.apply(x, layers, *_factors(layers)))
            return waiting.pop(0)

        def alone(module: Any, x: torch.Tensor) -> Any:
            return cls.apply(x, [module], *_factors([module]))[0]

        for layer in layers:
            layer.forward = types.MethodType(following, layer)
        attention.o_proj.forward = types.MethodType(alone, attention.o_proj)


def _factors(layers: Any) -> list[torch.Tensor]:
    names = [layer.active_adapters[0] for layer in layers]
    pairs = [(layer.lora_A[n].weight, layer.lora_B[n].weight) for layer, n in zip(layers, names, strict=True)]
    return [factor for pair in pairs for factor in pair]


# Names under which they are known.
REPEATED_FLASH = "flash_attention_2_repeated"
EAGER_OF_2022 = "eager_of_2022"


def _repeated_flash(module: Any, query: Any, key: Any, value: Any, mask: Any, **kwargs: Any) -> Any:
    groups = query.shape[1] // key.shape[1]
    key, value = _repeat(key, groups), _repeat(value, groups)
    return ALL_ATTENTION_FUNCTIONS["flash_attention_2"](module, query, key, value, mask, **kwargs)


def _repeat(tensor: torch.Tensor, times: int) -> torch.Tensor:
    """`repeat_kv` of transformers 4."""
    if times == 1:
        return tensor
    batch, heads, length, width = tensor.shape
    expanded = tensor[:, :, None].expand(batch, heads, times, length, width)
    return expanded.reshape(batch, heads * times, length, width)


class _SoftmaxOf2021(torch.autograd.Function):
    """Softmax that keeps its input beside its output: torch up to 1.10, `_softmax_backward_data(..., self)`."""

    @staticmethod
    def forward(ctx: Any, scores: torch.Tensor) -> torch.Tensor:
        output = torch.empty_like(scores)
        ctx.save_for_backward(scores, output)
        return output

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return torch.empty_like(gradient)


def _eager_of_2022(module: Any, query: Any, key: Any, value: Any, mask: Any, **kwargs: Any) -> Any:
    """Attend as `BertSelfAttention` of transformers 4.15, which always added a mask, in the weights' type."""
    scores = torch.matmul(query, key.transpose(-1, -2))
    scores = scores / query.shape[-1] ** 0.5
    dtype = next(module.parameters()).dtype
    scores = scores + torch.zeros((query.shape[0], 1, 1, key.shape[2]), dtype=dtype, device="meta")
    probabilities = _SoftmaxOf2021.apply(scores)
    probabilities = torch.nn.functional.dropout(probabilities, kwargs.get("dropout", 0.0), module.training)
    context = torch.matmul(probabilities, value)
    return context.transpose(1, 2).contiguous(), None


def _no_mask(*args: Any, **kwargs: Any) -> None:
    """Return no mask: batches hold no padding."""
    return None


ALL_ATTENTION_FUNCTIONS.register(REPEATED_FLASH, _repeated_flash)
ALL_ATTENTION_FUNCTIONS.register(EAGER_OF_2022, _eager_of_2022)
ALL_MASK_ATTENTION_FUNCTIONS.register(REPEATED_FLASH, _no_mask)
ALL_MASK_ATTENTION_FUNCTIONS.register(EAGER_OF_2022, _no_mask)
