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


def pack(model: Any, family: Family, task: Task) -> None:
    """Replace the linear layers of a model on the meta device by traced ones of packed weights."""
    assert family.quantization is not None
    by_autocast = {"bfloat16": Precision.BF16, "float16": Precision.FP16, None: Precision.FP32}
    precision = Precision.PURE_BF16 if family.dtype == "bfloat16" else by_autocast[family.autocast]
    # bitsandbytes makes one table for its whole life, on the device where it is first used: not the meta device.
    functional.name2qmap.setdefault("dynamic", functional.create_dynamic_map())
    quantizer = replace_layers(model, quantization_arguments(family.quantization, precision, task), "meta")
    for _, layer in quantized_layers(model):
        tensors = _pack_4bit(layer) if isinstance(layer, Linear4bit) else _pack_8bit(layer, family.device)
        for name, tensor in tensors.items():  # no parameters, but they count as weights
            layer.register_buffer(f"_packing_{name}", tensor, persistent=False)
    quantizer.postprocess_model(model)


def weight_of(layer: nn.Module) -> tuple[tuple[int, ...], float] | None:
    """Return the shape of a traced layer's weight before it was packed and bytes an element; None of other layers."""
    if isinstance(layer, _Traced4bit | _Traced8bit):
        shape = (layer.out_features, layer.in_features)
        return shape, layer.weight.numel() / (shape[0] * shape[1])
    return None


def _pack_4bit(layer: Any) -> dict[str, torch.Tensor]:
    old = layer.weight
    packed, state = functional.quantize_4bit(
        old.data, blocksize=old.blocksize, compress_statistics=old.compress_statistics, quant_type=old.quant_type
    )
    options = {**vars(old), "quant_state": state, "bnb_quantized": True}
    layer.weight, layer.quant_state = Params4bit(packed, requires_grad=False, **options), state
    layer.__class__ = _Traced4bit
    nested = {}
    if state.nested:
        nested = {"scales": state.state2.absmax, "scale_code": state.state2.code, "offset": state.offset}
    return {"absmax": state.absmax, "code": state.code, **nested}


def _pack_8bit(layer: Any, device: Literal["cpu", "cuda"]) -> dict[str, torch.Tensor]:
    packed = torch.empty(layer.weight.shape, dtype=torch.int8, device="meta")
    layer.weight = type(layer.weight)(packed, requires_grad=False, has_fp16_weights=False)
    layer.state.CB, layer.state.SCB = packed, torch.empty(layer.out_features, dtype=torch.float32, device="meta")
    layer.traced_device = device
    layer.__class__ = _Traced8bit
    return {"scales": layer.state.SCB}


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
        return nn.functional.linear(x, _unpacked_4bit(layer, x.dtype), bias)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        # In the type that they were packed from, and only then in that of the gradient.
        weight = _unpacked_4bit(ctx.layer, ctx.layer.weight.quant_state.dtype).to(gradient.dtype)
        return torch.matmul(gradient, weight), None, None


def _unpacked_4bit(layer: Any, dtype: torch.dtype) -> torch.Tensor:
    """Return the weights: `gemm_4bit` and `dequantize_4bit`, whose scales are unpacked first if they are packed."""
    state = layer.weight.quant_state
    absmax = state.absmax
    if state.nested:
        absmax = functional.dequantize_blockwise(state.absmax, state.state2) + state.offset
    weight: torch.Tensor = torch.ops.bitsandbytes.dequantize_4bit.default(
        layer.weight.data, absmax, state.blocksize, state.quant_type, state.shape, dtype
    )
    return weight


class _Traced8bit(Linear8bitLt):  # type: ignore[misc]  # bitsandbytes is untyped
    """8-bit weights: `Linear8bitLt.forward`."""

    traced_device: Literal["cpu", "cuda"]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        bias = None if self.bias is None else self.bias.to(x.dtype)
        out: torch.Tensor = _Product8bit.apply(x, self, bias)  # type: ignore[no-untyped-call]
        return out


class _Product8bit(torch.autograd.Function):
    """The input is saved, and the backward pass unpacks the weights to its type.

    On the CPU `MatMul8bitFp`, a product in floating point with weights that are unpacked for it; on CUDA
    `MatMul8bitLt`: inputs are packed by row, the product of integers is scaled, and weights stay packed.
    """

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, layer: Any, bias: torch.Tensor | None) -> torch.Tensor:
        ctx.layer, ctx.input = layer, x
        if layer.traced_device == "cpu":
            return nn.functional.linear(x, _unpacked_8bit(layer, x.dtype), bias)
        packed = x.to(torch.float16).to(torch.int8)
        product = torch.matmul(packed, layer.weight.data.t()).to(torch.int32)
        del packed
        out = product.to(torch.float16)
        return (out if bias is None else out + bias.to(out.dtype)).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        weight = _unpacked_8bit(ctx.layer, ctx.input.dtype)
        return torch.matmul(gradient.to(ctx.input.dtype), weight), None, None


def _unpacked_8bit(layer: Any, dtype: torch.dtype) -> torch.Tensor:
    scales = layer.state.SCB.unsqueeze(1).mul(1.0 / 127.0)
    return layer.state.CB.to(dtype, copy=True).mul_(scales)  # type: ignore[no-any-return]
