"""Which kernel `scaled_dot_product_attention` takes on a CUDA device, and the memory that each one saves and takes.

The choice is that of `select_sdp_backend` in torch's aten/src/ATen/native/transformers/cuda/sdp_utils.cpp (2.11), dense
inputs without a user's preference: flash, else efficient, else math. cuDNN's kernel, which torch prefers on compute
capability 9.0 and 10.0, counts as flash: both save the same and neither a score.

Flash (flash_attn/flash_api.cpp): the output is laid out as the query and each gradient as its tensor, where the other
kernels lay heads out by position, so that merging them is a view. The backward pass takes copies by position of an
output and its gradient that lie otherwise, a gradient of the query in fp32, rows rounded up to 128 and widths to 32,
and gradients of grouped keys and values for all heads before they are summed. Efficient (`attention_backward.cu`,
`mem_eff_attention/kernel_backward.h`): the gradient of a mask for all heads, where it has one; in fp32 the product of
output and its gradient; and a workspace, see `_workspace`. Math (`attention.cpp`): scores of all heads, 16 bits
computed in 32. The efficient kernel takes grouped keys from torch 2.14 on. Not covered: cuDNN's workspaces.
"""

import contextlib
import math
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, Literal, NamedTuple
from unittest import mock

import torch
from torch.nn.functional import pad

from autotune.cost.family import Generation
from autotune.cost.meta import TORCH
from autotune.cost.profile import CONTRACTION, FUSED_ATTENTION
from autotune.cost.tape import Recorder

_HALF = (torch.float16, torch.bfloat16)
_EFFICIENT_TAKES_GROUPS = TORCH >= (2, 14)


class AttentionCall(NamedTuple):
    """The arguments of `scaled_dot_product_attention`."""

    query: torch.Tensor  # (batch, heads, length, width)
    key: torch.Tensor
    value: torch.Tensor
    attn_mask: torch.Tensor | None = None
    dropout_p: float = 0.0
    is_causal: bool = False
    scale: float | None = None
    enable_gqa: bool = False  # keys and values are of groups of heads

    def in_math(self) -> torch.Tensor:
        """Attend as `_scaled_dot_product_attention_math` does, operator by operator."""
        query, key, value, mask = self[:4]
        given, kept = query.dtype, [*self[:3]]
        if given in _HALF:
            query, key, value = kept = [query.float(), key.float(), value.float()]
        root = math.sqrt(self.scale if self.scale is not None else 1 / math.sqrt(query.shape[-1]))
        query = query * root
        if self.is_causal:
            below = torch.ones((query.shape[-2], key.shape[-2]), dtype=torch.bool, device=query.device).tril()
            mask = torch.zeros_like(below, dtype=query.dtype)
            del below
        if self.enable_gqa:
            times = query.shape[1] // key.shape[1]
            key, value = key.repeat_interleave(times, 1), value.repeat_interleave(times, 1)
        scores = torch.matmul(query, key.transpose(-2, -1) * root)
        if mask is not None:
            scores.add_(mask)
        shares = torch.ops.aten._safe_softmax(scores, -1)
        del scores
        returned = shares.to(given)
        if self.dropout_p > 0:
            shares = torch.native_dropout(shares, self.dropout_p, True)[0]
        output = torch.matmul(shares, value).to(given)
        del returned, kept  # with the output, and dropped; in fp32, until the end
        return output


def chosen(call: AttentionCall, generation: Generation) -> Literal["flash", "efficient", "math"]:
    query, key, value = call[:3]
    width, half = query.shape[-1], query.dtype in _HALF
    trained = any(t.requires_grad for t in call[:3])
    too_wide = generation == "small_ampere" and trained and width > 192 and (width <= 224 or call.dropout_p > 0)
    if (
        generation != "turing"
        and call.attn_mask is None
        and width == key.shape[-1] == value.shape[-1] <= 256
        and not too_wide
        and not (call.is_causal and query.shape[-2] != key.shape[-2])
        and half
        and (call.enable_gqa or query.shape[1] == key.shape[1] == value.shape[1])
    ):
        return "flash"
    # `minimum_gemm_alignment`: 16 bytes of a tensor core's factors
    alignment = 8 if half else 1 if generation == "turing" else 4
    is_efficient = (
        not (query.dtype is torch.bfloat16 and generation == "turing")
        and (query.shape[1] == key.shape[1] == value.shape[1] or (call.enable_gqa and _EFFICIENT_TAKES_GROUPS))
        and width == key.shape[-1]
        and width % alignment == value.shape[-1] % alignment == 0
        and all(t.stride(-1) == 1 for t in call[:3])
        and (call.attn_mask is None or call.attn_mask.stride(-1) == 1)
    )
    return "efficient" if is_efficient else "math"


