"""What the classes of a model offer for several devices: units for FSDP2, a plan for tensor parallel.

A part of `model_facts`; a built model may be on the meta device.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedModel

_TAIL = "the head"  # a unit of several modules has no module of its own


def fsdp_conflict(model: PreTrainedModel) -> str | None:
    """Return why accelerate can't shard `model` by FSDP2, or None.

    It makes a unit of each layer of the classes in `_no_split_modules`, one of the input embedding, one of the head
    (with the embedding, if they are tied) and one of all the rest (`fsdp2_prepare_model` in accelerate 1.13 to 1.15).
    torch refuses a parameter that two units would own.
    """
    layers = set(getattr(model, "_no_split_modules", None) or ())
    missing = sorted(layers - {type(module).__name__ for module in model.modules()})
    if missing:
        return f"accelerate looks for its layers by the name {missing[0]}, which none has"
    try:
        own = _units_of_their_own(model)
    except NotImplementedError:  # which accelerate doesn't catch either
        return f"accelerate asks for its input embedding, which transformers doesn't know of {type(model).__name__}"
    owners: dict[int, tuple[object, str]] = {}
    for unit, module, path in _units(model, layers, own):
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            here = f"{path}.{name}".lstrip(".")
            owner, there = owners.setdefault(id(parameter), (unit, here))
            if owner is not unit:
                return f"{there} and {here} are one parameter, which two FSDP units would own"
    return None


def _units(model: PreTrainedModel, layers: set[str], own: dict[int, object]) -> Iterator[tuple[object, nn.Module, str]]:
    """Yield each module with its unit, and its path."""

    def walk(module: nn.Module, path: str, unit: object) -> Iterator[tuple[object, nn.Module, str]]:
        if id(module) in own:
            unit = own[id(module)]
        elif type(module).__name__ in layers:
            unit = module
        yield unit, module, path
        for name, child in module.named_children():
            yield from walk(child, f"{path}.{name}", unit)

    return walk(model, "", model)


def _units_of_their_own(model: PreTrainedModel) -> dict[int, object]:
    """Return the units of the input embedding and of the head, by the identity of their modules."""
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    tied = embedding is not None and getattr(head, "weight", None) is getattr(embedding, "weight", embedding)
    units: dict[int, object] = {}
    if embedding is not None:
        units[id(embedding)] = _TAIL if tied else embedding
    if head is not None:
        units[id(head)] = _TAIL
    return units


def tensor_parallel_heads(model: PreTrainedModel) -> int | None:
    """Return how many heads the class's plan can deal out to devices; None where it has no plan."""
    if not getattr(model, "_tp_plan", None):
        return None
    config = model.config.get_text_config()
    heads = getattr(config, "num_attention_heads", None)
    if not isinstance(heads, int):
        return None
    # Some configs have a list, one figure a layer.
    keys = getattr(config, "num_key_value_heads", None)
    return math.gcd(heads, keys) if isinstance(keys, int) and keys else heads
