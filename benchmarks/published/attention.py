"""Attention as libraries of another time ran it, under names of its own in transformers' table of attention functions.

Called by `software`, which gives a model one of these names.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

# Names under which they are known.
REPEATED_FLASH = "flash_attention_2_repeated"
EAGER_OF_2022 = "eager_of_2022"


def _repeated_flash(module: Any, query: Any, key: Any, value: Any, mask: Any, **kwargs: Any) -> Any:
    """Repeat keys and values for all heads, then attend with flash attention 2."""
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
