"""Memory that one operator takes of a CUDA device's allocator and gives back before it ends.

A trace sees results alone. Of the operators that transformers train with, those below take more; found by running them
one by one on torch's real allocator, and read in their sources. Called by `tape`.
"""

from __future__ import annotations

from typing import Any

import torch

# `EmbeddingBackwardKernel.cu`: rows of gradients that are summed up at a time.
_ROWS_PER_PART = 10


def scratch_bytes(name: str, args: Any, out: Any) -> int:
    """Return the bytes that an operator takes beside its inputs and results."""
    rule = _RULES.get(name)
    return 0 if rule is None else rule(args, out)


def _softmax_backward(args: Any, out: Any) -> int:
    """`softmax_backward_cuda_out` in SoftMax.cu multiplies gradient and output first; the logarithm's doesn't."""
    return _nbytes(args[0])


def _safe_softmax(args: Any, out: Any) -> int:
    """`_safe_softmax` in SoftMax.cpp looks for rows without any key: a byte a score."""
    return int(args[0].numel())


def _embedding_backward(args: Any, out: Any) -> int:
    """`embedding_backward_cuda_kernel`: partial sums in fp32, one for each token and each ten tokens of a batch.

    Rows of tokens are sorted first, which takes three numbers each. Up to 3,072 tokens another kernel is taken, without
    any of it, which is left out: what is traced is a batch of two.
    """
    gradient, indices, rows = args[0], args[1], int(args[2])
    tokens, width = int(indices.numel()), int(gradient.shape[-1])
    segments = min(tokens, rows)
    parts = tokens // _ROWS_PER_PART + segments
    sums = 4 * parts * (-(-width // 32) * 32)
    sorting = int(indices.element_size()) * (3 * tokens + 2 * segments + parts)
    return sums + sorting + (0 if gradient.is_contiguous() else _nbytes(gradient))


_RULES = {
    "_softmax_backward_data": _softmax_backward,
    "_safe_softmax": _safe_softmax,
    "embedding_dense_backward": _embedding_backward,
}


def _nbytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()