def attention(recorder: Recorder, call: AttentionCall, generation: Generation | None, context_parallel: int = 1) -> Any:
    """Return an output of the kernel that torch takes, without computing it; the recorder writes it down.

    `generation`: of a CUDA device; None: the CPU, whose kernel lays its output out by position. `context_parallel`:
    devices that have a part of the tokens each and pass on their keys and values.
    """
    mask = call.attn_mask
    if mask is not None and mask.dtype is torch.bool:  # convert_boolean_attn_mask
        mask = torch.zeros_like(mask, dtype=call.query.dtype)
        call = call._replace(attn_mask=mask)
    if generation is None:
        return FusedAttention.apply(*call[:4], call.is_causal, Kernel("fused", recorder))  # type: ignore[no-untyped-call]
    kernel = chosen(call, generation)
    if context_parallel > 1 and kernel != "flash":
        raise NotImplementedError("context parallel: torch's ring around this kernel isn't known")
    if kernel == "math":
        return call.in_math()
    if kernel == "flash":
        return flash(recorder, *call[:3], causal=call.is_causal, context_parallel=context_parallel)
    if mask is not None:  # for all heads: `preprocess_mask`, which copies one whose rows are no multiples of 8
        if any(stride % 8 for stride in mask.stride()[:-1]):
            last = mask.shape[-1]
            mask = pad(mask, (0, 8 - last % 8))[..., :last]
        mask = mask.expand(*call.query.shape[:3], call.key.shape[2])
    efficient = Kernel("efficient", recorder, generation)
    return FusedAttention.apply(*call[:3], mask, call.is_causal, efficient)  # type: ignore[no-untyped-call]


def flash(recorder: Recorder, query: Any, key: Any, value: Any, *, causal: bool, context_parallel: int = 1) -> Any:
    """Return an output of flash attention, whose widths are filled up to multiples of 8."""
    width, kernel = query.shape[-1], Kernel("flash", recorder)
    if width % 8:
        query, key, value = (pad(t, (0, -width % 8)) for t in (query, key, value))
    if context_parallel > 1:
        return RingAttention.apply(query, key, value, kernel, context_parallel)[..., :width]  # type: ignore[no-untyped-call]
    return FusedAttention.apply(query, key, value, None, causal, kernel)[..., :width]  # type: ignore[no-untyped-call]


