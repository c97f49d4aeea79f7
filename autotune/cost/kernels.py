"""Operators that the meta device lacks: results of the right size, and their work.

Some operators take memory of a CUDA device's allocator and give it back before they end. Those of transformers that do
are in `scratch_bytes`; they were found by running them one by one on torch's real allocator, and read in their sources.

Liger's own functions run on tensors without values and allocate as always; of its Triton kernels a launch is written
down with the tensors that it is given. The fused linear cross-entropy alone is written here, since it asks for values
and for the device: `fused_linear_cross_entropy_forward` of liger-kernel 0.8, which works head and loss out in chunks of
tokens whose logits take about as much as the hidden states, and makes the gradients in the forward pass.
"""

import contextlib
import functools
import os
import sys
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch

from autotune.cost import meta
from autotune.cost.attention import flash
from autotune.cost.family import Family, Generation, workspace_bytes
from autotune.cost.profile import NORMALISATION
from autotune.cost.tape import Recorder
from autotune.training.loss import base_model


@contextlib.contextmanager
def flash_attention_2(recorder: Recorder, dtype: torch.dtype) -> Iterator[None]:
    """Let models find `flash_attention_2`, installed or not; inputs in fp32 are cast to `dtype`."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    def forward(module: Any, query: Any, key: Any, value: Any, attention_mask: Any, **kwargs: Any) -> Any:
        if query.dtype is torch.float32:
            query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
        causal = kwargs.get("is_causal")
        causal = getattr(module, "is_causal", True) if causal is None else causal
        if attention_mask is not None:  # of padding: `_upad_input` and `_pad_input`, with tokens of full length
            rows = torch.arange(attention_mask.numel(), device=query.device)
            batch, _, length, _ = query.shape
            kept = (
                t.transpose(1, 2).flatten(0, 1)[rows].view(batch, length, -1, t.shape[-1]) for t in (query, key, value)
            )
            query, key, value = (part.transpose(1, 2) for part in kept)
            found = flash(recorder, query, key, value, causal=bool(causal)).transpose(1, 2).flatten(0, 1)
            padded = torch.zeros_like(found)
            padded[rows] = found
            return padded.view(batch, length, *found.shape[1:]), None
        if (ends := kwargs.get("cu_seq_lens_q")) is None or ends.is_meta:
            return flash(recorder, query, key, value, causal=bool(causal)).transpose(1, 2), None
        sizes = ends.diff().tolist()  # one image after another, without a copy
        parts = zip(*(meta.split_images(torch.split, t, sizes, 2) for t in (query, key, value)), strict=True)
        outputs = [flash(recorder, *part, causal=bool(causal)).transpose(1, 2) for part in parts]
        return torch.cat(outputs, dim=1) if len(outputs) > 1 else outputs[0], None

    ALL_ATTENTION_FUNCTIONS["flash_attention_2"] = forward
    try:
        yield
    finally:
        del ALL_ATTENTION_FUNCTIONS["flash_attention_2"]


class UpcastSoftmax(torch.autograd.Function):
    """Softmax, or its logarithm, that reads 16 bits and writes 32 in one operator."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, recorder: Recorder, is_log: bool) -> torch.Tensor:
        output = torch.empty_like(tensor, dtype=torch.float32)
        ctx.save_for_backward(output)
        ctx.recorder, ctx.dtype, ctx.is_log = recorder, tensor.dtype, is_log
        recorder.note_kernel("softmax", 0.0, tensor, output, kind=NORMALISATION)
        return output

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        (output,) = ctx.saved_tensors
        product = None if ctx.is_log else torch.empty_like(output)  # of gradient and output: `_softmax_backward`
        result = torch.empty_like(output, dtype=ctx.dtype)
        ctx.recorder.note_kernel("softmax_backward", 0.0, output, gradient, result, kind=NORMALISATION)
        del product
        return result, None, None


