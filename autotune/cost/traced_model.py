"""The model as it is traced: its config, the kind of its tensors, its quantized layers and its adapter.

Under tensor parallelism it is one device's part, by transformers' plan for the model's class, which names a style for
modules and parameters (transformers 5.24, `distributed/tensor_parallel.py`): a device keeps its slice of each matrix
that is split. Two styles put results together again, which takes memory: a gathered output, and the ids of tokens that
a device's rows of a table hold.

Layers that multiply in fp8 are torchao's own where inductor's programs are traced, and otherwise written out in the
operators to which inductor fuses theirs. Packed layers are bitsandbytes' own, of the installed version and on the meta
device. Their products are written out in operators (`bitsandbytes/autograd/_functions.py` and `backends/*/ops.py` of
0.50). Not covered: the fused 4-bit kernels that CUDA prefers for a few hundred tokens and less, and outliers of
LLM.int8(), which random inputs hardly have.
"""

from collections.abc import Callable
from typing import Any

import torch
from accelerate.utils.ao import filter_linear_layers, find_first_last_linear_layers
from bitsandbytes import functional
from bitsandbytes.nn import Linear4bit, Linear8bitLt, Params4bit
from torch import nn

from autotune.cost.family import Device, Family, Shape
from autotune.cost.profile import LAYER_NUMBER
from autotune.errors import InputError, one_line
from autotune.training.adapters import adapter_arguments, multiply_in_float8, put_on, quantization_arguments
from autotune.training.arguments import routing_fields
from autotune.training.build import build_model
from autotune.training.loss import chunk_loss
from autotune.training.random_weights import quantized_layers, replace_layers
from autotune.values.config import Precision
from autotune.values.model import ModelSpec, Task

Change = Callable[[Any], Any]


class Untraceable(Exception):
    """The model doesn't run on the meta device."""


def build(spec: ModelSpec, config: Any, family: Family, shape: Shape, change: Change | None) -> Any:
    flash = (family.attn_implementation or "").startswith("flash_attention")
    model = build_model(
        spec,
        shape.task,
        dtype=family.dtype,
        attn_implementation="sdpa" if flash else family.attn_implementation,
        device="meta",
        experts_implementation=family.experts_implementation,
        config=config,
        **routing_fields(family.experts_per_token, family.expert_capacity),
    )
    model.config.use_cache = False
    if flash:  # not asked of the library, which refuses what isn't installed
        model.config._attn_implementation = "flash_attention_2"
    if change is not None:
        model = change(model)
    if family.tensor_parallel > 1:
        keep_part(model, family.tensor_parallel)
    if family.quantization is not None:
        _pack(model, family, shape.task)
    if family.float8 and family.compiled:
        multiply_in_float8(model)
    elif family.float8:
        ends = find_first_last_linear_layers(model)
        for name, layer in model.named_modules():
            if type(layer) is nn.Linear and filter_linear_layers(layer, name, ends):
                layer.__class__ = _TracedFloat8
    if family.adapter is not None:
        try:
            with torch.device("meta"):
                # TRL and the user's own code put adapters on by themselves.
                mixed = family.autocast is not None and shape.recipe is None and family.adapter.kind != "own"
                arguments = adapter_arguments(family.adapter, shape.task, spec.model_type)
                model = put_on(model, arguments, mixed=mixed)
        except ValueError as error:
            raise InputError(f"{spec.name}: the adapter can't be put on: {one_line(error)}") from error
    return chunk_loss(model) if family.chunked_loss else model


def keep_part(model: Any, degree: int) -> None:
    """Leave the first of `degree` devices' part of each matrix in a model."""
    plan: dict[str, str] = getattr(model, "tp_plan", None) or {}
    config = model.config.get_text_config()
    if not plan:
        raise InputError(f"tensor parallel {degree}: transformers has no plan for {config.model_type}")
    for name in ("num_attention_heads", "num_key_value_heads"):
        heads = getattr(config, name, None)
        if isinstance(heads, int) and heads % degree:
            raise InputError(f"tensor parallel {degree}: does not divide {name} = {heads}")
    gather: Any = _Gather.apply
    kept: dict[int, nn.Parameter] = {}  # by the whole parameter: what is tied stays so
    for name, module in model.named_modules():
        style = plan.get(LAYER_NUMBER.sub(".*", name), "")
        for own, whole in module.named_parameters(recurse=False):
            if id(whole) not in kept:
                split = _dimension(plan.get(LAYER_NUMBER.sub(".*", f"{name}.{own}"), style), own, whole.ndim)
                kept[id(whole)] = whole
                if split is not None:
                    part = whole.detach().chunk(degree, split)[0].clone(memory_format=torch.contiguous_format)
                    kept[id(whole)] = nn.Parameter(part, requires_grad=whole.requires_grad)
            module._parameters[own] = kept[id(whole)]
        if style == "embedding_rowwise":  # ids of other devices' rows are masked
            module.padding_idx = None
            rows = module.weight.shape[0]
            module.register_forward_pre_hook(lambda _, given, rows=rows: (given[0].remainder(rows), *given[1:]))
        elif style in ("rowwise_split_input", "rowwise_rep"):
            module.register_forward_pre_hook(lambda _, given: (given[0].chunk(degree, -1)[0].clone(), *given[1:]))
        elif style in ("colwise_gather_output", "colwise_rep", "embedding_colwise"):
            width = getattr(module, "out_features", None) or module.embedding_dim
            module.register_forward_hook(lambda _, __, out, width=width: gather(out, degree, width))


