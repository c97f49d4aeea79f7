"""Runs operators on the meta device: equal ones once, and those of models that are shown images; writes calls as text.

Models that are shown images ask for values: where the placeholders of images stand, how an image is cut. These inputs
stay on the host, whatever device a model moves them to. A trace, whose images are all of one size, makes the loop over
images a dimension, with the operators, sizes and lifetimes of the loop.

An operator's call as text is JSON: its name, its arguments and its keyword arguments; a tensor is its type, sizes and,
where it isn't contiguous, strides. An operator is run again on random numbers and on indices of 0.
"""

import functools
import json
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention
from torch.utils._pytree import tree_map_only

TORCH = tuple(map(int, torch.__version__.split(".")[:2]))

# Shape, strides and type of each new tensor that an operator returned, and whether it returned a single one; None: the
# operator has to be run. By operator and arguments, as `_described` has them.
_Results = tuple[bool, tuple[tuple[torch.Size, tuple[int, ...], torch.dtype] | None, ...]] | None
_RESULTS: dict[tuple[Any, ...], _Results] = {}
_EMPTY = torch.ops.aten.empty_strided.default
_PLAIN = frozenset({int, float, bool, str, torch.dtype, torch.device, torch.layout, torch.memory_format})


def run_once(func: Any, args: Any, kwargs: Any) -> Any:
    """Return an operator's results; of one that ran before on meta tensors alike only their shapes are made anew.

    Equal layers run equal operators, and working out the shapes of their results, mostly in Python, is most of the time
    of a trace. Operators that return views or change an argument are always run.
    """
    if not _makes_new_tensors(func):
        return func(*args, **kwargs)
    try:
        options = ((name, _described(value)) for name, value in kwargs.items())
        key = (func, torch.get_default_dtype(), _described(args), *options)
    except TypeError:  # an argument of another kind: a tensor with values, a symbolic size
        return func(*args, **kwargs)
    if key not in _RESULTS:
        out = func(*args, **kwargs)
        if len(_RESULTS) < 100_000:
            _RESULTS[key] = _results(out, args, kwargs)
        return out
    if (known := _RESULTS[key]) is None:
        return func(*args, **kwargs)
    is_single, results = known
    made = [None if r is None else _EMPTY(r[0], r[1], dtype=r[2], device="meta") for r in results]
    return made[0] if is_single else tuple(made)


@functools.cache
def _makes_new_tensors(func: Any) -> bool:
    """Return whether an operator changes no argument and returns tensors alone, none of them a view."""
    schema = func._schema
    kinds = {str(result.type) for result in schema.returns}
    return (
        bool(kinds)
        and kinds <= {"Tensor", "Optional[Tensor]"}
        and not schema.is_mutable
        and all(result.alias_info is None for result in schema.returns)
    )


def _described(value: Any) -> Any:
    """Return a key of an argument: equal keys, equal results; a TypeError where none would decide the result."""
    kind = type(value)
    if kind is torch.Tensor or kind is torch.nn.Parameter:
        if not value.is_meta:
            raise TypeError
        return value.shape, value.stride(), value.dtype, value.storage_offset()
    if kind is list or kind is tuple:
        return kind, tuple(map(_described, value))
    if value is None or kind in _PLAIN:
        return kind, value  # the kind too: 1 == 1.0 == True
    raise TypeError


def _results(out: Any, args: Any, kwargs: Any) -> _Results:
    """Describe results that are new dense tensors of the meta device; None: they are anything else."""
    outputs = out if isinstance(out, tuple) else (out,)
    tensors = [t for t in outputs if t is not None]
    storages = [t.untyped_storage()._cdata for t in [*tensors, *tensors_in(args), *tensors_in(tuple(kwargs.values()))]]
    is_plain = all(type(t) is torch.Tensor and t.is_meta and t.storage_offset() == 0 for t in tensors)
    if not is_plain or len({*storages[: len(tensors)]} - {*storages[len(tensors) :]}) < len(tensors):
        return None  # one of them is an argument, or is there twice
    found = tuple(None if t is None else (t.shape, t.stride(), t.dtype) for t in outputs)
    sizes = [t.untyped_storage().nbytes() for t in tensors]
    again = [_EMPTY(r[0], r[1], dtype=r[2], device="meta").untyped_storage().nbytes() for r in found if r is not None]
    return (not isinstance(out, tuple), found) if sizes == again else None


def tensors_in(values: Any) -> list[torch.Tensor]:
    if isinstance(values, torch.Tensor):
        return [values]
    if isinstance(values, list | tuple):
        return [t for value in values for t in tensors_in(value)]
    return []


