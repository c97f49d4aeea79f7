"""Random weights for a large model in a fraction of the time: large tensors are filled with copies of a drawn block.

On a CPU torch draws one number after the other, and transformers draws most weights twice: the layer's own
initialisation, then the model's. On a 2.5 GHz core DistilBERT (67M parameters) took 1.05 s, and takes 0.32 s so;
t5-small (61M) 2.5 s and 0.5 s.

The numbers have the very distribution that was asked for, and rows of a matrix differ, so that routing, outliers and
overflow are as they were. Timing and memory depend on nothing else. Losses that are to be compared need the true
initialisation: their trials don't use this.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

# All of a model's weights on each rank, although DeepSpeed is going to split them: for losses that are compared.
# Under ZeRO-3 transformers splits weights while it draws them, in an order of its own, so that they aren't those of
# one device. DeepSpeed splits a whole model just as well when training begins, if there is the memory for it.


@contextmanager
def whole_weights() -> Iterator[None]:
    """Have transformers not know of DeepSpeed while entered."""
    from transformers.integrations import deepspeed

    kept = deepspeed._hf_deepspeed_config_weak_ref
    deepspeed.unset_hf_deepspeed_config()
    try:
        yield
    finally:
        deepspeed._hf_deepspeed_config_weak_ref = kept


# Numbers that are drawn: a prime, so that rows of a matrix differ up to this many of them.
BLOCK = 100_003

Key = tuple[str, torch.dtype]


@contextmanager
def quick_weights() -> Iterator[None]:
    """Draw the normal and uniform numbers of large tensors on the CPU in blocks while entered.

    Equal torch seeds give equal weights.
    """
    originals = {name: getattr(torch.Tensor, name) for name in ("normal_", "uniform_")}
    blocks: dict[Key, torch.Tensor] = {}
    try:
        for name, original in originals.items():
            setattr(torch.Tensor, name, _in_blocks(name, original, blocks))
        yield
    finally:
        for name in originals:
            delattr(torch.Tensor, name)  # what it hides is inherited from torch's own base class


def _in_blocks(name: str, original: Callable[..., Any], blocks: dict[Key, torch.Tensor]) -> Callable[..., Any]:
    """Return the method `name` of tensors, which is `original` for all but large ones."""
    first, second = ("mean", "std") if name == "normal_" else ("from", "to")

    def fill(tensor: torch.Tensor, *given: float, generator: Any = None, **named: float) -> torch.Tensor:
        if tensor.device.type != "cpu" or tensor.numel() <= BLOCK or generator is not None or not _is_plain(tensor):
            result: torch.Tensor = original(tensor, *given, generator=generator, **named)
            return result
        low, high = (*given, *(named[key] for key in (first, second)[len(given) :] if key in named), *(0.0, 1.0))[:2]
        key = (name, tensor.dtype)
        if key not in blocks:
            blocks[key] = original(torch.empty(BLOCK, dtype=tensor.dtype, device="cpu"))
        spread, flat = high if name == "normal_" else high - low, tensor.view(-1)
        scaled = blocks[key] * spread + low
        whole = flat.numel() // BLOCK * BLOCK
        flat[:whole].view(-1, BLOCK).copy_(scaled)
        flat[whole:].copy_(scaled[: flat.numel() - whole])
        return tensor

    return fill


def _is_plain(tensor: torch.Tensor) -> bool:
    """Whether a tensor is one piece of floating-point memory."""
    return tensor.is_floating_point() and tensor.is_contiguous() and type(tensor) in (torch.Tensor, torch.nn.Parameter)