class GroupedMatmul(torch.autograd.Function):
    """Products of runs of rows with one matrix each: (rows, in) x (experts, in, out)."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, matrices: torch.Tensor, recorder: Recorder) -> torch.Tensor:
        ctx.save_for_backward(rows, matrices)
        ctx.recorder = recorder
        ctx.flops = 2.0 * rows.shape[0] * matrices.shape[1] * matrices.shape[2]
        output = rows.new_empty((rows.shape[0], matrices.shape[2]))
        recorder.note_kernel("grouped_mm", ctx.flops, rows, matrices, output)
        return output

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        rows, matrices = ctx.saved_tensors
        of_rows = of_matrices = None
        if ctx.needs_input_grad[0]:
            of_rows = torch.empty_like(rows)
            ctx.recorder.note_kernel("grouped_mm", ctx.flops, gradient, matrices, of_rows)
        if ctx.needs_input_grad[1]:
            of_matrices = torch.empty_like(matrices)
            ctx.recorder.note_kernel("grouped_mm", ctx.flops, rows, gradient, of_matrices)
        return of_rows, of_matrices, None


class CtcLoss(torch.autograd.Function):
    """The CTC loss, which saves an fp32 number for each frame and each label and blank between labels."""

    @staticmethod
    def forward(ctx: Any, log_probabilities: torch.Tensor, labels: int, recorder: Recorder) -> torch.Tensor:
        frames, batch, _ = log_probabilities.shape
        alpha = log_probabilities.new_empty((batch, frames, 2 * labels + 1))  # aten/src/ATen/native/LossCTC.cpp
        ctx.save_for_backward(log_probabilities, alpha)
        ctx.recorder = recorder
        recorder.note_kernel("ctc_loss", 0.0, log_probabilities, alpha, kind=NORMALISATION)
        return log_probabilities.new_empty(())

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        log_probabilities, alpha = ctx.saved_tensors
        beta = torch.empty_like(alpha)  # as much again as was saved
        result = torch.empty_like(log_probabilities)
        ctx.recorder.note_kernel("ctc_loss_backward", 0.0, log_probabilities, alpha, beta, result, kind=NORMALISATION)
        return result, None, None


# Kernels that copy arguments which aren't contiguous, and how many arguments: `host_softmax` in SoftMax.cu, and
# `expect_contiguous` in layer_norm_kernel.cu.
_CONTIGUOUS = dict.fromkeys(("_softmax", "_log_softmax", "native_layer_norm"), 1)
_CONTIGUOUS |= dict.fromkeys(("_softmax_backward_data", "_log_softmax_backward_data", "native_layer_norm_backward"), 2)


# Until torch 2.14 each thread keeps a workspace for cuBLAS, from 2.15 on each product takes one and gives it back.
KEEPS_WORKSPACES = meta.TORCH < (2, 15) or os.environ.get("TORCH_CUBLAS_WORKSPACE_CACHE") == "1"
_PRODUCTS = ("mm", "bmm", "addmm", "baddbmm", "_scaled_mm")


def scratch_bytes(name: str, args: Any, out: Any, generation: Generation = "ampere") -> int:
    if name in _PRODUCTS and not KEEPS_WORKSPACES:
        # `addmm_out_cuda_impl` in Blas.cpp has cuBLASLt add a bias, and in 16 bits whatever is added.
        adds = name == "addmm" and (args[0].dim() == 1 < args[0].numel() or args[0].element_size() == 2)
        return 1 << 20 if adds or name == "_scaled_mm" else workspace_bytes(generation)
    copies = sum(int(t.nbytes) for t in args[: _CONTIGUOUS.get(name, 0)] if not t.is_contiguous())
    if name in _CONTIGUOUS:  # `softmax_backward_cuda_out` multiplies gradient and output first; the logarithm's doesn't
        return copies + (int(args[0].nbytes) if name == "_softmax_backward_data" else 0)
    if name == "_safe_softmax":  # `_safe_softmax` in SoftMax.cpp looks for rows without any key: a byte a score
        return int(args[0].numel())
    if name in ("mse_loss", "smooth_l1_loss", "huber_loss") and out.dim() == 0:  # what is then reduced: Loss.cpp
        return max(int(args[0].nbytes), int(args[1].nbytes))
    if name != "embedding_dense_backward":
        return 0
    # `embedding_backward_cuda_kernel`: partial sums in fp32, one for each token and each ten tokens of a batch. Rows of
    # tokens are sorted first, which takes three numbers each. Up to 3,072 tokens torch takes another kernel, without
    # scratch, which is left out: a trace's batches are of two samples and four.
    gradient, indices, rows = args[0], args[1], int(args[2])
    tokens, width = int(indices.numel()), int(gradient.shape[-1])
    segments = min(tokens, rows)
    parts = tokens // 10 + segments
    sums = 4 * parts * (-(-width // 32) * 32)
    sorting = int(indices.element_size()) * (3 * tokens + 2 * segments + parts)
    return sums + sorting + (0 if gradient.is_contiguous() else int(gradient.nbytes))


@contextlib.contextmanager
def liger_kernels(model: Any, recorder: Recorder, family: Family) -> Iterator[None]:
    """Let a model run Liger's kernels inside; changes of the library to modules of transformers are undone after it."""
    from liger_kernel.ops import fused_linear_cross_entropy as fused
    from liger_kernel.transformers.monkey_patch import _apply_liger_kernel_to_instance
    from triton.runtime.jit import JITFunction

    def launch(kernel: Any, *args: Any, **kwargs: Any) -> None:
        tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor)]
        recorder.note_kernel(kernel.fn.__name__, 0.0, *tensors, kind=NORMALISATION)

    forward = functools.partial(_linear_cross_entropy, recorder, family)
    base = base_model(model)
    with contextlib.ExitStack() as changed:
        for name in {type(module).__module__ for module in base.modules()}:
            if name.startswith("transformers."):
                changed.enter_context(mock.patch.dict(vars(sys.modules[name])))
        for owner, name, replacement in (
            (torch.nn.functional, "cross_entropy", torch.nn.functional.cross_entropy),  # to be put back
            (JITFunction, "run", launch),
            (fused, "fused_linear_cross_entropy_forward", forward),
            (fused, "fused_linear_cross_entropy_backward", lambda _, *gradients: gradients),  # without scaling
        ):
            changed.enter_context(mock.patch.object(owner, name, replacement))
        _apply_liger_kernel_to_instance(model=base)
        yield


