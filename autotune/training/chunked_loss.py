"""Has a causal model work out its head and its loss for a few positions at a time, so that its logits are never whole.

The logits of a row of 8,192 tokens and a vocabulary of 128,256 take 4.2 GB in fp32, their logarithms and gradients as
much again. Here they are made, used and dropped chunk by chunk, with the gradients of hidden states and head, which
the backward pass then only scales: as Liger's fused kernel and torch's `linear_cross_entropy` do (arXiv:2410.10989).
A script that `autotune export` writes has the same code.
"""

import functools
from typing import Any

import torch

# A row's chunks: eight, or more so that none has more positions than this; of a very long row so many at the most.
PARTS, POSITIONS, MOST = 8, 1024, 128


def chunk_loss(model: Any) -> Any:
    """Make a causal model compute its training loss in chunks; return it.

    Without gradients, as in an evaluation, there are logits as before.
    """
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
    return total / (shifted.ne(-100).sum() if count is None else count)


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
