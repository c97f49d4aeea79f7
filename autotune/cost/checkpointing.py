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
    # As `gradient_checkpointing_enable` of transformers does: the output of frozen embeddings (LoRA) becomes a leaf,
    # which stays until the end and gets a gradient.
    if base.main_input_name == "input_ids":
        base.disable_input_require_grads()
        base.enable_input_require_grads()
    if kind.offload:
        run = offloaded(run, recorder)
    every = {"every_n_layers": kind.every} if kind.every > 1 else {}
    base._set_gradient_checkpointing(enable=True, gradient_checkpointing_func=run, **every)


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
