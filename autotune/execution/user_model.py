"""The model that a user's own code has made, in the words of the cost model: its weights, its adapter, how it is packed."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from typing import Any, cast

from torch import nn

from autotune.training.build import frozen_paths
from autotune.training.random_weights import quantization_of, quantized_layers
from autotune.values.adapters import OwnAdapter, is_new_weight
from autotune.values.config import Quantization

# Of peft's arguments those that say where an adapter came from, or how its values begin.
_NOT_THE_STEP = frozenset(
    {
        "auto_mapping", "base_model_name_or_path", "corda_config", "eva_config", "inference_mode", "init_lora_weights",
        "init_weights", "loftq_config", "peft_type", "peft_version", "revision",
    }
)  # fmt: skip


def weights_of(model: nn.Module) -> str:
    """Return the dtype of most weights, of packed layers and adapters apart."""
    sizes: Counter[str] = Counter()
    packed = {id(layer.weight) for _, layer in quantized_layers(model)}
    for parameter in _without_adapter(model):
        if id(parameter) not in packed:
            sizes[str(parameter.dtype).removeprefix("torch.")] += parameter.numel()
    return sizes.most_common(1)[0][0] if sizes else "float32"


def counts_of(model: nn.Module) -> dict[str, int]:
    """Return the numbers of parameters and of those that aren't trained, an adapter's left out."""
    sizes = [(_elements(p), p.requires_grad) for p in _without_adapter(model)]
    return {
        "parameters": sum(size for size, _ in sizes),
        "frozen_parameters": sum(size for size, trained in sizes if not trained),
    }


def is_packed(base: Any) -> bool:
    """Return whether the weights of a model of transformers were quantized when it was loaded."""
    return getattr(base, "quantization_method", None) is not None


def quantization(base: Any) -> Quantization | None:
    """Return the format of the packed weights; None: they aren't, or not by bitsandbytes."""
    if not is_packed(base):
        return None
    return cast(Quantization, quantization_of(found[0][1])) if (found := list(quantized_layers(base))) else None


def adapter(model: Any) -> OwnAdapter | None:
    """Return the one adapter of a model; None if there is none, or if it can't be told as JSON."""
    configs = list((getattr(model, "peft_config", None) or {}).values())
    if len(configs) != 1:
        return None
    usual = type(configs[0])()
    given = {name: _plain(value) for name, value in vars(configs[0]).items() if name not in _NOT_THE_STEP}
    arguments = {name: value for name, value in given.items() if value != _plain(getattr(usual, name, None))}
    try:
        return OwnAdapter(
            arguments=json.dumps({"peft_type": _plain(configs[0].peft_type), **arguments}, sort_keys=True)
        )
    except TypeError:
        return None


def frozen(model: Any, base: Any) -> tuple[str, ...]:
    """Return what the code doesn't train, as `ModelSpec.frozen` has it; with an adapter that is the adapter's to say."""
    return () if hasattr(model, "peft_config") else frozen_paths(base)


def not_traced(model: Any, base: Any) -> str | None:
    """Return why a trace wouldn't be of this model, None if it would."""
    if hasattr(model, "peft_config"):
        if adapter(model) is None:
            return "the model has several adapters, or one that can't be written down"
        if any(p.requires_grad for p in _without_adapter(model)):
            return "weights are trained beside those of the adapter"
    if is_packed(base):
        if quantization(base) is None:
            return "the model has packed weights that aren't those of bitsandbytes"
        if not hasattr(model, "peft_config"):
            return "the model has packed weights and no adapter"
    return None


def _without_adapter(model: nn.Module) -> Iterator[nn.Parameter]:
    return (parameter for name, parameter in model.named_parameters() if not is_new_weight(name))


def _elements(parameter: Any) -> int:
    """Return the number of a parameter's elements, which bitsandbytes packs two into a byte."""
    packed = getattr(parameter, "quant_state", None)
    return int(parameter.numel() if packed is None else packed.shape.numel())


def _plain(value: Any) -> Any:
    """Return a value as JSON has it: a set as a list, in place of an enumeration's member its value."""
    return sorted(value) if isinstance(value, set) else getattr(value, "value", value)
