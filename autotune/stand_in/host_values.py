"""Computes small tensors on the host beside the stand-in, where kernels compute nothing.

A training's memory depends on some values: lengths, masks, the sizes of images, which labels count. They come from the
host, as whole numbers or drawn at random. So every operator of torch runs as it does for CUDA, for its memory,
and where all its tensors are known, the same operator of the CPU tells its result. All else is unknown: it comes from
the model's own arithmetic. A fraction that is read of it (a loss, a norm) is 0; where a whole number or truth value is
read, by which a program may decide how to go on, `UnknownValueError` is raised with the place, unless one is assumed.
"""

import functools
import math
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_leaves, tree_map

from autotune.errors import MachineError
from autotune.stand_in.device import UNKNOWN, bypass

# Of a tensor that is known: of fractions (images) less, as frozen weights are some too.
_MOST_BYTES, _MOST_FRACTION_BYTES = 1 << 30, 16 << 20

# Operators, by how their names begin: they compute fractions alone, or make memory.
_LEFT_OUT = (
    *("_scaled", "_flash", "_efficient", "_cudnn", "cudnn", "miopen", "_thnn", "quantize"),
    *("empty", "new_empty", "resize_", "_resize_output_", "set_"),
)
_RANDOM = {"bernoulli_", "cauchy_", "exponential_", "geometric_", "log_normal_", "normal_", "random_", "uniform_"}
# Values decide the shape of their results.
_SHAPED_BY_VALUES = {"nonzero", "_unique2", "unique_dim", "unique_consecutive", "bincount", "repeat_interleave"}

# What is known of a storage on the device, by its address; the reference tells whether it is still the same storage.
_known: dict[int, tuple[Any, torch.UntypedStorage]] = {}
# A storage by its address. An object of Python's would stay, and gradients then not be added to in place.
_place: Callable[[torch.Tensor], int] = torch._C._storage_address  # type: ignore[attr-defined]
_libraries: dict[str, Any] = {}  # by their namespace; torch forgets an operator's kernel with its library
_readable: list[Literal["nothing", "copies", "all"]] = ["nothing"]
_raised: list[str] = []
_assumed: list[int | None] = [None]


class UnknownValueError(MachineError):
    """A program reads a value that only a GPU computes; the message says which and where."""


@contextmanager
def reading(what: Literal["copies", "all"]) -> Iterator[None]:
    """Have unknown numbers read as 0 inside, where they decide nothing: copies of tensors, as for metrics, or all."""
    before, _readable[0] = _readable[0], what
    try:
        yield
    finally:
        _readable[0] = before


def assume(number: int | None) -> None:
    """Have unknown whole numbers read as this one from now on; None: an UnknownValueError says where one is read."""
    _assumed[0] = number


def unknown() -> str | None:
    """Return why memory can't be told: an UnknownValueError was raised, or a library bypassed the driver."""
    return next(iter(_raised), None) or bypass()


def check() -> None:
    """Raise UnknownValueError where memory is `unknown`, though the program went on."""
    if reason := unknown():
        raise UnknownValueError(reason)


@functools.cache
def install() -> None:
    """Compute in this process from now on; there is no way back."""
    for namespace in ("aten", "c10d"):
        _libraries[namespace] = torch.library.Library(namespace, "IMPL")  # type: ignore[no-untyped-call]
    special: dict[str, Callable[..., Any]] = {"copy_": _copy, "_local_scalar_dense": _read}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that operators are overridden is meant
        for name in torch._C._dispatch_get_all_op_names():
            namespace, _, operator = name.partition("::")
            base, _, overload = operator.partition(".")
            has_kernel = base in special or torch._C._dispatch_has_kernel_for_dispatch_key(name, "CUDA")
            if namespace not in _libraries or not has_kernel or base.startswith(_LEFT_OUT):
                continue
            kernel = torch.library.get_kernel(name, "CUDA").call_boxed
            run: Callable[..., Any]
            if namespace == "c10d":
                run = functools.partial(_message, base, kernel)
            elif base in ("pow", "isin") and overload.startswith("Scalar"):
                of_two = f"Tensor_Tensor{'_out' * overload.endswith('_out')}"
                run = functools.partial(_of_number, getattr(getattr(torch.ops.aten, base), of_two))
            elif base in special:
                run = functools.partial(special[base], kernel)
            else:
                run = _beside(getattr(getattr(torch.ops.aten, base), overload or "default"), base, kernel)
            _libraries[namespace].impl(operator, run, "CUDA", with_keyset=True)
    torch.Tensor.data_ptr = _handed_out  # type: ignore[method-assign, assignment]
    torch.Tensor.__repr__ = functools.partialmethod(_shown, torch.Tensor.__repr__)  # type: ignore


