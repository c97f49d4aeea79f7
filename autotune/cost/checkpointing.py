"""Checkpointing of a traced model: the function that runs its layers again, and where their inputs lie meanwhile."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from autotune.cost.family import Family
from autotune.cost.profile import TRANSFER
from autotune.cost.semantics import Semantics
from autotune.cost.tape import Recorder
from autotune.training.loss import base_model
from autotune.values.techniques import CHECKPOINTING

Contexts = Callable[[], tuple[Any, Any]]


def set_checkpointing(model: Any, family: Family, semantics: Semantics, recorder: Recorder) -> None:
    """Switch the checkpointing of a model on or off as its family says."""
    base = base_model(model)
    if family.checkpointing == "none":
        if base.supports_gradient_checkpointing:
            base._set_gradient_checkpointing(enable=False)
        return
    kind = CHECKPOINTING[family.checkpointing]

    def contexts() -> tuple[Any, Any]:
        return contextlib.nullcontext(), semantics.again()

    run: Callable[..., Any] = functools.partial(
        checkpoint, use_reentrant=False, preserve_rng_state=False, determinism_check="none", context_fn=contexts
    )
    if kind.reentrant:
        run = reentrant(contexts)
    # As `gradient_checkpointing_enable` of transformers does: the output of frozen embeddings (LoRA) becomes a leaf,
    # which stays until the end and gets a gradient.
    if base.main_input_name == "input_ids":
        base.disable_input_require_grads()
        base.enable_input_require_grads()
    if kind.offload:
        run = offloaded(run, recorder)
    every = {"every_n_layers": kind.every} if kind.every > 1 else {}
    base._set_gradient_checkpointing(enable=True, gradient_checkpointing_func=run, **every)


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


def offloaded(run: Callable[..., Any], recorder: Recorder) -> Callable[..., Any]:
    """Return a checkpointing function that leaves nothing on the device of what `run` saves.

    As `torch.autograd.graph.save_on_cpu`: a copy out in the forward pass, and one back into new memory.
    """

    def pack(tensor: torch.Tensor) -> tuple[torch.Size, torch.dtype, torch.device, bool]:
        recorder.note_kernel("to_host", 0.0, tensor, kind=TRANSFER)
        return tensor.shape, tensor.dtype, tensor.device, tensor.requires_grad

    def unpack(packed: tuple[torch.Size, torch.dtype, torch.device, bool]) -> torch.Tensor:
        shape, dtype, device, requires_grad = packed
        tensor = torch.empty(shape, dtype=dtype, device=device)
        recorder.note_kernel("from_host", 0.0, tensor, kind=TRANSFER)
        return tensor.requires_grad_(requires_grad)

    def saving_on_host(function: Any, *args: Any, **kwargs: Any) -> Any:
        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            return run(function, *args, **kwargs)

    return saving_on_host
