"""Runs operators on the meta device, equal ones once: of the rest only the results' shapes are made anew."""

from __future__ import annotations

import functools
from typing import Any

import torch

# Shape, strides and type of each new tensor that an operator returned, and whether it returned a single one; None: the
# operator has to be run. By operator and arguments, as `_described` has them.
_Results = tuple[bool, tuple[tuple[torch.Size, tuple[int, ...], torch.dtype] | None, ...]] | None
_RESULTS: dict[tuple[Any, ...], _Results] = {}
_MOST_RESULTS = 100_000


def run_once(func: Any, args: Any, kwargs: Any) -> Any:
    """Return what an operator returns; one that ran before on meta tensors alike is not run again.

    Equal layers run equal operators, and working out the shapes of their results, mostly in Python, is most of the time
    of a trace. Operators that return views or change an argument are always run.
    """
    if not _makes_new_tensors(func):
        return func(*args, **kwargs)
    try:
        key = (
            func,
            torch.get_default_dtype(),
            _described(args),
            *((name, _described(value)) for name, value in kwargs.items()),
        )
    except TypeError:  # an argument of another kind: a tensor with values, a symbolic size
        return func(*args, **kwargs)
    if key not in _RESULTS:
        out = func(*args, **kwargs)
        if len(_RESULTS) < _MOST_RESULTS:
            _RESULTS[key] = _results(out, args, kwargs)
        return out
    known = _RESULTS[key]
    if known is None:
        return func(*args, **kwargs)
    is_single, results = known
    made = [None if r is None else _EMPTY(r[0], r[1], dtype=r[2], device="meta") for r in results]
    return made[0] if is_single else tuple(made)


_EMPTY = torch.ops.aten.empty_strided.default


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
    """Return a key of an argument: equal keys, equal results.

    Raises:
        TypeError: The argument is of a kind whose key would not decide the result.
    """
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


_PLAIN = frozenset({int, float, bool, str, torch.dtype, torch.device, torch.layout, torch.memory_format})


def _results(out: Any, args: Any, kwargs: Any) -> _Results:
    """Return what describes new dense tensors of the meta device; None of anything else."""
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
    """Return the tensors in the arguments or results of an operator."""
    if isinstance(values, torch.Tensor):
        return [values]
    if isinstance(values, list | tuple):
        return [t for value in values for t in tensors_in(value)]
    return []