def _beside(operator: Any, base: str, kernel: Callable[..., Any]) -> Callable[..., Any]:
    """Return what runs the kernel of an operator, and the operator on the host where its tensors are known."""
    arguments = operator._schema.arguments
    written_to = [(i, a.name) for i, a in enumerate(arguments) if a.alias_info is not None and a.alias_info.is_write]
    # What was there before doesn't matter to them.
    writes_all = base in {"fill_", "zero_", *_RANDOM} or any(argument.is_out for argument in arguments)
    tensors = {i for i, argument in enumerate(arguments) if isinstance(argument.type, torch.TensorType)}

    def run(keys: Any, *args: Any, **kwargs: Any) -> Any:
        own = next((arg for arg in args if isinstance(arg, torch.Tensor)), None)
        for i in tensors:
            if own is not None and i < len(args) and isinstance(args[i], int | float):  # x + 2, as a kernel gets it
                args = (*args[:i], torch.tensor(args[i], dtype=torch.result_type(own, args[i])), *args[i + 1 :])
        given = _tensors((args, kwargs))
        written = _tensors([args[i] if i < len(args) else kwargs.get(name) for i, name in written_to])
        on_host = {id(tensor): _on_host(tensor) for tensor in given if tensor.is_cuda}
        for tensor in written if writes_all else ():
            if tensor.is_cuda and on_host[id(tensor)] is None and _can_be_known(tensor):
                on_host[id(tensor)] = torch.empty(tensor.shape, dtype=tensor.dtype)
        if None in on_host.values() or (base in _RANDOM and written[0].requires_grad):  # weights become the model's
            if base in _SHAPED_BY_VALUES or base == "equal":
                raise _unknown(f"{base} of values")
            for tensor in written:
                _forget(tensor)
            result = kernel(keys, *args, **kwargs)
            if (says := _if_finite(base, args)) is not None:
                _remember(result, torch.full(result.shape, says))
            return result
        # A kernel that asks the device how large its result is would be told anything.
        result = None
        if base not in _SHAPED_BY_VALUES:
            with reading("all"):  # of a kernel's own
                result = kernel(keys, *args, **kwargs)
        # Fractions that are computed from so few bytes of fractions are no model's activations.
        of_many = any(t.is_floating_point() and t.nbytes > (64 << 10) for t in given)
        made = _tensors(result)
        lost = {id(t) for t in made if t.is_floating_point() and (of_many or t.nbytes > _MOST_FRACTION_BYTES)}
        for tensor in written:  # other results are new, or views of what is known
            if id(tensor) in lost:
                _forget(tensor)
        if made and len(lost) == len(made):
            return result

        def moved(value: Any) -> Any:
            if isinstance(value, torch.Tensor):
                return on_host.get(id(value), value)
            return torch.device("cpu") if isinstance(value, torch.device) else value

        try:
            told = operator(*tree_map(moved, args), **tree_map(moved, kwargs))
        except Exception:  # the CPU has no such kernel
            for tensor in written:
                _forget(tensor)
            return result
        if not isinstance(told, torch.Tensor | tuple | list):
            return told  # of `equal`
        if result is None:
            result = tree_map(
                lambda value: torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="cuda"), told
            )
        for tensor, value in zip(_tensors(result), _tensors(told), strict=True):
            if tensor.shape != value.shape:  # a buffer for the backward pass, which the CPU's kernel has otherwise
                _forget(tensor)
            elif id(tensor) not in lost:
                _remember(tensor, value)
        return result

    return run


def _of_number(operator: Callable[..., Any], keys: Any, number: float, *args: Any, **kwargs: Any) -> Any:
    """Run 10 ** x as of two tensors: the kernel makes one of the number, on the device, which Python can't be given."""
    made = torch.full((), number, dtype=torch.result_type(args[0], number), device=args[0].device)
    return operator(made, *args, **kwargs)


