"""Makes a model's loss that of the global batch, however the batch is split into micro-batches.

The Trainer counts the labels of all micro-batches of a step and expects the model to divide by the count
(`num_items_in_batch`). Heads that swallow it (T5, BART and BERT's classifiers among them, in transformers 5.23) give
gradients that are too large by the number of accumulation steps, heads that can't take it a mean of means, and a
router's loss is added once for each micro-batch. `normalize_loss` treats all alike: the mean over a micro-batch is
weighted by its share of the step's labels. CTC's loss is a sum by default, which is left alone.

`chunk_loss` has a causal model work out its head and its loss for a few positions at a time, with the gradients of
hidden states and head, which the backward pass then only scales: as Liger's fused kernel and torch's
`linear_cross_entropy` do (arXiv:2410.10989). Logits, their logarithms and their gradients are never whole.
"""

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
    base, peft = base_model(model), getattr(model, "active_peft_config", None)
    # With virtual tokens prepended the first real label has something before it that predicts it, and counts.
    prepends = peft is not None and peft.is_prompt_learning and peft.peft_type != "PREFIX_TUNING"
    # The Trainer is to leave out the first label of each row where, and only where, the model's loss does. It decides
    # by `loss_type`. GPT-2's and BERT's language heads have none and shift all the same, since they fall back to the
    # causal loss; BART's decoder alone has the causal one but computes a loss of its own, unshifted.
    if leaves_out_first_label(base) != (shifts := loss_shifts(base) and not prepends):
        base.loss_type = "ForCausalLM" if shifts else None
    if not getattr(base, "_autotune_normalized", False):
        # A subclass and not a hook or a patched method: it has no state, so copies of the model are right too, and it
        # can't be bypassed (peft before 0.21 calls `forward` itself, without hooks).
        base.__class__ = _normalized(base.__class__)
    return model


def leaves_out_first_label(model: Any, *, usual: str | None = None) -> bool:
    """Return whether a Trainer leaves out each row's first label; `usual` is the loss of a model that names none."""
    from transformers.loss.loss_utils import LOSS_MAPPING, ForCausalLMLoss

    base = base_model(model)
    is_causal = LOSS_MAPPING.get(getattr(base, "loss_type", None) or usual) is ForCausalLMLoss
    return is_causal and not getattr(getattr(base, "config", None), "is_encoder_decoder", False)


@functools.cache
def _normalized(cls: Any) -> Any:
    """Return `cls` under its own name, with a forward that scales the loss."""
    original = cls.forward

    @functools.wraps(original)  # the Trainer reads the signature
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        total = kwargs.pop("num_items_in_batch", None)
        output = original(self, *args, **kwargs)
        # CTC's sums over the recordings of a micro-batch simply add up over a step.
        is_sum = type(self).__name__.endswith("ForCTC") and self.config.ctc_loss_reduction == "sum"
        if total is None or kwargs.get("labels") is None or is_sum:
            return output
        labels = kwargs.get("shift_labels")
        if labels is None:
            labels = kwargs["labels"][..., 1:] if leaves_out_first_label(self) else kwargs["labels"]
        count = labels.ne(-100).sum()
        share = count / torch.as_tensor(total, device=count.device).clamp(min=1)
        loss = output[0] if isinstance(output, tuple) else output.get("loss")
        if loss is None:
            return output
        # The mean over no label at all is NaN; such a micro-batch adds nothing to the step.
        scaled = torch.where(count > 0, loss * share, 0.0)
        if isinstance(output, tuple):
            return (scaled, *output[1:])
        output["loss"] = scaled
        return output

    own = {
        "forward": forward,
        "accepts_loss_kwargs": True,  # the Trainer then counts the labels of the step and leaves the scale to us
        "_autotune_normalized": True,
        **{name: getattr(cls, name) for name in ("__module__", "__qualname__", "__doc__")},
    }
    return type(cls.__name__, (cls,), own)


def loss_shifts(model: Any) -> bool:
    """Return whether the model's loss leaves out the first label: it does where it is the library's causal loss."""
    names = inspect.unwrap(type(model).forward).__code__.co_names
    return "loss_function" in names and leaves_out_first_label(model, usual="ForCausalLM")


def base_model(model: Any) -> Any:
    """Return the model inside peft's wrapper, as the Trainer looks for it; the model itself if it has none."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


# A script that `autotune export` writes has all that follows.

# A row's chunks: eight, or more so that none has more positions than this; of a very long row so many at the most.
PARTS, POSITIONS, MOST = 8, 1024, 128


def chunk_loss(model: Any) -> Any:
    """Make a causal model compute its training loss in chunks; return it. In an evaluation logits are whole."""
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    head = base.get_output_embeddings()
    head.forward = functools.partial(_head, head)
    base.loss_function = functools.partial(_loss, head, base.loss_function)
    return model


def _head(head: Any, hidden: Any) -> Any:
    """Leave the hidden states to the loss while the model trains."""
    return hidden if head.training and torch.is_grad_enabled() else type(head).forward(head, hidden)


def _loss(head: Any, original: Any, logits: Any, labels: Any, *args: Any, **kwargs: Any) -> Any:
    """Return the mean over the labels, or their sum divided by `num_items_in_batch`."""
    if not (head.training and torch.is_grad_enabled()):
        return original(logits, labels, *args, **kwargs)
    shifted, count = kwargs.get("shift_labels"), kwargs.get("num_items_in_batch")
    if shifted is None:
        shifted = torch.nn.functional.pad(labels[..., 1:], (0, 1), value=-100)
    total = _Chunked.apply(logits, shifted, head.weight, head.bias)  # type: ignore[no-untyped-call]
    return total / (shifted.ne(-100).sum().clamp(min=1) if count is None else count)  # without a label the sum is 0


class _Chunked(torch.autograd.Function):
    """The summed cross-entropy of hidden states (batch, length, width) and labels (batch, length)."""

    @staticmethod
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def forward(ctx: Any, hidden: Any, labels: Any, weight: Any, bias: Any) -> Any:
        """Return the sum; its gradients are kept."""
        length, total = hidden.shape[1], torch.zeros((), device=hidden.device)
        chunk = max(min(POSITIONS, -(-length // PARTS)), -(-length // MOST))
        trained = [tensor for tensor in (weight, bias) if tensor is not None and tensor.requires_grad]
        of_hidden, sums = torch.empty_like(hidden), [torch.zeros_like(tensor) for tensor in trained]
        for start in range(0, length, chunk):
            part = hidden[:, start : start + chunk].detach().requires_grad_()
            with torch.enable_grad():
                logits = torch.nn.functional.linear(part, weight, bias).float().flatten(0, 1)
                targets = labels[:, start : start + chunk].flatten()
                loss = torch.nn.functional.cross_entropy(logits, targets, reduction="sum")
            of_part, *found = torch.autograd.grad(loss, [part, *trained])
            of_hidden[:, start : start + chunk] = of_part
            for whole, of_chunk in zip(sums, found, strict=True):
                whole.add_(of_chunk)
            total += loss.detach()
            del logits, loss, of_part, found
        ctx.gradients = [of_hidden, *sums]
        return total

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        """Return the gradients, which are scaled in place."""
        kept, ctx.gradients = iter(ctx.gradients), None
        return tuple(next(kept).mul_(gradient) if needed else None for needed in ctx.needs_input_grad)
