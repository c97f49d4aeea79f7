"""Operators that a trace doesn't have: results of the right size that are all zero, and their work.

Fused attention on the CPU keeps query, key, value, output and the log-sum-exp of each row (fp32), never the scores; on
CUDA it is the business of `attention`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from autotune.cost.attention import flash
from autotune.cost.kinds import CONTRACTION, NORMALISATION
from autotune.cost.tape import Recorder


def fused_attention_on_cpu(
    recorder: Recorder,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    *,
    causal: bool,
) -> torch.Tensor:
    """Return an output of the CPU's fused attention without computing it.

    Args:
        recorder: Told of the work.
        query: (batch, heads, length, width).
        key: (batch, key heads, key length, width).
        value: As `key`.
        mask: Added to the scores, or booleans.
        causal: Whether half of the scores are left out.
    """
    result: torch.Tensor = _FusedAttention.apply(  # type: ignore[no-untyped-call]
        query, key, value, mask, recorder, causal
    )
    return result


@contextlib.contextmanager
def flash_attention_2(recorder: Recorder, dtype: torch.dtype) -> Iterator[None]:
    """Let models that were told to use `flash_attention_2` find it, installed or not.

    Args:
        recorder: Told of the work.
        dtype: What inputs in fp32 are cast to, as transformers does.
    """
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    def forward(module: Any, query: Any, key: Any, value: Any, attention_mask: Any, **kwargs: Any) -> Any:
        if query.dtype is torch.float32:
            query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
        causal = kwargs.get("is_causal")
        causal = getattr(module, "is_causal", True) if causal is None else causal
        output = flash(recorder, query, key, value, causal=bool(causal))
        return output.transpose(1, 2), None

    ALL_ATTENTION_FUNCTIONS["flash_attention_2"] = forward
    try:
        yield
    finally:
        del ALL_ATTENTION_FUNCTIONS["flash_attention_2"]


class _FusedAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Any, key: Any, value: Any, mask: Any, recorder: Any, causal: Any) -> Any:
        batch, heads, length, _ = query.shape
        # Kernels lay the output out as (batch, length, heads, width), so that merging the heads is a view.
        output = query.new_zeros((batch, length, heads, value.shape[-1])).transpose(1, 2)
        normaliser = query.new_empty((batch, heads, length), dtype=torch.float32)
        ctx.save_for_backward(query, key, value, output, normaliser)
        ctx.mask = mask
        ctx.recorder = recorder
        ctx.flops = 4.0 * batch * heads * length * key.shape[2] * query.shape[-1] * (0.5 if causal else 1.0)
        _note(recorder, "fused_attention", ctx.flops, query, key, value, output)
        return output

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        query, key, value, output, _ = ctx.saved_tensors
        of_query, of_key, of_value = (
            t.new_empty((t.shape[0], t.shape[2], t.shape[1], t.shape[3])).transpose(1, 2) for t in (query, key, value)
        )
        of_mask = None
        if ctx.mask is not None and ctx.mask.requires_grad:
            of_mask = torch.empty_like(ctx.mask)
        _note(ctx.recorder, "fused_attention_backward", 2.5 * ctx.flops, query, key, value, output, gradient, of_query)
        return of_query, of_key, of_value, of_mask, None, None


class UpcastSoftmax(torch.autograd.Function):
    """Softmax, or its logarithm, that reads 16 bits and writes 32 in one operator."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, recorder: Recorder, is_log: bool) -> torch.Tensor:
        """Return an output in fp32; it is what is kept."""
        output = torch.empty_like(tensor, dtype=torch.float32)
        ctx.save_for_backward(output)
        ctx.recorder, ctx.dtype, ctx.is_log = recorder, tensor.dtype, is_log
        _note(recorder, "softmax", 0.0, tensor, output, kind=NORMALISATION)
        return output

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        """Return a gradient in 16 bits."""
        (output,) = ctx.saved_tensors
        product = None if ctx.is_log else torch.empty_like(output)  # of gradient and output: `scratch`
        result = torch.empty_like(output, dtype=ctx.dtype)
        _note(ctx.recorder, "softmax_backward", 0.0, output, gradient, result, kind=NORMALISATION)
        del product
        return result, None, None


class GroupedMatmul(torch.autograd.Function):
    """Products of runs of rows with one matrix each: (rows, in) x (experts, in, out)."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, matrices: torch.Tensor, recorder: Recorder) -> torch.Tensor:
        """Return an output of (rows, out)."""
        ctx.save_for_backward(rows, matrices)
        ctx.recorder = recorder
        ctx.flops = 2.0 * rows.shape[0] * matrices.shape[1] * matrices.shape[2]
        output = rows.new_empty((rows.shape[0], matrices.shape[2]))
        _note(recorder, "grouped_mm", ctx.flops, rows, matrices, output)
        return output

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        """Return the gradients of rows and matrices, those that are needed."""
        rows, matrices = ctx.saved_tensors
        of_rows = of_matrices = None
        if ctx.needs_input_grad[0]:
            of_rows = torch.empty_like(rows)
            _note(ctx.recorder, "grouped_mm", ctx.flops, gradient, matrices, of_rows)
        if ctx.needs_input_grad[1]:
            of_matrices = torch.empty_like(matrices)
            _note(ctx.recorder, "grouped_mm", ctx.flops, rows, gradient, of_matrices)
        return of_rows, of_matrices, None


class CtcLoss(torch.autograd.Function):
    """The CTC loss, which keeps an fp32 number for each frame and each label and blank between labels."""

    @staticmethod
    def forward(ctx: Any, log_probabilities: torch.Tensor, labels: int, recorder: Recorder) -> torch.Tensor:
        """Return a loss for the (frames, batch, vocabulary) of `log_probabilities`."""
        frames, batch, _ = log_probabilities.shape
        alpha = log_probabilities.new_empty((batch, frames, 2 * labels + 1))  # aten/src/ATen/native/LossCTC.cpp
        ctx.save_for_backward(log_probabilities, alpha)
        ctx.recorder = recorder
        _note(recorder, "ctc_loss", 0.0, log_probabilities, alpha, kind=NORMALISATION)
        return log_probabilities.new_empty(())

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        """Return the gradient of the log-probabilities; the way back needs as much again as was kept."""
        log_probabilities, alpha = ctx.saved_tensors
        beta = torch.empty_like(alpha)
        result = torch.empty_like(log_probabilities)
        _note(ctx.recorder, "ctc_loss_backward", 0.0, log_probabilities, alpha, beta, result, kind=NORMALISATION)
        return result, None, None


def _note(recorder: Recorder, name: str, flops: float, *tensors: torch.Tensor, kind: int = CONTRACTION) -> None:
    moved = float(sum(t.numel() * t.element_size() for t in tensors))
    recorder.note(name, kind, flops, moved, half=tensors[0].element_size() == 2)
