"""The model as it is traced: its config, the kind of its tensors, its quantized layers and its adapter.

Under tensor parallelism it is one device's part, by the plan that transformers has for the model's class. The plan
names a style for modules and parameters (transformers 5.24, `distributed/tensor_parallel.py`). A device keeps its slice
of each matrix that is split, and the modules run on slices as they do there. Two styles put results together again,
which takes memory: the whole of a gathered output, and the ids of tokens that a device's rows of a table hold. Sums
over devices change no size.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from autotune.cost import quantized
from autotune.cost.family import Family, Shape
from autotune.errors import InputError, one_line
from autotune.training.arguments import routing_fields
from autotune.training.loss import chunk_loss
from autotune.values.estimate import TracedBy
from autotune.values.model import ModelSpec

_NUMBER = re.compile(r"\.\d+(?=\.|$)")

Change = Callable[[Any], Any]


class Untraceable(Exception):
    """The model doesn't run with this kind of tensors."""


def build(
    spec: ModelSpec, config: Any, family: Family, shape: Shape, change: Change | None, *, device: str = "meta"
) -> Any:
    """Return the model on a device, its adapter put on.

    Raises:
        Untraceable: It is too large to be made of real tensors.
    """
    from autotune.training.build import build_model

    flash = (family.attn_implementation or "").startswith("flash_attention")
    if device != "meta" and not is_fake():
        _check_size(build(spec, config, family, shape, change), shape)
    model = build_model(
        spec,
        shape.task,
        dtype=family.dtype,
        attn_implementation="sdpa" if flash else family.attn_implementation,
        device=device,
        experts_implementation=family.experts_implementation,
        config=config,
        **routing_fields(family.experts_per_token, family.expert_capacity),
    )
    model.config.use_cache = False
    if flash:  # not asked of the library, which refuses what isn't installed
        model.config._attn_implementation = "flash_attention_2"
    if change is not None:
        model = change(model)
    if family.tensor_parallel > 1:
        keep_part(model, family.tensor_parallel)
    if family.quantization is not None:
        if device != "meta":
            raise Untraceable(f"layers of {family.quantization} weights are traced on the meta device alone")
        quantized.pack(model, family, shape.task)
    if family.adapter is not None:
        from autotune.training.adapters import adapter_arguments, put_on

        # Of weights without values new ones need none either; filling them takes longer than a trace.
        meta = torch.device("meta") if device == "meta" else contextlib.nullcontext()
        try:
            with meta:
                model = put_on(model, adapter_arguments(family.adapter, shape.task))
        except ValueError as error:
            raise InputError(f"{spec.name}: the adapter can't be put on: {one_line(error)}") from error
    return chunk_loss(model) if family.chunked_loss else model


def _check_size(model: Any, shape: Shape) -> None:
    nbytes = sum(p.numel() * p.element_size() for p in model.parameters())
    # 4 samples, and for each token each weight once in the forward pass and twice in the backward pass.
    flops = 6.0 * sum(p.numel() for p in model.parameters()) * 4 * max(1, shape.length)
    if nbytes > 2 << 30 or flops > 1e12:  # a step of Llama-3.2-1B with few layers, 1e13, took two cores ten minutes
        much = f"{nbytes / 2**30:.1f} GiB and {flops:.0e} operations"
        raise Untraceable(f"it can't be traced without values, and {much} are too much for a real run")


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
        for own, whole in module.named_parameters(recurse=False):
            if id(whole) not in kept:
                split = _dimension(plan.get(_NUMBER.sub(".*", f"{name}.{own}"), style), own, whole.ndim)
                kept[id(whole)] = whole
                if split is not None:
                    part = whole.detach().chunk(degree, split)[0].clone(memory_format=torch.contiguous_format)
                    kept[id(whole)] = nn.Parameter(part, requires_grad=whole.requires_grad)
            module._parameters[own] = kept[id(whole)]
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


def _run_on_part(module: Any, style: str, degree: int) -> None:
    if style == "embedding_rowwise":  # ids of other devices' rows are masked
        rows = module.weight.shape[0]
        module.padding_idx = None
        module.register_forward_pre_hook(lambda _, given: (given[0].remainder(rows), *given[1:]))
    elif style in ("rowwise_split_input", "rowwise_rep"):
        module.register_forward_pre_hook(lambda _, given: (given[0].chunk(degree, -1)[0].clone(), *given[1:]))
    elif style in ("colwise_gather_output", "colwise_rep", "embedding_colwise"):
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


@contextlib.contextmanager
def tensors_of(way: TracedBy) -> Iterator[None]:
    """Have models made of fake tensors, if that is the way."""
    if way != "fake":
        yield
        return
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode(allow_non_fake_inputs=True):
        yield


def is_fake() -> bool:
    """Return whether tensors that are made now are fake."""
    return torch._guards.detect_fake_mode() is not None
