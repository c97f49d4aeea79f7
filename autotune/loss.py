"""Makes a model's loss that of the global batch, however the batch is split into micro-batches.

transformers' Trainer counts the labels of all micro-batches of a step and hands the count to every `forward` that
takes keyword arguments (`num_items_in_batch`), expecting the model to divide by it. Heads that swallow the count (T5,
BART and BERT's classifiers among them, in transformers 5.23) then give a loss and gradients that are too large by the
number of accumulation steps; heads that can't take it give a mean of means, which is off when lengths vary; and a
router's loss is added once for each micro-batch. `normalize_loss` treats every head alike: the model computes the mean
over its own micro-batch, and that mean is weighted by the micro-batch's share of the labels.

Called by the trial's worker and by whoever trains with an exported configuration.
"""

from __future__ import annotations

from typing import Any, TypeVar

import torch
from torch import nn

Model = TypeVar("Model", bound=nn.Module)


def normalize_loss(model: Model) -> Model:
    """Make `model` return, for each micro-batch, its share of the loss of the whole step; return `model`.

    Call it once, on the model or on its peft wrapper, before handing it to a `transformers.Trainer`. Outside a Trainer
    (no `num_items_in_batch`) the model's loss stays as it was. A second call changes nothing.
    """
    base = _base_model(model)
    if getattr(base, "_autotune_normalized", False):
        return model
    base._autotune_normalized = True
    base.accepts_loss_kwargs = True  # the Trainer then counts the labels of the step and leaves the scale to us
    scale = _LossShare(_shifts_labels(base))
    base.register_forward_pre_hook(scale.before, with_kwargs=True)
    base.register_forward_hook(scale.after, with_kwargs=True)
    return model


class _LossShare:
    """The pair of hooks around one model's forward."""

    def __init__(self, shifts_labels: bool) -> None:
        self._shifts_labels = shifts_labels
        self._share: torch.Tensor | float | None = None

    def before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        """Take the step's count out of the arguments and remember this micro-batch's share of it."""
        total = kwargs.pop("num_items_in_batch", None)
        labels = kwargs.get("labels")
        self._share = None
        if total is not None and labels is not None:
            counted = labels[..., 1:] if self._shifts_labels else labels
            self._share = counted.ne(-100).sum() / total
        return args, kwargs

    def after(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        """Scale the loss by the share."""
        share, self._share = self._share, None
        if share is None:
            return output
        if isinstance(output, tuple):
            return (output[0] * share, *output[1:])
        if output.get("loss") is not None:
            output["loss"] = output["loss"] * share
        return output


def _base_model(model: nn.Module) -> Any:
    """Return the transformers model inside peft's wrapper, as the Trainer looks for it."""
    get_base_model = getattr(model, "get_base_model", None)
    return get_base_model() if get_base_model is not None else model


def _shifts_labels(model: Any) -> bool:
    """Return whether the loss ignores the first label of a row, by the rule that the Trainer counts by."""
    from transformers.loss.loss_utils import LOSS_MAPPING, ForCausalLMLoss

    shifts = LOSS_MAPPING.get(getattr(model, "loss_type", None)) is ForCausalLMLoss
    return shifts and not getattr(getattr(model, "config", None), "is_encoder_decoder", False)