def _linear_cross_entropy(
    recorder: Recorder, family: Family, _input: Any, weight: Any, target: Any, *, bias: Any = None, **_: Any
) -> tuple[Any, ...]:
    """Return (loss, None, None, None, gradient of the input, of the weight, of the bias)."""
    hidden, (tokens, width), words = _input, _input.shape, len(weight)
    # Autocast has each product cast its arguments; without it products write into what is there.
    in_place = family.autocast is None and hidden.dtype == weight.dtype
    chunk = min(tokens, 1 << (-(-tokens // -(-words // width)) - 1).bit_length())
    of_hidden = torch.zeros_like(hidden)
    of_weight = torch.zeros_like(weight) if weight.requires_grad and hidden.requires_grad else None
    of_bias = torch.zeros_like(bias) if bias is not None else None
    losses = hidden.new_zeros(tokens, dtype=torch.float32)
    buffer = hidden.new_empty((chunk, words)) if in_place else None
    for start in range(0, tokens, chunk):
        rows, of_rows = hidden[start : start + chunk], of_hidden[start : start + chunk]
        logits = rows @ weight.t() if buffer is None else torch.mm(rows, weight.t(), out=buffer[: len(rows)])
        recorder.note_kernel("liger_cross_entropy_kernel", 0.0, logits, kind=NORMALISATION)
        if hidden.requires_grad and in_place:
            torch.mm(logits, weight, out=of_rows)
        elif hidden.requires_grad:
            of_rows.copy_(logits @ weight)
        if of_weight is not None and (family.generation == "turing" or logits.dtype is torch.float32):
            of_weight += torch.mm(logits.t(), rows).float()
        elif of_weight is not None:  # `torch.addmm` with an output
            recorder.note_kernel("addmm", 2.0 * len(rows) * words * width, logits, rows.to(logits.dtype), of_weight)
        del logits
    return losses.sum(), None, None, None, of_hidden, of_weight, of_bias
