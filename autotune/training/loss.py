"""Makes a model's loss that of the global batch, however the batch is split into micro-batches.

transformers' Trainer counts the labels of all micro-batches of a step and hands the count to every `forward` that
takes keyword arguments (`num_items_in_batch`), expecting the model to divide by it. Heads that swallow the count (T5,
BART and BERT's classifiers among them, in transformers 5.23) then give a loss and gradients that are too large by the
number of accumulation steps; heads that can't take it give a mean of means, which is off when lengths vary; and a
router's loss is added once for each micro-batch. `normalize_loss` treats every head alike: the model computes the mean
over its own micro-batch, and that mean is weighted by the micro-batch's share of the step's labels.

CTC's loss is by default a sum over the recordings, which is left alone. If it is a mean over recordings, it is weighted
by labels all the same, which is exact where transcripts are equally long.

What depends on the whole micro-batch by its nature stays so: batch norm, and the balance of a router's loss.
"""

from __future__ import annotations

import functools
import inspect
from typing import Any, TypeVar

import torch
from torch import nn

Model = TypeVar("Model", bound=nn.Module)


def normalize_loss(model: Model) -> Model:
    """Make `model` return, for each micro-batch, its share of the loss of the whole step; return `model`.

    Call it on the model or on its peft wrapper, before handing it to a `transformers.Trainer`. Outside a Trainer (no
    `num_items_in_batch`) the model's loss stays as it was. A second call changes nothing.
    """
    base = base_model(model)
    _align_count(base, prepended=_prepends_labels(model))
    if not getattr(base, "_autotune_normalized", False):
        # A subclass and not a hook or a patched method: it has no state, so copies of the model are right too, and it
        # can't be bypassed (peft before 0.21 calls `forward` itself, without hooks).
        base.__class__ = _normalized(base.__class__)
    return model


def leaves_out_first_label(model: nn.Module) -> bool:
    """Return whether a Trainer made of `model` leaves the first label of each row out of its count."""
    return _trainer_shifts(base_model(model))


@functools.cache
def _normalized(cls: Any) -> Any:
    """Return `cls` under its own name, with a forward that scales the loss."""
    original = cls.forward

    @functools.wraps(original)  # the Trainer reads the signature
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        total = kwargs.pop("num_items_in_batch", None)
        output = original(self, *args, **kwargs)
        if total is None or kwargs.get("labels") is None or _is_sum(self):
            return output
        return _scaled(output, _counted_labels(self, kwargs), total)

    own = {
        "forward": forward,
        "accepts_loss_kwargs": True,  # the Trainer then counts the labels of the step and leaves the scale to us
        "_autotune_normalized": True,
        **{name: getattr(cls, name) for name in ("__module__", "__qualname__", "__doc__")},
    }
    return type(cls.__name__, (cls,), own)


def _scaled(output: Any, labels: torch.Tensor, total: torch.Tensor | int) -> Any:
    """Return a forward's output with its loss weighted by the share that `labels` are of `total`."""
    count = labels.ne(-100).sum()
    share = count / torch.as_tensor(total, device=count.device).clamp(min=1)

    def scale(loss: torch.Tensor) -> torch.Tensor:
        # The mean over no label at all is NaN; such a micro-batch adds nothing to the step.
        return torch.where(count > 0, loss * share, 0.0)

    if isinstance(output, tuple):
        return (scale(output[0]), *output[1:])
    if output.get("loss") is not None:
        output["loss"] = scale(output["loss"])
    return output


def _is_sum(model: Any) -> bool:
    """Return whether the loss is a sum over the recordings of a micro-batch: those of a step simply add up."""
    return type(model).__name__.endswith("ForCTC") and model.config.ctc_loss_reduction == "sum"


def _counted_labels(model: Any, kwargs: dict[str, Any]) -> torch.Tensor:
    """Return the labels that the loss is a mean over, by the rule that the Trainer counts the step's by."""
    if kwargs.get("shift_labels") is not None:
        return kwargs["shift_labels"]  # type: ignore[no-any-return]
    labels: torch.Tensor = kwargs["labels"]
    return labels[..., 1:] if _trainer_shifts(model) else labels


def _align_count(model: Any, *, prepended: bool) -> None:
    """Have the Trainer leave out the first label of each row where, and only where, the model's loss does.

    With virtual tokens `prepended` the first real label has something before it that predicts it, and counts. The
    Trainer decides by `loss_type`. GPT-2's and BERT's language heads have none and shift all the same, since they fall
    back to the causal loss; BART's decoder alone has the causal one but computes a loss of its own, unshifted.
    """
    if _trainer_shifts(model) != (shifts := loss_shifts(model) and not prepended):
        model.loss_type = "ForCausalLM" if shifts else None


def _trainer_shifts(model: Any) -> bool:
    """Return whether the Trainer leaves out the first label of each row."""
    return _is_causal(getattr(model, "loss_type", None)) and not _is_encoder_decoder(model)


def loss_shifts(model: Any) -> bool:
    """Return whether the model's loss leaves out the first label: it does where it is the library's causal loss."""
    loss_type = getattr(model, "loss_type", None)
    names = inspect.unwrap(type(model).forward).__code__.co_names
    return "loss_function" in names and _is_causal(loss_type or "ForCausalLM") and not _is_encoder_decoder(model)


def _prepends_labels(model: Any) -> bool:
    """Return whether peft's wrapper puts virtual tokens, and labels that don't count, before those it is given."""
    config = getattr(model, "active_peft_config", None)
    return config is not None and config.is_prompt_learning and config.peft_type != "PREFIX_TUNING"


def _is_causal(loss_type: str | None) -> bool:
    from transformers.loss.loss_utils import LOSS_MAPPING, ForCausalLMLoss

    return loss_type is not None and LOSS_MAPPING.get(loss_type) is ForCausalLMLoss


def _is_encoder_decoder(model: Any) -> bool:
    return bool(getattr(getattr(model, "config", None), "is_encoder_decoder", False))


def base_model(model: Any) -> Any:
    """Return the model inside peft's wrapper, as the Trainer looks for it; the model itself if it has none."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model
