"""Traces Liger's kernels: the library's own functions run on tensors without values, its Triton kernels don't.

A model is patched as transformers' Trainer has it done (`apply_liger_kernel`). The library's functions allocate as they
always do; a kernel that is launched is written down with the tensors that it is given. The fused linear cross-entropy
alone is written here, since it asks for values and for the device: `fused_linear_cross_entropy_forward` of liger-kernel
0.8. It works head and loss out in chunks of tokens, whose logits take about as much as the hidden states, and makes the
gradients in the forward pass.

Not covered: rows of a norm's gradient for each multiprocessor, of which there is one here.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch

from autotune.cost.family import Family
from autotune.cost.profile import NORMALISATION
from autotune.cost.tape import Recorder
from autotune.training.loss import base_model


@contextlib.contextmanager
def liger_kernels(model: Any, recorder: Recorder, family: Family) -> Iterator[None]:
    """Let a model run Liger's kernels inside; what the library changes in modules of transformers is undone.

    Args:
        model: One that liger-kernel supports, with its adapter.
        recorder: Writes down the kernels.
        family: How the model is run.

    Raises:
        ImportError: liger-kernel or Triton isn't installed.
    """
    from liger_kernel.ops import fused_linear_cross_entropy as fused
    from liger_kernel.transformers.monkey_patch import _apply_liger_kernel_to_instance
    from triton.runtime.jit import JITFunction

    def launch(kernel: Any, *args: Any, **kwargs: Any) -> None:
        tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor)]
        recorder.note_kernel(kernel.fn.__name__, 0.0, *tensors, kind=NORMALISATION)

    def scaled(_: Any, *gradients: Any) -> Any:  # in place
        return gradients

    def forward(_input: Any, weight: Any, target: Any, **options: Any) -> Any:
        return _linear_cross_entropy(recorder, family, _input, weight, options.get("bias"))

    base = base_model(model)
    modules = {type(module).__module__ for module in base.modules()}
    with contextlib.ExitStack() as changed:
        for name in modules:
            if name.startswith("transformers."):
                changed.enter_context(mock.patch.dict(vars(sys.modules[name])))
        cross_entropy = torch.nn.functional.cross_entropy
        changed.enter_context(mock.patch.object(torch.nn.functional, "cross_entropy", cross_entropy))
        changed.enter_context(mock.patch.object(JITFunction, "run", launch))
        changed.enter_context(mock.patch.object(fused, "fused_linear_cross_entropy_forward", forward))
        changed.enter_context(mock.patch.object(fused, "fused_linear_cross_entropy_backward", scaled))
        _apply_liger_kernel_to_instance(model=base)
        yield


def _linear_cross_entropy(
    recorder: Recorder, family: Family, hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
) -> tuple[Any, ...]:
    """Return (loss, None, None, None, gradient of hidden, of the weight, of the bias).

    Args:
        recorder: Writes down the products.
        family: Whose autocast has each product cast its arguments; without it products write into what is there.
        hidden: (tokens, width).
        weight: (words, width).
        bias: (words).
    """
    (tokens, width), words = hidden.shape, len(weight)
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