def run_beside_numbers(func: Any, args: Any, kwargs: Any) -> Any:
    """Return the results of an operator on tensors of the meta device, of the host, or of both."""
    given = tensors_in(args) + tensors_in(tuple(kwargs.values()))
    on_host = sum(not tensor.is_meta for tensor in given)
    if not on_host:
        return run_once(func, args, kwargs)
    if on_host == len(given):
        return func(*args, **({**kwargs, "device": torch.device("cpu")} if "device" in kwargs else kwargs))
    name = func._schema.name.partition("::")[2]
    if name == "masked_scatter_backward":  # (gradient, mask, sizes), not there for the meta device
        return args[0].new_empty(args[2])

    def positions(index: torch.Tensor | None) -> Sequence[torch.Tensor | None]:  # of a mask of the host that are true
        is_mask = index is not None and index.dtype is torch.bool and not index.is_meta
        return index.nonzero().unbind(1) if is_mask else [index]  # type: ignore[union-attr]

    def sizes_only(tensor: torch.Tensor) -> torch.Tensor:
        return tensor if tensor.is_meta else _EMPTY(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")

    if "index" in name:
        args = [[i for index in arg for i in positions(index)] if isinstance(arg, list) else arg for arg in args]
    return run_once(func, *tree_map_only(torch.Tensor, sizes_only, (args, kwargs)))


def as_type(func: Callable[..., Any], tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    """Return a tensor as another type, on the device where it is."""
    kept = [arg.dtype if isinstance(arg, torch.Tensor) else arg for arg in args]
    kept = [arg for arg in kept if not isinstance(arg, torch.device | str)]
    kwargs.pop("device", None)
    return func(tensor, *kept, **kwargs) if kept or kwargs else tensor


def rows_of_images(func: Callable[..., Any], tensor: torch.Tensor, dim: int = 0) -> Any:
    """Return the features of images, of which LLaVA makes a list, as the rows of all; any other tensor in its parts."""
    return (tensor.flatten(0, 1),) if dim == 0 and tensor.dim() == 3 else func(tensor, dim)


def split_images(func: Callable[..., Any], tensor: torch.Tensor, split_size: Any, dim: int = 0) -> Any:
    """Return a split into the parts of images, where parts that repeat are one with a dimension for the images.

    Of rows these are the rows of all images. Of the (1, heads, length, width) that attention looks at one image after
    another, it is a batch of them. Any other split is left as it is.
    """
    sizes = list(split_size) if isinstance(split_size, list | tuple) else []
    if dim == 0 and len(set(sizes)) == 1:
        return (tensor,)
    if not sizes or dim != 2 or tensor.dim() != 4 or tensor.shape[0] != 1:
        return func(tensor, split_size, dim)
    period = next(p for p in range(1, len(sizes) + 1) if sizes == sizes[:p] * (len(sizes) // p))
    times = len(sizes) // period
    images = tensor[0].view(tensor.shape[1], times, -1, tensor.shape[3]).transpose(0, 1)
    return func(images, sizes[:period], 2)


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
    if isinstance(value, torch.dtype | torch.layout | torch.memory_format):
        return {"torch": str(value)[6:]}
    if value is None or isinstance(value, int | float | str):
        return value
    raise TypeError(value)


def runnable(call: str, device: torch.device) -> Callable[[], Any]:
    """Return a function that runs a call on a device; raises where the operator isn't there or memory is short."""
    name, args, kwargs = json.loads(call)
    made = [_made(value, device) for value in args]
    if "." not in name and "attention" in name:  # a kernel that a trace writes down by itself: `attention`
        query, key, value = made[:3]
        options = {"is_causal": kwargs["causal"], "enable_gqa": query.shape[1] != key.shape[1]}
        attend = functools.partial(scaled_dot_product_attention, query, key, value, **options)
        if not name.endswith("backward"):
            return attend
        inputs = [tensor.requires_grad_() for tensor in made[:3]]
        with torch.enable_grad():
            output = attend()
        return functools.partial(torch.autograd.grad, output, inputs, torch.randn_like(output), retain_graph=True)
    space, packet, overload = (*name.split("."), "default")[:3]
    operator = getattr(getattr(getattr(torch.ops, space), packet), overload)
    return functools.partial(operator, *made, **{key: _made(value, device) for key, value in kwargs.items()})


def bytes_of(call: str) -> float:
    found, pending = 0.0, list(json.loads(call)[1:])
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
    if dtype.is_floating_point:
        flat = torch.randn(max(span, 0), device=device).to(dtype)
    else:
        flat = torch.zeros(max(span, 0), dtype=dtype, device=device)
    return flat.as_strided(shape, value["s"]) if "s" in value else flat.view(shape)
