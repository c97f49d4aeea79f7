"""Checks that the adapter that was asked for is the one that is trained, on weights packed as was asked for.

A part of `effects`.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch import nn

from autotune.errors import NoEffectError
from autotune.training.adapters import BITFIT, CLASSIFICATION_HEADS, adapter_arguments
from autotune.training.random_weights import quantization_of, quantized_layers
from autotune.values.adapters import is_new_weight
from autotune.values.config import TrainConfig

# What of an adapter's arguments peft resolves to names of its own.
_RESOLVED = ("target_modules", "target_parameters", "feedforward_modules")


def adapter(config: TrainConfig, model: nn.Module) -> str:
    """Return what is trained.

    Raises:
        NoEffectError: It isn't what was asked for.
    """
    sizes = [(name, p.numel()) for name, p in model.named_parameters() if p.requires_grad]
    trained, total = sum(size for _, size in sizes), sum(p.numel() for p in model.parameters())
    new = sum(size for name, size in sizes if is_new_weight(name))
    if config.adapter is None:
        if new:
            raise NoEffectError(f"no adapter was asked for, but {new} parameters of adapters are trained")
        return f"none, {trained} parameters trained"
    kind = config.adapter.kind
    arguments = adapter_arguments(config.adapter)
    if arguments["peft_type"] == BITFIT:
        return f"{kind}, {_trained_biases(model)} biases among {trained} parameters trained"
    if trained == total:
        raise NoEffectError(f"{kind} was asked for, but {trained} of {total} parameters are trained")
    if not new:
        raise NoEffectError(f"{kind} was asked for, but no adapter is trained")
    _check_kind(kind, arguments, model)
    return f"{kind}, {trained} of {total} parameters trained"


def _check_kind(kind: str, arguments: dict[str, Any], model: Any) -> None:
    """Raise NoEffectError unless peft's own config has all that was asked for."""
    actual = model.active_peft_config
    for name, wanted in arguments.items():
        if name not in _RESOLVED and getattr(actual, name) != wanted:
            raise NoEffectError(f"{kind} was asked for, but {name} is {getattr(actual, name)}, not {wanted}")


def _trained_biases(model: nn.Module) -> int:
    """Return how many biases are trained, and nothing else but the head of a classifier."""
    trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    biases = [p.numel() for name, p in trained if name.endswith("bias")]
    others = [n for n, _ in trained if not n.endswith("bias") and n.split(".")[0] not in CLASSIFICATION_HEADS]
    if others or not biases:
        raise NoEffectError(f"bitfit was asked for, but {others[0] if others else 'nothing'} is trained")
    return sum(biases)


def quantization(config: TrainConfig, model: nn.Module) -> str:
    """Return how base weights are packed.

    Raises:
        NoEffectError: It isn't what was asked for.
    """
    wanted = config.quantization
    layers = Counter(quantization_of(layer) for _, layer in quantized_layers(model))
    if wanted is None:
        if layers:
            raise NoEffectError(f"no quantized weights were asked for, but those of layers are {next(iter(layers))}")
        return "none"
    if set(layers) != {wanted}:
        raise NoEffectError(f"{wanted} weights were asked for, but they are {'/'.join(layers) or 'not quantized'}")
    loose = [n for n, layer in quantized_layers(model) if layer.weight.dtype not in (torch.uint8, torch.int8)]
    if loose:
        raise NoEffectError(f"{wanted} weights were asked for, but those of {loose[0]} are not packed")
    return f"{wanted} in {layers[wanted]} layers"
