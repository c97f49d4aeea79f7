"""The model as it is traced: its config, the kind of its tensors, its quantized layers and its adapter.

Under tensor parallelism it is the part that one device has (`shards`).
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch

from autotune.cost import quantized
from autotune.cost.family import Family, Shape
from autotune.cost.meta import pack_at_once
from autotune.cost.shards import keep_part
from autotune.errors import InputError, one_line
from autotune.training.arguments import routing_fields
from autotune.training.loss import chunk_loss
from autotune.values.estimate import TracedBy
from autotune.values.model import ModelSpec

# Weights of a model that is really run, and operations of a micro-step: one of Llama-3.2-1B with few layers, 1e13, took
# ten minutes of two busy cores.
_MOST_REAL_BYTES = 2 << 30
_MOST_REAL_FLOPS = 1e12

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
    if model.config.model_type == "llava_next" and device == "meta":
        pack_at_once(model.model)
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
    if nbytes > _MOST_REAL_BYTES or flops > _MOST_REAL_FLOPS:
        much = f"{nbytes / 2**30:.1f} GiB and {flops:.0e} operations"
        raise Untraceable(f"it can't be traced without values, and {much} are too much for a real run")


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


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Silence warnings of libraries, which concern a real training."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
