"""One device's part of a model under tensor parallelism, by the plan that transformers has for the model's class.

The plan names a style for modules and parameters (transformers 5.24, `distributed/tensor_parallel.py`). A device keeps
its slice of each matrix that is split, and the modules run on slices as they do there. Two styles put results together
again, which takes memory: the whole of a gathered output, and the ids of tokens that a device's rows of a table hold.
Sums over devices change no size.
"""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import nn

from autotune.errors import InputError

_GATHERED = ("colwise_gather_output", "colwise_rep", "embedding_colwise")
_SPLIT_INPUT = ("rowwise_split_input", "rowwise_rep")
_NUMBER = re.compile(r"\.\d+(?=\.|$)")


def keep_part(model: Any, degree: int) -> None:
    """Leave the first of `degree` devices' part of each matrix in a model.

    Raises:
        InputError: The class has no plan, or the degree doesn't divide the heads.
    """
    plan: dict[str, str] = getattr(model, "tp_plan", None) or {}
    config = model.config.get_text_config()
    if not plan:
        raise InputError(f"tensor parallel {degree}: transformers has no plan for {config.model_type}")
    for name in ("num_attention_heads", "num_key_value_heads"):
        heads = getattr(config, name, None)
        if isinstance(heads, int) and heads % degree:
            raise InputError(f"tensor parallel {degree}: does not divide {name} = {heads}")
    kept: dict[int, nn.Parameter] = {}  # by the whole parameter: what is tied stays so
    for name, module in model.named_modules():
        style = plan.get(_NUMBER.sub(".*", name), "")
        for own, parameter in module.named_parameters(recurse=False):
            if id(parameter) not in kept:
                split = _dimension(plan.get(_NUMBER.sub(".*", f"{name}.{own}"), style), own, parameter.ndim)
                kept[id(parameter)] = parameter if split is None else _slice(parameter, split, degree)
            module._parameters[own] = kept[id(parameter)]
        _run_on_part(module, style, degree)


def _dimension(style: str, name: str, dimensions: int) -> int | None:
    """Return which dimension of a parameter a style splits, None for none."""
    if style.startswith(("colwise", "packed_colwise")):
        return max(dimensions - 2, 0)
    if style.startswith("rowwise"):
        return None if name == "bias" else -1
    if style == "packed_rowwise":
        return None if dimensions == 1 else -1
    return {"embedding_rowwise": 0, "embedding_colwise": 1}.get(style)


def _slice(parameter: nn.Parameter, dimension: int, degree: int) -> nn.Parameter:
    part = parameter.detach().chunk(degree, dimension)[0].clone(memory_format=torch.contiguous_format)
    return nn.Parameter(part, requires_grad=parameter.requires_grad)


def _run_on_part(module: Any, style: str, degree: int) -> None:
    if style == "embedding_rowwise":  # ids of other devices' rows are masked
        rows = module.weight.shape[0]
        module.padding_idx = None
        module.register_forward_pre_hook(lambda _, given: (given[0].remainder(rows), *given[1:]))
    elif style in _SPLIT_INPUT:
        module.register_forward_pre_hook(lambda _, given: (given[0].chunk(degree, -1)[0].clone(), *given[1:]))
    elif style in _GATHERED:
        width = getattr(module, "out_features", None) or module.embedding_dim
        module.register_forward_hook(lambda _, __, out: _Gather.apply(out, degree, width))  # type: ignore[no-untyped-call]


class _Gather(torch.autograd.Function):
    """Puts the devices' slices of the last dimension together: an all-gather, whose pieces are then joined."""

    @staticmethod
    def forward(ctx: Any, part: torch.Tensor, degree: int, width: int) -> torch.Tensor:
        ctx.width = part.shape[-1]
        pieces = part.new_empty((degree * part.shape[0], *part.shape[1:]))
        return torch.cat(pieces.chunk(degree), -1)[..., :width]

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return gradient[..., : ctx.width].clone(memory_format=torch.contiguous_format), None, None
