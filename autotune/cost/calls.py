"""An operator's call as text, and from the text back to something that can be run.

The text is JSON: the operator's name, its arguments and its keyword arguments; a tensor is its type, sizes and, where
it isn't contiguous, strides. Values are not kept: an operator is run again on random numbers, and on indices that are
all 0.
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Callable
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

_NAMED = (torch.dtype, torch.layout, torch.memory_format)


def written(name: str, args: Any, kwargs: Any) -> str:
    """Return a call as text; empty where an argument can't be written."""
    try:
        return json.dumps([name, _written(args), {key: _written(value) for key, value in kwargs.items()}])
    except TypeError:
        return ""


def _written(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        described = {"t": str(value.dtype)[6:], "n": list(value.shape)}
        return described if value.is_contiguous() else {**described, "s": list(value.stride())}
    if isinstance(value, list | tuple):
        return [_written(item) for item in value]
    if isinstance(value, torch.device):
        return {"device": 0}
    if isinstance(value, _NAMED):
        return {"torch": str(value)[6:]}
    if value is None or isinstance(value, int | float | str):
        return value
    raise TypeError(value)


def runnable(call: str, device: torch.device) -> Callable[[], Any]:
    """Return what runs a call on a device.

    Raises:
        LookupError, RuntimeError, ValueError: There is no such operator here, or too little memory for its tensors.
    """
    name, args, kwargs = json.loads(call)
    made = [_made(value, device) for value in args]
    if name in _KERNELS:
        return _KERNELS[name](*made[:3], kwargs["causal"])
    packet, _, overload = name.partition(".")[2].partition(".")
    space = name.partition(".")[0]
    operator = getattr(getattr(getattr(torch.ops, space), packet), overload or "default")
    return functools.partial(operator, *made, **{key: _made(value, device) for key, value in kwargs.items()})


def bytes_of(call: str) -> float:
    """Return the bytes of all tensors that a call is given."""
    found = 0.0
    pending = list(json.loads(call)[1:])
    while pending:
        value = pending.pop()
        if isinstance(value, dict) and "n" in value:
            found += math.prod(value["n"]) * getattr(torch, value["t"]).itemsize
        elif isinstance(value, list | dict):
            pending += value.values() if isinstance(value, dict) else value
    return found


def _made(value: Any, device: torch.device) -> Any:
    if isinstance(value, list):
        return [_made(item, device) for item in value]
    if not isinstance(value, dict):
        return value
    if "device" in value:
        return device
    if "torch" in value:
        return getattr(torch, value["torch"])
    dtype, shape = getattr(torch, value["t"]), value["n"]
    span = 1 + sum((n - 1) * s for n, s in zip(shape, value["s"], strict=True)) if "s" in value else math.prod(shape)
    flat = torch.randn(max(span, 0), device=device).to(dtype) if dtype.is_floating_point else None
    if flat is None:
        flat = torch.zeros(max(span, 0), dtype=dtype, device=device)
    return flat.as_strided(shape, value["s"]) if "s" in value else flat.view(shape)


def _attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, causal: bool) -> Callable[[], Any]:
    grouped = key.shape[1] != query.shape[1]
    return lambda: scaled_dot_product_attention(query, key, value, is_causal=causal, enable_gqa=grouped)


def _attention_backward(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, causal: bool) -> Callable[[], Any]:
    inputs = [t.requires_grad_() for t in (query, key, value)]
    with torch.enable_grad():
        output = _attention(inputs[0], inputs[1], inputs[2], causal)()
    gradient = torch.randn_like(output)
    return lambda: torch.autograd.grad(output, inputs, gradient, retain_graph=True)


# Kernels that a trace writes down by itself: `attention`.
_KERNELS: dict[str, Callable[..., Callable[[], Any]]] = {
    f"{kernel}_attention{which}": run
    for kernel in ("fused", "flash", "efficient")
    for which, run in (("", _attention), ("_backward", _attention_backward))
}
