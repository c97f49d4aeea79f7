"""The head that TRL puts on a decoder: log-probabilities of the next tokens without the logits of all of them.

As `ChunkedLogProbFunction` of TRL 1.16 (trl/kernels/chunked_logprob.py): products of tiles of 4,096 tokens and 32,768
words, once more in the backward pass, whose gradients are added up in fp32. On CUDA a kernel folds a tile in place, and
only completions are scored; on the CPU torch's operators make further tensors of a tile's size, for all tokens.

A tile of fewer tokens grows with the micro-batch, and is taken to go on growing: of micro-batches beyond 4,096 tokens
whose traced ones, of at most four samples, were within them, a tile is overestimated.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from autotune.cost.profile import NORMALISATION
from autotune.cost.tape import Recorder

_TOKENS, _WORDS = 4096, 32768  # TOKEN_CHUNK_SIZE, and _CHUNKED_LOGPROB_CHUNK_SIZE of trl/trainer/utils.py
_STATISTICS = 7  # fp32 numbers of a token


@contextlib.contextmanager
def log_probs_head(model: Any, recorder: Recorder, *, on_cuda: bool, dtype: torch.dtype, scored: int) -> Iterator[None]:
    """Have a decoder return `loss`, the mean of its log-probabilities, and never its logits.

    Args:
        model: A causal language model, or one of peft with an adapter.
        recorder: Writes down the products.
        on_cuda: Whether the device has Triton.
        dtype: Of the products.
        scored: Tokens of a row whose log-probabilities count.
    """
    base = model.get_base_model() if hasattr(model, "get_base_model") else model

    def forward(labels: Any = None, **inputs: Any) -> dict[str, torch.Tensor]:
        hidden = base.base_model(**inputs).last_hidden_state[:, :-1]
        rows, length, width = hidden.shape
        if on_cuda:
            positions = torch.arange(rows * length, device=hidden.device)[: rows * min(scored, length)]
            hidden = hidden[positions // length, positions % length]
        else:
            hidden = hidden.reshape(-1, width)
        head = base.get_output_embeddings()
        log_probs = _LogProbs.apply(hidden, head.weight, _Head(recorder, on_cuda, dtype))  # type: ignore[no-untyped-call]
        return {"loss": -log_probs.sum() / log_probs.numel()}

    base.forward = forward
    try:
        yield
    finally:
        del base.forward


@dataclass(frozen=True)
class _Head:
    recorder: Recorder
    on_cuda: bool
    dtype: torch.dtype

    def tiles(self, hidden: torch.Tensor, weight: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield products of hidden states with a part of the vocabulary, in one buffer, and that part."""
        tokens, words = min(len(hidden), _TOKENS), min(len(weight), _WORDS)
        wide = _WORDS if self.on_cuda else words  # pages of a CPU's buffer that nothing is written to aren't there
        buffer = hidden.new_empty((tokens, wide), dtype=self.dtype)
        rows = hidden[:tokens].to(self.dtype)
        for start in range(0, len(weight), words):
            part = weight[start : start + words].to(self.dtype)
            tile = buffer[:, : len(part)]
            self.product("mm", hidden, part, rows, tile)
            yield tile, part

    def product(self, name: str, hidden: torch.Tensor, part: torch.Tensor, *tensors: torch.Tensor) -> None:
        """Write down a product of all hidden states with a part of the vocabulary."""
        self.recorder.note_kernel(name, 2.0 * hidden.numel() * len(part), *tensors, part)


class _LogProbs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, weight: torch.Tensor, head: _Head) -> torch.Tensor:
        statistics = hidden.new_empty((_STATISTICS, len(hidden)), dtype=torch.float32)
        for tile, _ in head.tiles(hidden, weight):
            if head.on_cuda:
                head.recorder.note_kernel("log_probs", 0.0, tile, kind=NORMALISATION)
                continue
            z = tile.float() * 1.0 * 1.0
            exponents = torch.exp(z - 1.0)
            statistics[0, : len(z)] += exponents.sum(-1)
            statistics[1, : len(z)] += (exponents * z).sum(-1)
            del z, exponents
        normaliser, result = statistics[0] + 1.0, statistics[0] - 1.0
        ctx.save_for_backward(hidden, weight, normaliser)
        ctx.head = head
        return result

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        (hidden, weight, _), head = ctx.saved_tensors, ctx.head
        of_hidden = torch.zeros_like(hidden, dtype=torch.float32) if ctx.needs_input_grad[0] else None
        of_weight = torch.zeros_like(weight, dtype=torch.float32) if ctx.needs_input_grad[1] else None
        head.recorder.recomputing = True
        for tile, part in head.tiles(hidden, weight):
            head.recorder.recomputing = False
            if head.on_cuda:
                head.recorder.note_kernel("log_probs_backward", 0.0, tile, kind=NORMALISATION)
            else:
                _fold_backward(tile)
            for name, needed in (("addmm", of_hidden), ("addmm", of_weight)):
                if needed is not None:
                    halves = () if head.on_cuda else (tile.float(), part.float())
                    head.product(name, hidden, part, tile, needed)
                    del halves
            head.recorder.recomputing = True
        head.recorder.recomputing = False
        return (
            None if of_hidden is None else of_hidden.to(hidden.dtype),
            None if of_weight is None else of_weight.to(weight.dtype),
            None,
        )


def _fold_backward(tile: torch.Tensor) -> None:
    """Run the operators that make the gradient of a tile on the CPU: `_backward_tile`."""
    y = tile.float() * 1.0
    z = y * 1.0
    log_p = z - 1.0
    p = torch.exp(log_p)
    gradient = torch.zeros_like(z)
    is_target = torch.arange(tile.shape[1], device=z.device) == z.new_empty((len(z), 1))
    gradient += 1.0 * (is_target.float() - p)
    gradient = gradient * 1.0
    tile.copy_(gradient * 1.0)
