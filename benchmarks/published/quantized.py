"""Linear layers with 4-bit or 8-bit weights, and LoRA on them, as traced on the meta device: sizes and lifetimes only.

What they keep and take is that of bitsandbytes 0.43 (`functional.quantize_4bit`, `autograd/_functions.py`), of the
Triton kernel of GPTQ models (`dequant.py`: weights are unpacked to 16 bits before each product, forward and backward)
and of peft 0.13 (`tuners/lora/bnb.py`). Called by `software`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from peft.tuners.lora.layer import LoraLayer
from torch import nn

# bitsandbytes: elements that share a scale; scales that share a scale of their own.
_BLOCK = 64
_NESTED_BLOCK = 256


@dataclass(frozen=True)
class Quantization:
    kind: Literal["4bit", "int8", "gptq"]  # nf4 and fp4 differ in their 16 values only, so not in memory
    nested: bool = False  # the scales are quantized too (bitsandbytes' double quantization)
    group: int | None = None  # GPTQ: elements that share a scale, None for all of a row
    compute: torch.dtype = torch.bfloat16  # type that weights are unpacked to


class PackedLinear(nn.Module):
    """A linear layer whose weights are packed; unpacked for each product, then dropped."""

    def __init__(self, linear: nn.Linear, how: Quantization) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.how = how
        self.bias = linear.bias
        elements = linear.in_features * linear.out_features
        width = 1 if how.kind == "int8" else 2  # weights in a byte
        packed = torch.empty((-(-elements // width), 1), dtype=torch.uint8, device="meta")
        self.weight = nn.Parameter(packed, requires_grad=False)
        for name, size, dtype in self._scales(elements):
            self.register_buffer(name, torch.empty(size, dtype=dtype, device="meta"))

    def _scales(self, elements: int) -> list[tuple[str, int, torch.dtype]]:
        if self.how.kind == "int8":
            return [("scale", self.out_features, torch.float32)]
        if self.how.kind == "gptq":
            groups = math.ceil(self.in_features / (self.how.group or self.in_features))
            return [
                ("scale", groups * self.out_features, torch.float16),
                ("zero", groups * self.out_features // 8, torch.int32),
                ("group_of", self.in_features, torch.int32),
            ]
        blocks = math.ceil(elements / _BLOCK)
        if not self.how.nested:
            return [("scale", blocks, torch.float32)]
        return [("scale", blocks, torch.uint8), ("scale_of_scale", math.ceil(blocks / _NESTED_BLOCK), torch.float32)]

    def unpack(self) -> torch.Tensor:
        scale = self.scale.to(torch.float32) if self.how.nested else None
        weight = torch.empty((self.out_features, self.in_features), dtype=self.how.compute, device="meta")
        del scale
        return weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the product in the type of the input: `bnb.nn.Linear4bit.forward`."""
        given = x.dtype
        x = x.to(self.how.compute)
        product = _Int8Product if self.how.kind == "int8" else _UnpackedProduct
        out: torch.Tensor = product.apply(x, self)
        if self.bias is not None:
            out = out + self.bias.to(out.dtype)
        return out.to(given)


class _UnpackedProduct(torch.autograd.Function):
    """The product with weights that are unpacked for it; nothing but what is packed is kept."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, layer: PackedLinear) -> torch.Tensor:
        ctx.layer = layer
        return torch.matmul(x, layer.unpack().t())

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return torch.matmul(gradient.to(ctx.layer.how.compute), ctx.layer.unpack()), None


class _Int8Product(torch.autograd.Function):
    """LLM.int8(): inputs are quantized by row, outliers multiplied apart in 16 bits; no input is kept."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, layer: PackedLinear) -> torch.Tensor:
        ctx.layer = layer
        quantized = torch.empty(x.shape, dtype=torch.int8, device="meta")
        product = torch.empty((*x.shape[:-1], layer.out_features), dtype=torch.int32, device="meta")
        del quantized
        return product.to(torch.float16)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        layer = ctx.layer
        weight = torch.empty((layer.out_features, layer.in_features), dtype=torch.float16, device="meta")
        return torch.matmul(gradient.to(torch.float16), weight), None


class LoraPacked(nn.Module, LoraLayer):
    """LoRA on packed weights, as peft 0.13 runs it: in 16 bits under autocast, in fp32 without."""

    def __init__(
        self, base_layer: PackedLinear, adapter_name: str, config: Any = None, r: int = 0, lora_alpha: int = 1, **_: Any
    ) -> None:
        super().__init__()
        LoraLayer.__init__(self, base_layer)
        self._active_adapter = adapter_name
        self.update_layer(adapter_name, r=r, lora_alpha=lora_alpha, config=config)
        self.autocast = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result = self.base_layer(x)
        if self.base_layer.how.kind == "4bit":
            result = result.clone()  # bnb.py: "for 4bit, we need to defensively clone here"
        name = self.active_adapters[0]
        a, b = self.lora_A[name], self.lora_B[name]
        dtype = result.dtype
        if not self.autocast:
            x = x.to(a.weight.dtype)
        output = b(a(self.lora_dropout[name](x))) * self.scaling[name]
        return result + (output if self.autocast else output.to(dtype))


def quantize(model: Any, how: Quantization, *, keep: Sequence[str] = ()) -> None:
    """Replace the linear layers of `model` by packed ones, in place.

    Layers whose last name is in `keep` stay as they are; an output head that makes logits always does.
    """
    head = model.get_output_embeddings()
    for name, module in list(model.named_modules()):
        if type(module) is not nn.Linear or module is head or name.rpartition(".")[2] in keep:
            continue
        parent = model.get_submodule(name.rpartition(".")[0])
        setattr(parent, name.rpartition(".")[2], PackedLinear(module, how))
