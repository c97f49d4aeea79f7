"""Matrices shared among devices: a model of random weights made what `from_pretrained` makes with `distributed_config`.

`from_config` doesn't know the argument. The library's own steps are taken in its order: the mesh of devices, the plan
of the model's class, the weights of this rank (transformers 5.23, `PreTrainedModel.from_pretrained`). Called by
`models`; every rank has to call it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedModel

# The transformers whose `DistributedConfig` this is; it grew its degrees over several versions.
SINCE = (5, 23)


def share_matrices(model: PreTrainedModel, degrees: dict[str, Any]) -> PreTrainedModel:
    """Return `model` with this rank's part of its weights, on this rank's device.

    Args:
        model: Whole, anywhere, where its weights are to be kept; or on the meta device, where new ones are drawn.
        degrees: Keyword arguments of transformers' `DistributedConfig`.

    Raises:
        ValueError: The class has no plan.
    """
    made = not any(parameter.is_meta for parameter in model.parameters())
    config, device, mesh = type(model).prepare_distribute_model(dict(degrees))
    model = type(model).maybe_distribute_model(model, config, mesh)
    if made:
        model.tie_weights()
        _move_the_rest(model, device)
    else:
        _draw(model, device)
    _make_alike(model)
    return model


def _draw(model: PreTrainedModel, device: Any) -> None:
    """Give a model on the meta device random weights, each rank its own part."""
    import torch

    model._move_missing_keys_from_meta_to_device(set(model.state_dict()), {"": torch.device(device)}, None, None)
    model.tie_weights()
    with torch.no_grad():
        model.initialize_weights()


def _move_the_rest(model: nn.Module, device: Any) -> None:
    """Put on `device` what the plan doesn't name; what it does is there."""
    from torch.distributed.tensor import DTensor

    for parameter in model.parameters():
        if not isinstance(parameter.data, DTensor):
            parameter.data = parameter.data.to(device)
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            module._buffers[name] = buffer.to(device)


def _make_alike(model: nn.Module) -> None:
    """Give what isn't split the values of the first rank: each has drawn its own."""
    import torch
    from torch import distributed
    from torch.distributed.tensor import DTensor

    with torch.no_grad():
        for parameter in model.parameters():
            if not isinstance(parameter.data, DTensor):
                distributed.broadcast(parameter.data, src=0)
