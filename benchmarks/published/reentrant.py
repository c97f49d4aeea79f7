"""Reentrant checkpointing on the meta device, which transformers 4 had by default."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch

Contexts = Callable[[], tuple[Any, Any]]


def reentrant(contexts: Contexts) -> Callable[..., Any]:
    """Return `torch.utils.checkpoint(use_reentrant=True)`, once the default, for the meta device.

    It runs a layer again as a whole when its backward pass begins, and holds the layer's output meanwhile.

    Args:
        contexts: Returns what a forward pass and its repetition run in.
    """

    def run(function: Any, *inputs: Any) -> Any:
        return _Reentrant.apply(function, contexts, *inputs)  # type: ignore[no-untyped-call]

    return run


class _Reentrant(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, function: Any, contexts: Contexts, *inputs: Any) -> Any:
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