def _dimension(style: str, name: str, dimensions: int) -> int | None:
    if style.startswith(("colwise", "packed_colwise")):
        return max(dimensions - 2, 0)
    if style.startswith("rowwise"):
        return None if name == "bias" else -1
    if style == "packed_rowwise":
        return None if dimensions == 1 else -1
    return {"embedding_rowwise": 0, "embedding_colwise": 1}.get(style)


class _Gather(torch.autograd.Function):
    """Puts the devices' slices of the last dimension together: an all-gather, whose pieces are then joined."""

    @staticmethod
    def forward(ctx: Any, part: torch.Tensor, degree: int, width: int) -> torch.Tensor:
        ctx.width = part.shape[-1]
        return torch.cat(part.new_empty((degree * part.shape[0], *part.shape[1:])).chunk(degree), -1)[..., :width]

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return gradient[..., : ctx.width].clone(memory_format=torch.contiguous_format), None, None


def _pack(model: Any, family: Family, task: Task) -> None:
    """Replace the linear layers of a model on the meta device by traced ones of packed weights."""
    assert family.quantization is not None
    by_autocast = {"bfloat16": Precision.BF16, "float16": Precision.FP16, None: Precision.FP32}
    precision = Precision.PURE_BF16 if family.dtype == "bfloat16" else by_autocast[family.autocast]
    # bitsandbytes makes one table for its whole life, on the device where it is first used: not the meta device.
    functional.name2qmap.setdefault("dynamic", functional.create_dynamic_map())
    quantizer = replace_layers(model, quantization_arguments(family.quantization, precision, task), "meta")
    for _, layer in quantized_layers(model):
        if isinstance(layer, Linear4bit):
            old = layer.weight
            kind = {"compress_statistics": old.compress_statistics, "quant_type": old.quant_type}
            packed, state = functional.quantize_4bit(old.data, blocksize=old.blocksize, **kind)
            options = {**vars(old), "quant_state": state, "bnb_quantized": True}
            layer.weight, layer.quant_state = Params4bit(packed, requires_grad=False, **options), state
            layer.__class__ = _Traced4bit
            tensors = {"absmax": state.absmax, "code": state.code}
            if state.nested:
                tensors |= {"scales": state.state2.absmax, "scale_code": state.state2.code, "offset": state.offset}
        else:
            packed = torch.empty(layer.weight.shape, dtype=torch.int8, device="meta")
            layer.weight = type(layer.weight)(packed, requires_grad=False, has_fp16_weights=False)
            scales = torch.empty(layer.out_features, dtype=torch.float32, device="meta")
            layer.state.CB, layer.state.SCB, layer.traced_device = packed, scales, family.device
            layer.__class__ = _Traced8bit
            tensors = {"scales": scales}
        for name, tensor in tensors.items():  # no parameters, but they count as weights
            layer.register_buffer(f"_packing_{name}", tensor, persistent=False)
    quantizer.postprocess_model(model)


class _Traced4bit(Linear4bit):  # type: ignore[misc]  # bitsandbytes is untyped
    # As on the CPU and, for more than some hundred tokens, on CUDA.
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
    traced_device: Device

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
        return torch.matmul(gradient.to(ctx.input.dtype), _unpacked_8bit(ctx.layer, ctx.input.dtype)), None, None


def _unpacked_8bit(layer: Any, dtype: torch.dtype) -> torch.Tensor:
    scales = layer.state.SCB.unsqueeze(1).mul(1.0 / 127.0)
    return layer.state.CB.to(dtype, copy=True).mul_(scales)  # type: ignore[no-any-return]


class _TracedFloat8(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = _Float8Product.apply(x.to(torch.bfloat16), self.weight)  # type: ignore[no-untyped-call]
        return out if self.bias is None else out + self.bias.to(out.dtype)


class _Float8Product(torch.autograd.Function):
    """`matmul_with_hp_or_float8_args` of torchao 0.18, whose backward pass casts all anew and saves no weight."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        product = _product_in_float8(_float8(x.flatten(0, -2)), _float8(weight).t())
        return product.view(*x.shape[:-1], len(weight))

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        x, weight = ctx.saved_tensors
        rows = _float8(gradient.flatten(0, -2), torch.float8_e5m2)
        of_x = _product_in_float8(rows, _float8(weight).t().contiguous().t()).view_as(x)
        whole = len(rows) // 16 * 16  # tokens, which torchao pads instead
        inputs = _float8(x.flatten(0, -2))[:whole].t().contiguous().t()
        return of_x, _product_in_float8(rows[:whole].t().contiguous(), inputs)


def _float8(tensor: torch.Tensor, dtype: torch.dtype = torch.float8_e4m3fn) -> torch.Tensor:
    tensor.amax()  # by which it is scaled
    return tensor.to(dtype)


def _product_in_float8(rows: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
    one = torch.ones((), device=rows.device)
    return torch._scaled_mm(rows, columns, scale_a=one, scale_b=one, out_dtype=torch.bfloat16)
