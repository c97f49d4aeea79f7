"""Quantized base weights made of random ones, in place, without ever holding all of them in 16 or 32 bits.

`from_pretrained` replaces the linear layers of a model on the meta device by bitsandbytes' and quantizes weights while
it reads them; `from_config` refuses to. Here the very same layers are replaced, by the library's own quantizer, and
filled on the device one after the other. Nothing is saved and read again. Called by `models` and, for the layers alone,
by the tracer.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel


def replace_layers(model: PreTrainedModel, arguments: dict[str, Any], device: str) -> Any:
    """Replace the linear layers of a model on the meta device by bitsandbytes' and return the library's quantizer.

    Args:
        model: On the meta device.
        arguments: Keyword arguments of `transformers.BitsAndBytesConfig`.
        device: Where the model is going to be.
    """
    from transformers import BitsAndBytesConfig
    from transformers.quantizers.auto import AutoHfQuantizer

    quantizer = AutoHfQuantizer.from_config(BitsAndBytesConfig(**arguments), pre_quantized=False)
    quantizer.preprocess_model(model, device_map={"": device})
    model.hf_quantizer = quantizer
    return quantizer


def quantize(model: PreTrainedModel, arguments: dict[str, Any], device: str) -> None:
    """Quantize a model that is on the meta device, and make the rest of its weights: random, on `device`."""
    import torch

    quantizer = replace_layers(model, arguments, device)
    for _, layer in quantized_layers(model):
        _fill(layer, model.config, torch.device(device))
    _make_the_rest(model, torch.device(device))
    model.tie_weights()
    with torch.no_grad():
        model.initialize_weights()  # leaves alone what is marked as initialized
    quantizer.postprocess_model(model)


def quantized_layers(model: Any) -> Iterator[tuple[str, Any]]:
    """Yield the layers of bitsandbytes in a model, by name."""
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


def _fill(layer: Any, config: Any, device: torch.device) -> None:
    """Give a layer random weights, quantized as `from_pretrained` does: transformers/integrations/bitsandbytes.py.

    Activations keep their scale from layer to layer with the deviation that most configs name, or the usual one.
    """
    import torch
    from bitsandbytes.nn import Int8Params, Params4bit

    old = layer.weight
    deviation = getattr(config, "initializer_range", None) or layer.in_features**-0.5
    value = torch.empty(old.shape, dtype=old.dtype, device=device).normal_(std=deviation)
    if isinstance(old, Int8Params):
        options = {k: v for k, v in vars(old).items() if k != "SCB"}
        layer.weight = Int8Params(value.to("cpu"), requires_grad=False, **options).to(device)
    else:
        layer.weight = Params4bit(value, requires_grad=False, **vars(old)).to(device)
    layer.weight._is_hf_initialized = True


def _make_the_rest(model: Any, device: torch.device) -> None:
    """Put whatever is still on the meta device on `device`, without values; what shares a weight goes on sharing it."""
    import torch

    made: dict[int, Any] = {}
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if parameter.is_meta:
                value = made.get(id(parameter))
                if value is None:
                    empty = torch.empty_like(parameter, device=device)
                    value = made[id(parameter)] = torch.nn.Parameter(empty, requires_grad=parameter.requires_grad)
                setattr(module, name, value)
        for name, buffer in module.named_buffers(recurse=False):
            if buffer.is_meta:
                module._buffers[name] = torch.empty_like(buffer, device=device)