class Kernel(NamedTuple):
    """A kernel whose passes the recorder writes down, by torch's names of their arguments."""

    name: str
    recorder: Recorder
    generation: Any = None  # of a CUDA device, for the efficient kernel

    def forward(self, query: Any, key: Any, value: Any, *, is_causal: bool) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the output and the normaliser (log-sum-exp) of its rows."""
        batch, heads, length, _ = query.shape
        if self.name == "flash":  # laid out as `empty_like` does, without the work of filling it
            order = sorted(range(query.dim()), key=query.stride, reverse=True)
            places = [order.index(dim) for dim in range(query.dim())]
            output = query.new_zeros([query.shape[dim] for dim in order]).permute(places)
        else:
            output = _by_position(query, value.shape[-1])
        rows = _up(length, 32) if self.name == "efficient" else length
        normaliser = query.new_empty((batch, heads, rows), dtype=torch.float32)
        accumulator = None
        if self.name == "efficient" and query.dtype in _HALF and value.shape[-1] > 128:
            # kNeedsOutputAccumulatorBuffer in kernel_forward.h
            accumulator = output.new_empty(output.shape, dtype=torch.float32)
        self._note("attention", 2, query, key, value, output, is_causal=is_causal)
        del accumulator
        return output, normaliser

    def backward(
        self, grad_out: Any, query: Any, key: Any, value: Any, out: Any, logsumexp: Any, *, is_causal: bool
    ) -> list[torch.Tensor]:
        batch, heads, length, width = query.shape
        is_flash, is_efficient = self.name == "flash", self.name == "efficient"
        if is_flash or is_efficient:
            grad_out = grad_out.transpose(1, 2).contiguous()
        if is_flash:
            out = out.transpose(1, 2).contiguous()
        found = [torch.empty_like(t) if is_flash else _by_position(t, t.shape[-1]) for t in (query, key, value)]
        scratch = list[torch.Tensor]()
        if is_flash:
            rows, columns = _up(length, 128), _up(width, 32 if width <= 128 else 64)
            sizes = (batch, heads, rows), (batch, rows, heads, columns)
            scratch += [query.new_empty(size, dtype=torch.float32) for size in sizes]
        elif is_efficient:
            if query.dtype in _HALF:
                scratch.append(query.new_empty((batch, heads, length), dtype=torch.float32))
            else:
                scratch.append((grad_out * out.transpose(1, 2)).sum(-1).transpose(-2, -1).contiguous())
            scratch.append(query.new_empty((_workspace(query, key, self.generation),), dtype=torch.float32))
        if key.shape[1] != heads:
            scratch += [key.new_empty((batch, key.shape[2], heads, width)) for _ in range(2)]
        self._note("attention_backward", 5, query, key, value, out, grad_out, found[0], is_causal=is_causal)
        del scratch
        return found

    def _note(self, name: str, products: int, *tensors: torch.Tensor, is_causal: bool) -> None:
        kind = CONTRACTION if self.name == "fused" else FUSED_ATTENTION
        query, key = tensors[:2]
        flops = 2.0 * products * query.numel() * key.shape[2] * (0.5 if is_causal else 1.0)
        self.recorder.note_kernel(f"{self.name}_{name}", flops, *tensors, kind=kind, causal=is_causal)


class FusedAttention(torch.autograd.Function):
    """Fused attention on the CPU, or by a kernel of a CUDA device: no score is saved."""

    @staticmethod
    def forward(ctx: Any, query: Any, key: Any, value: Any, mask: Any, causal: bool, kernel: Kernel) -> Any:
        ctx.causal, ctx.kernel = causal, kernel
        output, normaliser = kernel.forward(query, key, value, is_causal=causal)
        ctx.save_for_backward(query, key, value, mask, output, normaliser)
        return output

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        query, key, value, mask, output, normaliser = ctx.saved_tensors
        of_mask = None
        if mask is not None and ctx.needs_input_grad[3]:
            of_mask = torch.empty_like(mask)
            if ctx.kernel.name == "efficient":
                of_mask = mask.new_empty((*mask.shape[:-1], _up(mask.shape[-1], 16)))[..., : mask.shape[-1]]
        found = ctx.kernel.backward(gradient, query, key, value, output, normaliser, is_causal=ctx.causal)
        return (*found, of_mask, None, None)


class RingAttention(torch.autograd.Function):
    """Causal attention of the first of several devices that pass on keys and values, by torch's own ring.

    The first holds the most: what other devices' keys add to the second half of its rows goes into a copy of all rows.
    """

    @staticmethod
    def forward(ctx: Any, query: Any, key: Any, value: Any, kernel: Kernel, devices: int) -> Any:
        ctx.kernel, ctx.devices = kernel, devices
        with _first_rank_of(devices) as ring:
            made = ring._templated_ring_attention(None, 2, kernel.forward, query, key, value, is_causal=True)
        ctx.save_for_backward(query, key, value, *made)
        return made[0]

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        with _first_rank_of(ctx.devices) as ring:
            found = ring._templated_ring_attention_backward(
                None, 2, ctx.kernel.backward, gradient, "grad_out", *ctx.saved_tensors, is_causal=True
            )
        return (*found, None, None)


@contextlib.contextmanager
def _first_rank_of(devices: int) -> Iterator[Any]:
    """Yield torch's module of ring attention, in which the others' messages are empty tensors of their sizes."""
    from torch.distributed.tensor.experimental._context_parallel import _attention as ring

    def gathered(tensor: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        return tensor.new_empty((devices * tensor.shape[0], *tensor.shape[1:]))

    group = SimpleNamespace(get_rank=lambda _: 0, get_world_size=lambda _: devices, ProcessGroup=object)
    messages = SimpleNamespace(
        all_gather_tensor=gathered,
        all_gather_single=gathered,  # its name from torch 2.13 on
        permute_tensor=lambda tensor, *_: torch.empty_like(tensor),
        AsyncCollectiveTensor=(),
    )
    with mock.patch.multiple(ring, dist=group, ft_c=messages):
        yield ring


def _workspace(query: torch.Tensor, key: torch.Tensor, generation: Generation) -> int:
    """Return the fp32 numbers of the backward kernel's workspace: `workspace_size` of `AttentionBackwardKernel`.

    The gradient of the query is summed up in tiles of (rows of queries, columns) with four numbers more each. A kernel
    of 16 bits whose tiles are narrower than a head does the same with those of keys and values, as often as the keys
    are split. Tiles are those of the first kernel in `kernels/cutlassB.h` that is wide enough and fits shared memory.
    """
    batch, heads, length, width = query.shape
    half, keys = query.dtype in _HALF, key.shape[2]
    rows, columns, most = _tile(width, half, generation)
    total = -(-length // rows) * -(-width // columns) * (rows * columns + 4)
    if half and most > rows:  # kOutputInRF is false
        splits = max(1, min(-(-keys // columns), 200 // (batch * heads)))
        total += 2 * splits * columns * _up(width, rows)
    return batch * heads * _up(total, 4)


def _tile(width: int, half: bool, generation: Generation) -> tuple[int, int, int]:
    """Return rows and columns of a tile and the widest head of the kernel."""
    if width <= 64:
        return 64, 64, 64
    if not half:
        return (128 if generation in ("ampere", "hopper") else 64), 64, 1 << 16
    if width > 128:
        return 128, 64, 1 << 16
    if generation == "turing":
        return 128, 64, 128
    if generation == "small_ampere":
        return (128, 64, 96) if width <= 96 else (64, 64, 128)
    return 128, 128, 128


def _by_position(tensor: torch.Tensor, width: int) -> torch.Tensor:
    """Return zeros for heads of a width, laid out as (batch, length, heads, width): merging the heads is a view."""
    batch, heads, length, _ = tensor.shape
    return tensor.new_zeros((batch, length, heads, width)).transpose(1, 2)


def _up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple
