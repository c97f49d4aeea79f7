"""Activations that are held in memory of the host between the forward and the backward pass, as a tape has them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from autotune.cost.kinds import TRANSFER
from autotune.cost.tape import Recorder


def offloaded(run: Callable[..., Any], recorder: Recorder) -> Callable[..., Any]:
    """Return a checkpointing function that keeps nothing on the device of what `run` saves.

    As `torch.autograd.graph.save_on_cpu`: a copy out in the forward pass, and one back into new memory.
    """

    def pack(tensor: torch.Tensor) -> tuple[torch.Size, torch.dtype, torch.device, bool]:
        _note(recorder, "to_host", tensor)
        return tensor.shape, tensor.dtype, tensor.device, tensor.requires_grad

    def unpack(packed: tuple[torch.Size, torch.dtype, torch.device, bool]) -> torch.Tensor:
        shape, dtype, device, requires_grad = packed
        tensor = torch.empty(shape, dtype=dtype, device=device)
        _note(recorder, "from_host", tensor)
        return tensor.requires_grad_(requires_grad)

    def keep_on_host(function: Any, *args: Any, **kwargs: Any) -> Any:
        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            return run(function, *args, **kwargs)

    return keep_on_host


def _note(recorder: Recorder, name: str, tensor: torch.Tensor) -> None:
    nbytes = float(tensor.numel() * tensor.element_size())
    recorder.note(name, TRANSFER, 0.0, nbytes, half=tensor.element_size() == 2)