def _message(base: str, kernel: Callable[..., Any], keys: Any, *args: Any) -> Any:
    """Run a collective. Ranks are taken to be alike: broadcast or reduced values stay, gathered ones are repeated."""
    result = kernel(keys, *args)
    if base in ("broadcast_", "allreduce_", "barrier"):
        return result
    value = _on_host(_tensors(args[1])[0]) if base in ("allgather_", "_allgather_base_") else None
    for tensor in _tensors(args[0]):
        _forget(tensor)
        if value is not None and value.numel():
            _remember(tensor, value.reshape(-1).repeat(tensor.numel() // value.numel()).view(tensor.shape))
    return result


def _handed_out(tensor: torch.Tensor) -> int:
    """Return the address of a tensor, of which nothing is known any more: a kernel of Triton's may write there."""
    _forget(tensor)
    return torch._C.TensorBase.data_ptr(tensor)


def _shown(tensor: torch.Tensor, shown: Callable[..., str], **options: Any) -> str:
    """Return a tensor as text, by which no program decides; of one that isn't known the size alone."""
    if tensor.is_cuda and tensor.layout is torch.strided and _on_host(tensor) is None:
        return f"tensor(..., device='{tensor.device}', size={tuple(tensor.shape)})"
    return shown(tensor, **options)


def _tensors(values: Any) -> list[torch.Tensor]:
    leaves = (leaf for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor))
    return [leaf for leaf in leaves if leaf.layout is torch.strided]  # a sparse one isn't a storage of values


def _if_finite(base: str, args: tuple[Any, ...]) -> bool | None:
    """Return what a test for NaN or infinity (x != x, |x| == inf) says where there are none; None: it is no such."""
    if base not in ("eq", "ne") or len(args) < 2:
        return None
    if args[0] is args[1]:
        return base == "eq"
    return base == "ne" if isinstance(args[1], float) and math.isinf(args[1]) else None


def _copy(
    kernel: Callable[..., Any], keys: Any, target: torch.Tensor, source: torch.Tensor, non_blocking: bool = False
) -> Any:
    result = kernel(keys, target, source, non_blocking)
    value = _on_host(source) if source.is_cuda else source.detach()
    if not target.is_cuda:
        # As bytes come storages, which are saved, and states of random number generators.
        is_number = not target.is_floating_point() and target.dtype != torch.uint8 and target.numel()
        if value is None and is_number and _readable[0] == "nothing" and _assumed[0] is None:
            raise _unknown("a copy to the host of values")
        target.copy_(value) if value is not None else target.fill_((is_number and _assumed[0]) or 0)
    elif value is None or source.requires_grad:
        _forget(target)
    elif (own := _on_host(target)) is not None:
        own.copy_(value)
    elif _can_be_known(target):
        _remember(target, value.to(target.dtype).expand(target.shape))
    return result


def _read(kernel: Callable[..., Any], keys: Any, tensor: torch.Tensor) -> Any:
    if (value := _on_host(tensor)) is not None:
        return value.item()
    # A scaler of losses counts its steps, to save how many they were.
    is_scaler = sys._getframe(1).f_code.co_filename.endswith("torch/amp/grad_scaler.py")
    if not tensor.is_floating_point() and not is_scaler and _readable[0] != "all":
        if _assumed[0] is None:
            raise _unknown("a value")
        return bool(_assumed[0]) if tensor.dtype is torch.bool else _assumed[0]
    return 0.0 if tensor.is_floating_point() else 0


def _on_host(tensor: torch.Tensor) -> torch.Tensor | None:
    """Return what is known of a tensor, as a view of what is known of its storage; None: nothing is."""
    found = _known.get(_place(tensor))
    if found is None or found[1].nbytes() < tensor.untyped_storage().nbytes():
        return None
    whole = torch.empty(0, dtype=tensor.dtype).set_(found[1])
    return torch.as_strided(whole, tensor.size(), tensor.stride(), tensor.storage_offset())


def _can_be_known(tensor: torch.Tensor) -> bool:
    """Return whether a tensor that is written is all of its storage, and no gradient."""
    frame: Any = sys._getframe()  # in a backward pass nobody's Python has called
    while frame is not None and frame.f_code.co_filename == __file__:
        frame = frame.f_back
    is_gradient = frame is None and tensor.is_floating_point()
    return not is_gradient and tensor.nbytes + 15 >= tensor.untyped_storage().nbytes()


def _remember(tensor: torch.Tensor, value: torch.Tensor) -> None:
    storage = tensor.untyped_storage()
    # Bytes are workspaces of kernels.
    most = _MOST_FRACTION_BYTES if tensor.is_floating_point() or tensor.dtype == torch.uint8 else _MOST_BYTES
    if not tensor.is_cuda or storage.nbytes() > most:
        return
    if _on_host(tensor) is None:
        if storage.nbytes() > _MOST_FRACTION_BYTES // 4 or (len(_known) > 1000 and len(_known) % 256 == 0):
            for key in [key for key, (reference, _) in _known.items() if reference.expired()]:
                del _known[key]
        held: Any = torch.UntypedStorage(storage.nbytes())  # type: ignore[no-untyped-call]
        # While there is a weak reference to a storage its address isn't another's.
        _known[storage._cdata] = StorageWeakRef(storage), held  # type: ignore[no-untyped-call]
    own = _on_host(tensor)
    if own is not None and torch._C.TensorBase.data_ptr(own) != torch._C.TensorBase.data_ptr(value):  # else in place
        own.copy_(value)


def _forget(tensor: torch.Tensor) -> None:
    if tensor.is_cuda:
        _known.pop(_place(tensor), None)


def _unknown(what: str) -> UnknownValueError:
    """Return the error with the line that asked: the innermost that is not of torch or of this module."""
    torch_folder, own = str(Path(torch.__file__).parent), str(Path(__file__))
    frames = traceback.extract_stack(sys._getframe(1))
    asked = next((f for f in reversed(frames) if not f.filename.startswith((torch_folder, own, "<"))), None)
    where = "a backward pass" if asked is None else f"{asked.filename}:{asked.lineno}: {asked.line}"
    _raised.append(f"{what} {UNKNOWN} {where}")
    return UnknownValueError(_raised[-1])
