"""Records what a piece of training does to memory and how much work it is, operator by operator.

A :class:`Recorder` is a dispatch mode: of every operator that torch runs inside it, on whatever device, it writes down
the floating-point operations, the bytes that move, and the storages that are made. On the meta device nothing is
computed or allocated, yet sizes and lifetimes are the real ones. The result, a :class:`Tape`, is numbers alone.
"""

import contextlib
import functools
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from autotune.cost.meta import run_beside_numbers, run_once, tensors_in, written
from autotune.cost.profile import CONTRACTION, ELEMENTWISE, FUSED_ATTENTION, NORMALISATION, VIEW

_NORMALISATIONS = ("softmax", "layer_norm", "batch_norm", "group_norm", "rms_norm", "nll_loss", "logsumexp")

# Operators that make or alias a tensor and move no data.
_NO_WORK = frozenset(
    ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "new_zeros", "detach", "alias",
     "is_same_size")
)  # fmt: skip


class _Operator(NamedTuple):  # the fields of `Tape`
    name: str
    kind: int
    flops: float
    moved_bytes: float
    width: int
    recomputed: bool
    call: str


@dataclass
class _Storage:
    nbytes: int
    made: int  # position of the operator that made it
    freed: int = -1  # position of the first operator after its end; -1: still there
    accumulated: int = -1  # a gradient: position after which it is added to another or kept
    origin: tuple[str, str] = ("", "")  # module and operator that made it
    sum_of: "_Storage | None" = None  # the first summand, where autograd may have added in place
    columns: int = 0  # of a sum over rows, whose scratch this is; its size then counts rows: `profile.Storages`


