"""Makes a trace run the operators that the real device would run.

The meta device has no autocast, no fused attention, no fused dropout and no values. A :class:`Semantics` is a function
mode that puts these in: autocast by the lists in torch's `autocast_mode.h`, with its cache of cast weights; fused
attention that never saves a matrix of scores; dropout that saves a mask of bytes. Questions about values are answered
as for a batch without padding whose tokens are shared out evenly between the experts.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only

from autotune.cost import meta
from autotune.cost.attention import AttentionCall, attention
from autotune.cost.family import Device, Generation
from autotune.cost.kernels import CtcLoss, GroupedMatmul, UpcastSoftmax
from autotune.cost.tape import Recorder

_CONTRACTIONS = frozenset(
    {
        "linear", "matmul", "__matmul__", "__rmatmul__", "mm", "bmm", "addmm", "baddbmm", "addbmm", "einsum", "conv1d",
        "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d", "conv_tbc", "chain_matmul",
        "scaled_dot_product_attention",
    }
)  # fmt: skip

# Computed in fp32 under autocast: torch/aten/src/ATen/autocast_mode.h, AT_FORALL_FP32 and its kin.
_FP32: dict[Device, frozenset[str]] = {
    "cuda": frozenset(
        {
            "acos", "asin", "cosh", "cumprod", "cumsum", "erfinv", "exp", "expm1", "log", "log10", "log1p", "log2",
            "reciprocal", "rsqrt", "sinh", "square", "tan", "pow", "__pow__", "prod", "softplus", "layer_norm",
            "group_norm", "nll_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "mse_loss", "kl_div", "logsumexp",
            "binary_cross_entropy_with_logits", "cosine_similarity", "interpolate", "rms_norm",
        }
    ),
    "cpu": frozenset(
        {
            "prod", "cdist", "mse_loss", "nll_loss", "smooth_l1_loss", "l1_loss", "huber_loss", "kl_div", "ctc_loss",
            "binary_cross_entropy_with_logits", "cross_entropy",
        }
    ),
}  # fmt: skip


class _Logged(float):
    """A number without a value, which may be logged and may decide nothing."""

    def _decides(self, *_: object) -> bool:
        raise NotImplementedError("a number that is computed on the device decides what runs")

    __lt__ = __le__ = __gt__ = __ge__ = __bool__ = _decides


class Semantics(TorchFunctionMode):
    """Runs torch's functions as the device would; the recorder writes down the kernels that only exist there.

    `padded`: batches hold padding; `experts`: that tokens are routed to (None: nothing is assumed of the values of the
    user's own module); `images`: parts split off a tensor are those of images; `context_parallel`: see `attention`.
    """

    def __init__(
        self,
        device: Device,
        recorder: Recorder,
        *,
        autocast: torch.dtype | None = None,
        padded: bool = False,
        experts: int | None = 1,
        generation: Generation = "ampere",
        images: bool = False,
        context_parallel: int = 1,
    ) -> None:
        super().__init__()
        self._device: Device = device
        self._generation: Generation = generation
        self._recorder, self._autocast, self._casting = recorder, autocast, False
        self._context_parallel = context_parallel
        self._padded, self._experts, self._images = padded, experts, images
        self._cache: dict[int, torch.Tensor] = {}
        self._has_one_end = False

    @contextlib.contextmanager
    def casting(self, *, on: bool = True) -> Iterator[None]:
        """Cast inside as autocast does, or nothing; weights that were cast are cached until the outermost end."""
        before, self._casting = self._casting, on and self._autocast is not None
        try:
            yield
        finally:
            self._casting = before
            if on and not before:
                self._cache.clear()

    @contextlib.contextmanager
    def again(self) -> Iterator[None]:
        """Run a part of the forward pass again during the backward pass."""
        with mock.patch.object(self._recorder, "recomputing", True), self, self.casting():
            yield

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name in ("all", "any", "__bool__") and len(args) == 1 and not kwargs and _is_valueless(args[0]):
            answer = name != "any" and not self._padded
            return answer if name == "__bool__" else torch.tensor(answer)
        if self._casting and (name in _CONTRACTIONS or name in _FP32[self._device]):
            to = self._autocast if name in _CONTRACTIONS else torch.float32
            args, kwargs = tree_map_only(torch.Tensor, lambda t: self._to(t, to), (args, kwargs))
        result = _SPECIAL[name](self, func, args, kwargs) if name in _SPECIAL else NotImplemented
        return func(*args, **kwargs) if result is NotImplemented else result

    def _to(self, tensor: torch.Tensor, dtype: Any) -> torch.Tensor:
        if not tensor.is_floating_point() or tensor.dtype in (dtype, torch.float64) or not _is_traced(tensor):
            return tensor
        is_weight = tensor.is_leaf and not tensor._is_view() and tensor.requires_grad
        if not is_weight or tensor.dtype is not torch.float32:  # `cached_cast` of torch's autocast_mode.cpp
            return tensor.to(dtype)
        if id(tensor) not in self._cache:
            self._cache[id(tensor)] = tensor.to(dtype)
        return self._cache[id(tensor)]

    def _grouped_mm(self, func: Any, args: Any, kwargs: Any) -> Any:
        if kwargs.get("offs") is None or args[1].dim() != 3:
            return NotImplemented
        return GroupedMatmul.apply(args[0], args[1], self._recorder)  # type: ignore[no-untyped-call]

    def _nonzero(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Return which experts are chosen: all; which tokens choose one: its share; else every position."""
        mask = args[0]
        as_tuple = func.__name__ == "where"
        if self._experts is None or len(args) != 1 or not _is_valueless(mask) or kwargs:
            return NotImplemented
        # With one more for tokens that no expert takes, where transformers masks them.
        if self._experts > 1 and mask.shape in ((self._experts,), (self._experts + 1,)):
            found = torch.arange(self._experts)[:, None]  # looped over, so their numbers must be real
        else:
            share = mask.numel() // (self._experts if mask.dim() > 1 else 1)
            found = torch.empty((max(1, share), mask.dim()), dtype=torch.long, device=mask.device)
        return found.unbind(1) if as_tuple else found

    def _attention(self, func: Any, args: Any, kwargs: Any) -> Any:
        call = AttentionCall(*args, **kwargs)
        if self._device == "cuda":
            return attention(self._recorder, call, self._generation, self._context_parallel)
        widths = {tensor.shape[-1] for tensor in call[:3]}  # DeepSeek's values are narrower
        if call.dropout_p > 0 or (call.attn_mask is not None and call.attn_mask.requires_grad) or len(widths) > 1:
            return NotImplemented  # torch's CPU kernel has none of these: use_flash_attention_cpp in sdp_utils_cpp.cpp
        return attention(self._recorder, call, None)

    def _in_python(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run a function that torch has in Python operator by operator: a mode is off inside its functions."""
        asks: dict[str, Any] = dict.fromkeys(("has_torch_function", "has_torch_function_variadic"), lambda *_: False)
        with mock.patch.multiple(torch.nn.functional, **asks), self:
            return func(*args, **kwargs)

    def _dropout(self, func: Any, args: Any, kwargs: Any) -> Any:
        given = {**dict(zip(("input", "p", "training"), args, strict=False)), **kwargs}
        tensor, p, training = given["input"], float(given.get("p", 0.5)), bool(given.get("training", True))
        if self._device == "cpu" or not training or p == 0.0 or not _is_traced(tensor):
            return NotImplemented
        return torch.native_dropout(tensor, p, True)[0]

    def _softmax(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Return softmax in fp32 of 16 bits: of fp16 CUDA does it in one operator, bf16 is converted first."""
        tensor = args[0]
        dtype = kwargs.get("dtype") or (torch.float32 if self._casting else None)
        half = tensor.dtype in (torch.float16, torch.bfloat16)
        if self._device == "cpu" or not half or dtype is not torch.float32:
            return NotImplemented
        if tensor.dtype is torch.bfloat16:  # aten/src/ATen/native/SoftMax.cpp: only Half is fused
            return func(tensor.float(), *args[1:], **{k: v for k, v in kwargs.items() if k != "dtype"})
        return UpcastSoftmax.apply(tensor, self._recorder, func.__name__ == "log_softmax")  # type: ignore[no-untyped-call]

    def _casts_half(self, tensor: torch.Tensor) -> bool:
        return self._device == "cuda" and self._casting and tensor.dtype in (torch.float16, torch.bfloat16)

    def _sum(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Return a sum or norm in fp32 of 16 bits: autocast on CUDA asks the operator for it, nothing is cast first."""
        if not self._casts_half(args[0]) or kwargs.get("dtype") is not None:
            return NotImplemented
        return func(*args, **{**kwargs, "dtype": torch.float32})

    def _cross_entropy(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Return the loss of 16 bits: their log-probabilities too are of 16 bits, and a copy is made in fp32."""
        logits = args[0]
        if not self._casts_half(logits):
            return NotImplemented
        # `cross_entropy_loss` asks `log_softmax` for the type of its input (aten/src/ATen/native/LossNLL.cpp), which
        # autocast leaves as it is; `nll_loss` is computed in fp32.
        log_probabilities = torch.log_softmax(logits, 1 if logits.dim() > 1 else 0).float()
        target = args[1] if len(args) > 1 else kwargs["target"]
        options = {k: v for k, v in kwargs.items() if k in ("weight", "ignore_index", "reduction")}
        return torch.nn.functional.nll_loss(log_probabilities, target, **options)

    def _ctc_loss(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Return a loss of (frames, batch, vocabulary) for the labels of all rows in one, as many for each."""
        if not _is_valueless(args[0]):
            return NotImplemented
        labels = args[1].numel() // args[0].shape[1]
        return CtcLoss.apply(args[0], labels, self._recorder)  # type: ignore[no-untyped-call]

    def _with_images(self, func: Any, args: Any, kwargs: Any) -> Any:
        change: Any = {"split": meta.split_images, "unbind": meta.rows_of_images}.get(func.__name__, meta.as_type)
        return change(func, *args, **kwargs) if self._images else NotImplemented

    def _end_of_each(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Return the states at each sample's one end token; BART's and T5's classifiers check that all have as many."""
        if func.__name__ == "unique_consecutive":
            self._has_one_end = _is_valueless(args[0])
            return args[0][:1] if self._has_one_end else NotImplemented
        states, index = args
        if self._has_one_end and isinstance(index, tuple) and _is_valueless(index[0]) and index[0].dtype is torch.bool:
            return states[:, -1]
        return NotImplemented

    def _masked_select(self, func: Any, args: Any, kwargs: Any) -> Any:
        return args[0].flatten() if self._experts is not None and _is_valueless(args[0]) else NotImplemented

    def _masked_fill(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Fill with a number of the host, which SEW-D makes a tensor."""
        is_number = len(args) == 3 and isinstance(args[2], torch.Tensor) and not _is_traced(args[2])
        return func(*args[:2], args[2].item()) if is_number else NotImplemented

    def _number(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Return a number with a fraction, which is logged; one that could count something has no value here."""
        return _Logged("nan") if _is_valueless(args[0]) and args[0].is_floating_point() else NotImplemented

    def _recurrent(self, func: Any, args: Any, kwargs: Any) -> Any:
        if self._device == "cuda":
            raise NotImplementedError("the memory that cuDNN's recurrent layers take isn't known")
        return NotImplemented


_SPECIAL: dict[str, Callable[[Semantics, Any, Any, Any], Any]] = {
    "scaled_dot_product_attention": Semantics._attention,
    **dict.fromkeys(("multi_head_attention_forward", "normalize"), Semantics._in_python),
    "dropout": Semantics._dropout,
    **dict.fromkeys(("softmax", "log_softmax"), Semantics._softmax),
    "cross_entropy": Semantics._cross_entropy,
    "ctc_loss": Semantics._ctc_loss,
    "masked_select": Semantics._masked_select,
    "masked_fill": Semantics._masked_fill,
    **dict.fromkeys(("unique_consecutive", "__getitem__"), Semantics._end_of_each),
    **dict.fromkeys(("item", "__float__"), Semantics._number),
    **dict.fromkeys(("lstm", "gru", "rnn_tanh", "rnn_relu"), Semantics._recurrent),
    **dict.fromkeys(("split", "unbind", "to"), Semantics._with_images),
    **dict.fromkeys(("sum", "norm", "linalg_vector_norm"), Semantics._sum),
    **dict.fromkeys(("grouped_mm", "_grouped_mm"), Semantics._grouped_mm),
    **dict.fromkeys(("nonzero", "where"), Semantics._nonzero),
}


def _is_valueless(value: Any) -> bool:
    """Return whether `value` is a tensor that can't be asked for its values."""
    return isinstance(value, torch.Tensor) and value.is_meta


def _is_traced(value: torch.Tensor) -> bool:
    """Return whether `value` stands for one on the device: on the meta device numbers of the host do not."""
    return value.is_meta or value.dim() > 0
