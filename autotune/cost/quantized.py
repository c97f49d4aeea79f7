"""Layers of bitsandbytes as traced: packed weights of the right sizes, unpacked for each product where the device does.

The layers are the library's own, of the installed version and on the meta device, so that peft puts its adapters on
them as it does on real ones. Their products are written out in operators, since those of bitsandbytes are one operator
each, inside of which nobody can look: `bitsandbytes/autograd/_functions.py` and `backends/*/ops.py` of 0.50.

Not covered: the fused 4-bit kernels that CUDA prefers for a few hundred tokens and less (they take no unpacked copy),
and outliers of LLM.int8(), which random inputs hardly have.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from bitsandbytes import functional
from bitsandbytes.nn import Linear4bit, Linear8bitLt, Params4bit
from torch import nn

from autotune.cost.family import Family
from autotune.training.adapters import quantization_arguments
from autotune.training.random_weights import quantized_layers, replace_layers
from autotune.values.config import Precision
from autotune.values.model import Task

# Prefix of buffers for a layer's tensors that are no parameters, so that they count as weights.
_STATE = "_packing_"


def pack(model: Any, family: Family, task: Task) -> None:
    """Replace the linear layers of a model on the meta device by traced ones of packed weights."""
    assert family.quantization is not None
    arguments = quantization_arguments(family.quantization, _precision(family), task)
    # bitsandbytes makes one table for its whole life, on the device where it is first used: not the meta device.
    functional.name2qmap.setdefault("dynamic", functional.create_dynamic_map())
    quantizer = replace_layers(model, arguments, "meta")
    for _, layer in quantized_layers(model):
        if isinstance(layer, Linear4bit):
            _pack_4bit(layer)
        else:
            _pack_8bit(layer, family.device)
    quantizer.postprocess_model(model)


def _precision(family: Family) -> Precision:
    if family.dtype == "bfloat16":
        return Precision.PURE_BF16
    by_autocast = {"bfloat16": Precision.BF16, "float16": Precision.FP16}
    return by_autocast[family.autocast] if family.autocast else Precision.FP32


def weight_of(layer: nn.Module) -> tuple[tuple[int, ...], float] | None:
    """Return the shape of a traced layer's weight before it was packed and bytes an element; None of other layers."""
    if isinstance(layer, _Traced4bit | _Traced8bit):
        shape = (layer.out_features, layer.in_features)
        return shape, layer.weight.numel() / (shape[0] * shape[1])
    return None


def _pack_4bit(layer: Any) -> None:
    old = layer.weight
    packed, state = functional.quantize_4bit(
        old.data, blocksize=old.blocksize, compress_statistics=old.compress_statistics, quant_type=old.quant_type
    )
    options = {**vars(old), "quant_state": state, "bnb_quantized": True}
    layer.weight = Params4bit(packed, requires_grad=False, **options)
    layer.quant_state = state
    tensors = {"absmax": state.absmax, "code": state.code}
    if state.nested:
        tensors |= {"scales": state.state2.absmax, "scale_code": state.state2.code, "offset": state.offset}
    _keep(layer, tensors)
    layer.__class__ = _Traced4bit


def _pack_8bit(layer: Any, device: Literal["cpu", "cuda"]) -> None:
    packed = torch.empty(layer.weight.shape, dtype=torch.int8, device="meta")
    layer.weight = type(layer.weight)(packed, requires_grad=False, has_fp16_weights=False)
    layer.state.CB = packed
    layer.state.SCB = torch.empty(layer.out_features, dtype=torch.float32, device="meta")
    _keep(layer, {"scales": layer.state.SCB})
    layer.traced_device = device
    layer.__class__ = _Traced8bit


def _keep(layer: nn.Module, tensors: dict[str, torch.Tensor]) -> None:
    for name, tensor in tensors.items():
        layer.register_buffer(_STATE + name, tensor, persistent=False)


class _Traced4bit(Linear4bit):  # type: ignore[misc]  # bitsandbytes is untyped
    """4-bit weights: `Linear4bit.forward`, on the CPU and, for more than some hundred tokens, on CUDA."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        given = x.dtype
        x = x.to(self.compute_dtype)
        bias = None if self.bias is None else self.bias.to(self.compute_dtype)
        out: torch.Tensor = _Product4bit.apply(x, self, bias)  # type: ignore[no-untyped-call]
        return out.to(given)


class _Product4bit(torch.autograd.Function):
    """`MatMul4Bit`: weights are unpacked for each product and dropped; only packed weights are saved."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, layer: Any, bias: torch.Tensor | None) -> torch.Tensor:
        ctx.layer = layer
        return nn.functional.linear(x, _unpacked(layer, x.dtype), bias)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        # In the type that they were packed from, and only then in that of the gradient.
        weight = _unpacked(ctx.layer, ctx.layer.weight.quant_state.dtype).to(gradient.dtype)
        return torch.matmul(gradient, weight), None, None


def _unpacked(layer: Any, dtype: torch.dtype) -> torch.Tensor:
    """Return the weights: `gemm_4bit` and `dequantize_4bit`, whose scales are unpacked first if they are packed."""
    state = layer.weight.quant_state
    absmax = state.absmax
    if state.nested:
        absmax = functional.dequantize_blockwise(state.absmax, state.state2) + state.offset
    packed = layer.weight.data
    weight: torch.Tensor = torch.ops.bitsandbytes.dequantize_4bit.default(
        packed, absmax, state.blocksize, state.quant_type, state.shape, dtype
    )
    return weight


class _Traced8bit(Linear8bitLt):  # type: ignore[misc]  # bitsandbytes is untyped
    """8-bit weights: `Linear8bitLt.forward`."""

    traced_device: Literal["cpu", "cuda"]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        product = _Product8bitCpu if self.traced_device == "cpu" else _Product8bitCuda
        bias = None if self.bias is None else self.bias.to(x.dtype)
        out: torch.Tensor = product.apply(x, self, bias)  # type: ignore[no-untyped-call]
        return out


class _Product8bit(torch.autograd.Function):
    """The part common to both: the input is saved, and the backward pass unpacks the weights to its type."""

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        weight = _unpacked_8bit(ctx.layer, ctx.input.dtype)
        return torch.matmul(gradient.to(ctx.input.dtype), weight), None, None


class _Product8bitCpu(_Product8bit):
    """`MatMul8bitFp`: a product in floating point with weights that are unpacked for it."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, layer: Any, bias: torch.Tensor | None) -> torch.Tensor:
        ctx.layer, ctx.input = layer, x
        return nn.functional.linear(x, _unpacked_8bit(layer, x.dtype), bias)


class _Product8bitCuda(_Product8bit):
    """`MatMul8bitLt`: inputs are packed by row, the product of integers is scaled; weights stay packed."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, layer: Any, bias: torch.Tensor | None) -> torch.Tensor:
        ctx.layer, ctx.input = layer, x
        packed = x.to(torch.float16).to(torch.int8)
        product = torch.matmul(packed, layer.weight.data.t()).to(torch.int32)
        del packed
        out = product.to(torch.float16)
        return (out if bias is None else out + bias.to(out.dtype)).to(x.dtype)


def _unpacked_8bit(layer: Any, dtype: torch.dtype) -> torch.Tensor:
    scales = layer.state.SCB.unsqueeze(1).mul(1.0 / 127.0)
    return layer.state.CB.to(dtype, copy=True).mul_(scales)  # type: ignore[no-any-return]