@dataclass(frozen=True)
class Tape:
    """Operators in order, a row each, and the storages that they made and freed."""

    names: tuple[str, ...]
    kinds: NDArray[np.int8]
    flops: NDArray[np.float64]
    moved_bytes: NDArray[np.float64]
    widths: NDArray[np.int8]  # bytes of the numbers that each computes with: 4, 2, or 1 of fp8
    recomputed: NDArray[np.bool_]  # a part of the forward pass that runs again
    forward_end: int  # operators of the forward pass, the loss included
    storages: NDArray[np.float64]  # made, freed, bytes, whether a gradient, columns: see `profile.Storages`
    origins: tuple[tuple[str, str], ...] = ()  # of each storage: the module, and the operator that made it
    outputs_bytes: float = 0.0  # of a forward pass alone: kept by an evaluation with metrics
    calls: tuple[str, ...] = ()  # of each operator that does any work: how to run it again, see `meta`

    @property
    def matrix_products(self) -> NDArray[np.bool_]:
        """Those of cuBLAS, which convolutions and fused attention aren't."""
        pairs = zip(self.kinds.tolist(), self.names, strict=True)
        found = [kind == CONTRACTION and "conv" not in name and "attention" not in name for kind, name in pairs]
        return np.array(found, dtype=np.bool_)


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Writes down the operators that run inside it.

    Of `known` tensors, weights, buffers and inputs, storages don't count. `scratch` returns the bytes that an operator
    takes and gives back, from its name, arguments and results. `numbers`: integers of the host are used beside tensors
    of the meta device; operators on these alone are passed over. Fused attention sees `attended` times the keys here.
    """

    def __init__(
        self,
        known: list[torch.Tensor],
        scratch: Callable[[str, Any, Any], int] | None = None,
        *,
        numbers: bool = False,
        attended: int = 1,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._operators, self._storages = list[_Operator](), list[_Storage]()
        self._by_id: dict[int, _Storage | None] = {}
        self._references: dict[int, weakref.ref[Any]] = {}
        self._forward_end = -1
        self._scratch, self._numbers, self._attended = scratch, numbers, attended
        self.recomputing = False  # a part of the forward pass runs again during the backward pass
        self.modules: list[str] = []  # whose forward pass runs, from the outermost
        self._module_of: dict[int, str] = {}  # by autograd's sequence number of the node of an operator
        for tensor in known:
            self._watch(tensor, known=True)

    def _module(self) -> str:
        """Return the module in whose forward pass, or in whose operators' backward pass, an operator runs."""
        if self.modules:
            # An operator's node is made before it is dispatched; without a node of its own it finds an earlier one's.
            self._module_of.setdefault(torch._C._autograd._get_sequence_nr() - 1, self.modules[-1])
            return self.modules[-1]
        node = torch._C._current_autograd_node()
        return "" if node is None else self._module_of.get(node._sequence_nr(), "")

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = (run_beside_numbers if self._numbers else run_once)(func, args, kwargs)
        if self._numbers and self._is_aside((args, tuple(kwargs.values())), out):
            return out
        name = func._schema.name.partition("::")[2]
        # Losses whose result keeps the memory of those of all elements (Loss.cpp in aten), except on the meta device.
        if name in ("mse_loss", "smooth_l1_loss", "binary_cross_entropy") and out.is_meta and out.dim() == 0:
            out = args[0].new_empty(args[0].shape).as_strided((), ())
        outputs = tensors_in(out)
        fresh = [tensor for tensor in outputs if self._is_new(tensor)]
        works = (bool(fresh) or name.endswith("_") or "out" in kwargs) and name not in _NO_WORK
        origin = (self._module(), name)
        flops, moved, kind = 0.0, 0.0, VIEW
        if works:
            kind = NORMALISATION if any(word in name for word in _NORMALISATIONS) else ELEMENTWISE
            if (counter := flop_registry.get(func._overloadpacket)) is not None:
                flops, kind = float(counter(*args, **kwargs, out_val=out)), CONTRACTION
            elif kind == ELEMENTWISE:
                flops = float(max((t.numel() for t in outputs), default=0))
            inputs = tensors_in(args) + tensors_in(tuple(kwargs.values()))
            moved = sum(self.sized(t.nbytes, t) for t in inputs + outputs)
        half = any(t.element_size() == 2 or t.dtype is torch.int8 for t in outputs)
        width = 1 if name == "_scaled_mm" else 2 if half else 4
        call = written(func.__str__(), args, kwargs) if works else ""
        self._operators.append(_Operator(name, kind, flops, moved, width, self.recomputing, call))
        for tensor in fresh:
            self._watch(tensor, origin=origin)
        if self._scratch is not None:
            now, taken = len(self._operators), (self._scratch(name, args, out), 0)
            for size, columns in (taken, _summed(name, *args)):
                if size:
                    self._storages.append(_Storage(size, made=now - 1, freed=now, origin=origin, columns=columns))
        if name == "add" and fresh and self._forward_end >= 0 and not self.recomputing and not args[0]._is_view():
            self._by_id[_key(fresh[0])].sum_of = self._by_id.get(_key(args[0]))  # type: ignore[union-attr]
        return out

    def _is_aside(self, given: Any, out: Any) -> bool:
        """Return whether an operator only looks at a part of a tensor, or at numbers of the host other than pixels."""
        outputs = tensors_in(out)
        if all(not self._is_new(tensor) for tensor in outputs):
            return not any(tensor is one for tensor in outputs for one in tensors_in(given))
        pixels = any(t.is_floating_point() and not self._is_new(t) for t in tensors_in(given))
        return all(not t.is_meta and not (pixels and t.is_floating_point()) for t in outputs)

    def note_kernel(
        self, name: str, flops: float, *tensors: torch.Tensor, kind: int = CONTRACTION, causal: bool = False
    ) -> None:
        """Write down a kernel that torch doesn't run here, by the tensors that it reads and writes."""
        moved = sum(self.sized(t.nbytes, t) for t in tensors)
        shared = kind == FUSED_ATTENTION and self._attended > 1  # with other devices: no call of this one alone
        flops *= self._attended if shared else 1
        call = "" if shared else written(name, tensors, {"causal": causal})
        width = 2 if tensors[0].element_size() == 2 else 4
        self._operators.append(_Operator(name, kind, flops, moved, width, self.recomputing, call))

    def step(self, model: Any, loss: Callable[[], Any]) -> Tape:
        """Return the tape of a forward and a backward pass, run inside of this recorder."""
        with contextlib.ExitStack() as hooks:
            for weight in model.parameters():
                weight.grad = None
                if weight.requires_grad:
                    hooks.enter_context(weight.register_post_accumulate_grad_hook(lambda w: self.mark_gradient(w.grad)))
            found = loss() * 1.0
            self.end_of_forward()
            found.backward()
            del found
        return self.tape()

    def end_of_forward(self) -> None:
        self._forward_end = len(self._operators)

    def mark_gradient(self, tensor: torch.Tensor) -> None:
        if (storage := self._by_id.get(_key(tensor))) is not None:
            storage.accumulated = len(self._operators)

    def tape(self, outputs_bytes: float = 0.0) -> Tape:
        after = len(self._operators) + 1  # whatever is still there
        storages = []
        for storage in self._storages:
            # A sum begins where its first summand ends, if autograd held the last reference to that. Autograd adds
            # gradients in place then (`can_accumulate_inplace` in torch/csrc/autograd/input_buffer.cpp), but never
            # while a dispatch mode looks on. To a view it doesn't, as the view's base holds the storage as well: to the
            # gradient of a head that shares its weights with the embeddings.
            first = storage.sum_of
            if first is not None and first.freed == storage.made + 1 and first.nbytes == storage.nbytes:
                storage.made += 1
            gradient = storage.accumulated >= 0
            freed = storage.accumulated if gradient else storage.freed if storage.freed >= 0 else after
            storages.append((storage.made, freed, storage.nbytes, gradient, storage.columns))
        names, kinds, flops, moved, widths, again, calls = zip(*self._operators, strict=True)
        return Tape(
            names=names,
            kinds=np.array(kinds, dtype=np.int8),
            flops=np.array(flops),
            moved_bytes=np.array(moved),
            widths=np.array(widths, dtype=np.int8),
            recomputed=np.array(again, dtype=bool),
            forward_end=self._forward_end,
            storages=np.array(storages, dtype=float).reshape(-1, 5),
            origins=tuple(storage.origin for storage in self._storages),
            outputs_bytes=outputs_bytes,
            calls=calls,
        )

    def sized(self, nbytes: int, tensor: torch.Tensor) -> float:
        """Return the bytes to write down for so many of a tensor or its storage."""
        return float(nbytes)

    def watch_buffer(self, tensor: torch.Tensor, module: str) -> None:
        """Write down a tensor that is made for the operator that comes next."""
        self._watch(tensor, origin=(module, "buffer"))
        self._by_id[_key(tensor)].made += 1  # type: ignore[union-attr]

    def _is_new(self, tensor: torch.Tensor) -> bool:
        return _key(tensor) not in self._by_id

    def _watch(self, tensor: torch.Tensor, *, known: bool = False, origin: tuple[str, str] = ("", "")) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._by_id:
            return
        nbytes = int(self.sized(storage.nbytes(), tensor))
        entry = None if known else _Storage(nbytes, len(self._operators) - 1, origin=origin)
        self._by_id[key] = entry
        if entry is not None:
            self._storages.append(entry)
        self._references[key] = weakref.ref(storage, functools.partial(self._forget, key))

    def _forget(self, key: int, _: object = None) -> None:
        entry = self._by_id.pop(key, None)
        self._references.pop(key, None)
        if entry is not None:
            entry.freed = len(self._operators)


def _summed(name: str, tensor: Any = None, dims: Any = (), *further: Any) -> tuple[int, int]:
    """Return rows and columns of a sum over the rows of a matrix, (0, 0) of any other operator."""
    if name == "convolution_backward" and further[-1][2]:  # that of its bias, of a gradient with the channels last
        tensor, dims = tensor.movedim(1, -1), range(tensor.dim() - 1)
    elif name != "sum":
        return 0, 0
    shape, count = tensor.shape, len(dims or ())
    if not 0 < count < len(shape) or not tensor.is_contiguous() or {d % len(shape) for d in dims} != set(range(count)):
        return 0, 0
    return shape[:count].numel(), shape[count:].numel()


def _key(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)
