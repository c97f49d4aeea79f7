"""The model that a user's own code has made: what it is, for the cost model, and how it becomes a configuration's."""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from collections.abc import Iterator
from typing import Any, cast

import torch
from torch import nn
from transformers import PreTrainedModel

from autotune.training.adapters import put_on
from autotune.training.arguments import TrainingPlan
from autotune.training.build import frozen_paths
from autotune.training.loss import base_model, normalize_loss
from autotune.training.random_weights import quantization_of, quantized_layers
from autotune.values.adapters import OwnAdapter, is_new_weight
from autotune.values.config import Quantization
from autotune.values.workload import OwnCode

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
    counts = {"parameters": 0, "frozen_parameters": 0}
    for parameter in _without_adapter(model):
        packed = getattr(parameter, "quant_state", None)  # bitsandbytes packs two elements into a byte
        size = int(parameter.numel() if packed is None else packed.shape.numel())
        counts["parameters"] += size
        counts["frozen_parameters"] += 0 if parameter.requires_grad else size
    return counts


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
    names = {field.name for field in dataclasses.fields(configs[0]) if field.init} - _NOT_THE_STEP
    given = {name: _plain(getattr(configs[0], name)) for name in sorted(names)}
    try:
        usual = type(configs[0])()
        arguments = {name: value for name, value in given.items() if value != _plain(getattr(usual, name, None))}
        return OwnAdapter(arguments=json.dumps({"peft_type": _plain(configs[0].peft_type), **arguments}))
    except (TypeError, ValueError):  # no JSON, or an adapter that has no defaults (AdaLoRA)
        return None


def frozen(model: Any, base: Any) -> tuple[str, ...]:
    """Return what the code doesn't train, as `ModelSpec.frozen` has it; with an adapter it is the adapter's to say."""
    return () if hasattr(model, "peft_config") else frozen_paths(base)


def checkpointing(base: Any, arguments: dict[str, Any]) -> dict[str, Any]:
    """Return what TrainingArguments would have to say of checkpointing that a model has on without their asking."""
    names = [name for name in ("activation_checkpointing", "gradient_checkpointing") if name in arguments]
    on = [module for module in base.modules() if getattr(module, "gradient_checkpointing", False)]
    if not on or not isinstance(base, PreTrainedModel) or any(arguments[name] for name in names):
        return {}
    options = getattr(getattr(on[0], "_gradient_checkpointing_func", None), "keywords", {})
    return {names[0]: True, f"{names[0]}_kwargs": {n: v for n, v in options.items() if n == "use_reentrant"}}


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


def fitted(model: Any, mapping: TrainingPlan, code: OwnCode) -> Any:
    """Return a model that a user's own code has made as a configuration has it.

    Its kernels, precision, adapter and loss are set, but for knobs that the code has set itself. Checkpointing that the
    code has switched on is switched off where the arguments don't ask for it; where they do, the Trainer switches it on
    as they say. Raises ValueError if the adapter finds nothing in the model that it could be put on.
    """
    wanted, adapter = mapping.model, mapping.adapter
    asked = (mapping.tuned.get(name) for name in ("activation_checkpointing", "gradient_checkpointing"))
    if code.checkpoints and not any(asked):
        base_model(model)._set_gradient_checkpointing(enable=False)
    for name in ("attn_implementation", "experts_implementation"):
        is_ours = name in wanted and name not in code.held and hasattr(model, f"set_{name}")
        if is_ours and getattr(model.config, f"_{name}", None) != wanted[name]:
            getattr(model, f"set_{name}")(wanted[name])
    if wanted.get("dtype") == "bfloat16" and "precision" not in code.held:
        for parameter in model.parameters():  # buffers, such as the frequencies of rotary positions, stay as they are
            if parameter.dtype is torch.float32:
                parameter.data = parameter.data.to(torch.bfloat16)
    if adapter is not None and not hasattr(model, "peft_config"):  # code may make several Trainers of a model
        model = put_on(model, adapter)
    return normalize_loss(model) if code.normalizes else model


def _without_adapter(model: nn.Module) -> Iterator[nn.Parameter]:
    return (parameter for name, parameter in model.named_parameters() if not is_new_weight(name))


def _plain(value: Any) -> Any:
    """Return a value as JSON has it: a set as a list, in place of an enumeration's member its value."""
    return sorted(value) if isinstance(value, set) else getattr(value, "value", value)
