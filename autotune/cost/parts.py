"""A library config of the part of a model that one device has under tensor and pipeline parallelism.

Tensor parallelism gives each device its share of the heads, of the inner width of the perceptrons and of each expert
(Megatron-LM, arXiv:1909.08053), which is a model with fewer heads and narrower perceptrons: that model is traced.
Embeddings, norms and, in transformers' plans, what the head makes of the hidden states stay whole. A pipeline's stage
is a model with fewer layers; that it has embeddings and a head as well is taken for granted of every stage, so the
first and the last, which have one of them, take a bit less. Called by `profiler`.
"""

from __future__ import annotations

import copy
from typing import Any

from autotune.cost.family import Family
from autotune.errors import InputError
from autotune.training.depth import shallower, stacks

# Fields whose sizes a plan splits, by the names that transformers' configs give them.
_SPLIT = (
    "num_attention_heads",
    "num_key_value_heads",
    "intermediate_size",
    "moe_intermediate_size",
    "shared_expert_intermediate_size",
)


def part_of(config: Any, family: Family) -> Any:
    """Return the config of one device's part of a model.

    Raises:
        InputError: It can't be dealt out so.
    """
    if family.tensor_parallel > 1:
        config = _shard(config, family.tensor_parallel)
    if family.pipeline_parallel > 1:
        config = _stage(config, family.pipeline_parallel)
    return config


def _shard(config: Any, degree: int) -> Any:
    if not getattr(config, "base_model_tp_plan", None):
        raise InputError(f"tensor parallel {degree}: transformers has no plan for {config.model_type}")
    config = copy.deepcopy(config)
    head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    for name in _SPLIT:
        size = getattr(config, name, None)
        if not size:
            continue
        if size % degree:
            raise InputError(f"tensor parallel {degree}: does not divide {name} = {size}")
        setattr(config, name, size // degree)
    config.head_dim = head
    return config


def _stage(config: Any, degree: int) -> Any:
    found = stacks(config)
    if len(found) != 1:
        raise InputError(f"pipeline parallel {degree}: {config.model_type} has not one stack of layers")
    (stack,) = found
    if stack.depth % degree:
        raise InputError(f"pipeline parallel {degree}: does not divide {stack.field} = {stack.depth}")
    return shallower(config, {stack.field: stack.depth // degree})
