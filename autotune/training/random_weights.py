"""A model of random weights: drawn quickly, whole on each rank, quantized layer by layer, or this rank's part of them.

**Quickly.** On a CPU torch draws number by number, and transformers draws most weights twice. With `quick_weights`
large tensors are copies of one drawn block: DistilBERT (67M parameters) takes 0.32 s, not 1.05 s. Rows of a matrix
differ, so that routing, outliers and overflow are as they were. Trials whose losses are compared draw every number.

**Quantized.** `from_config` refuses to quantize. `quantize` replaces linear layers by the library's own quantizer and
fills them on the device one after the other, so that 16 or 32 bits of all weights are never held at once.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import nn
from transformers import PreTrainedModel

# Numbers that are drawn: a prime, so that rows of a matrix differ up to this many of them.
BLOCK = 100_003


@contextmanager
def quick_weights() -> Iterator[None]:
    """Draw the numbers of large tensors on the CPU in blocks while entered; equal torch seeds give equal weights."""
    blocks: dict[tuple[str, torch.dtype], torch.Tensor] = {}

    def filling(name: str, first: str, second: str) -> Any:
        original: Any = getattr(torch.Tensor, name)

        def fill(tensor: torch.Tensor, *given: float, generator: Any = None, **named: float) -> torch.Tensor:
            is_piece = tensor.is_floating_point() and tensor.is_contiguous()
            is_plain = is_piece and type(tensor) in (torch.Tensor, nn.Parameter) and tensor.device.type == "cpu"
            if tensor.numel() <= BLOCK or generator is not None or not is_plain:
                return original(tensor, *given, generator=generator, **named)  # type: ignore[no-any-return]
            asked = {first: 0.0, second: 1.0, **dict(zip((first, second), given, strict=False)), **named}
            low, high, key = asked[first], asked[second], (name, tensor.dtype)
            if key not in blocks:
                blocks[key] = original(torch.empty(BLOCK, dtype=tensor.dtype, device="cpu"))
            scaled, flat = blocks[key] * (high if name == "normal_" else high - low) + low, tensor.view(-1)
            whole = flat.numel() // BLOCK * BLOCK
            flat[:whole].view(-1, BLOCK).copy_(scaled)
            flat[whole:].copy_(scaled[: flat.numel() - whole])
            return tensor

        return fill

    with patch.multiple(
        torch.Tensor, normal_=filling("normal_", "mean", "std"), uniform_=filling("uniform_", "from", "to")
    ):
        yield


@contextmanager
def whole_weights() -> Iterator[None]:
    """Draw all weights on each rank while entered, although DeepSpeed is going to split them.

    Under ZeRO-3 transformers splits weights while it draws them, in an order of its own, so that they aren't those of
    one device, as a comparison of losses needs. DeepSpeed splits a whole model as well, if there is memory for it.
    """
    from transformers.integrations import deepspeed

    with patch.object(deepspeed, "_hf_deepspeed_config_weak_ref", None):
        yield


def replace_layers(model: PreTrainedModel, arguments: dict[str, Any], device: str) -> Any:
    """Replace the linear layers of a model on the meta device by bitsandbytes', for `device`; return the quantizer."""
    from transformers import BitsAndBytesConfig
    from transformers.quantizers.auto import AutoHfQuantizer

    quantizer = AutoHfQuantizer.from_config(BitsAndBytesConfig(**arguments), pre_quantized=False)
    quantizer.preprocess_model(model, device_map={"": device})
    model.hf_quantizer = quantizer
    return quantizer


def quantize(model: PreTrainedModel, arguments: dict[str, Any], device: str) -> None:
    """Quantize a meta model as `from_pretrained` does (integrations/bitsandbytes.py), random on `device`."""
    from bitsandbytes.nn import Int8Params, Params4bit

    quantizer = replace_layers(model, arguments, device)
    for _, layer in quantized_layers(model):
        old = layer.weight
        # Activations keep their scale from layer to layer with the deviation that most configs name, or the usual one.
        deviation = getattr(model.config, "initializer_range", None) or layer.in_features**-0.5
        value = torch.empty(old.shape, dtype=old.dtype, device=device).normal_(std=deviation)
        if isinstance(old, Int8Params):
            options = {k: v for k, v in vars(old).items() if k != "SCB"}
            layer.weight = Int8Params(value.to("cpu"), requires_grad=False, **options).to(device)
        else:
            layer.weight = Params4bit(value, requires_grad=False, **vars(old)).to(device)
        layer.weight._is_hf_initialized = True
    left = {name for name, value in model.state_dict(keep_vars=True).items() if getattr(value, "is_meta", False)}
    model._move_missing_keys_from_meta_to_device(left, {"": torch.device(device)}, None, quantizer)
    model.tie_weights()
    with torch.no_grad():
        model.initialize_weights()  # leaves alone what is marked as initialized
    quantizer.postprocess_model(model)


def quantized_layers(model: Any) -> Iterator[tuple[str, Any]]:
    from bitsandbytes.nn import Linear4bit, Linear8bitLt

    for name, module in model.named_modules():
        if isinstance(module, Linear4bit | Linear8bitLt):
            yield name, module


def quantization_of(layer: Any) -> str:
    """Return how the weights of a layer of bitsandbytes are packed, as configurations name it."""
    weight = layer.weight
    if type(weight).__name__ == "Int8Params":
        return "int8"
    return f"{weight.quant_type}-double" if weight.compress_statistics else str(weight.quant_type)


def shard_model(model: PreTrainedModel, degrees: dict[str, Any]) -> PreTrainedModel:
    """Return `model` with this rank's part of its weights, on this rank's device. Every rank has to call it.

    It takes the steps of `PreTrainedModel.from_pretrained` (transformers 5.23), as `from_config` knows no
    `distributed_config`. The model is on a device, if its weights are to be split, or on the meta device, for new ones.
    `degrees` are of `DistributedConfig`; ValueError: the class has no plan.
    """
    from torch.distributed.tensor import DTensor

    is_made = not any(parameter.is_meta for parameter in model.parameters())
    untie_weights(model)
    config, device, mesh = type(model).prepare_distribute_model(dict(degrees))
    model = type(model).maybe_distribute_model(model, config, mesh)
    if not is_made:  # each rank draws its own part
        model._move_missing_keys_from_meta_to_device(set(model.state_dict()), {"": torch.device(device)}, None, None)
    model.tie_weights()
    with torch.no_grad():
        if not is_made:
            model.initialize_weights()
        for parameter in model.parameters():
            if not isinstance(parameter.data, DTensor):  # the plan doesn't name it: each rank has drawn its own
                parameter.data = parameter.data.to(device)
                torch.distributed.broadcast(parameter.data, src=0)
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            module._buffers[name] = buffer.to(device)
    return model


def untie_weights(model: nn.Module) -> None:
    """Give each module parameters of its own in place of tied ones, whose second names the plan doesn't find."""
    seen: set[int] = set()
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if id(parameter) in seen:
                module._parameters[name] = nn.Parameter(parameter.detach(), requires_grad=parameter.requires_grad)
            seen.add(id(parameter))
