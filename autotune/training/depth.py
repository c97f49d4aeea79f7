"""Makes a model's config shallower: which stacks of layers it has, how deep they are, how they repeat.

A config says its depth in a few known fields; its lists with an item for each layer are cut along. The caller has to
check that the layers really repeat, by the operators and the number of parameters.
"""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

# Fields that hold the depth of an encoder and its decoder.
_PAIRS = (("num_layers", "num_decoder_layers"), ("encoder_layers", "decoder_layers"))

# Fields with the number of layers before the repeating ones: DeepSeek's dense ones.
_LEADING = ("first_k_dense_replace",)

# Fields with an n where every n-th layer is of another kind.
_PERIODS = (
    "decoder_sparse_step", "encoder_sparse_step", "sliding_window_pattern", "attn_layer_period", "expert_layer_period",
    "full_attention_interval", "global_attn_every_n_layers", "interleave_moe_layer_step",
)  # fmt: skip

# Probabilities by which speech models leave out whole layers.
_LAYERDROPS = ("layerdrop", "encoder_layerdrop", "decoder_layerdrop")


@dataclass(frozen=True)
class Stack:
    """Equal layers, or groups of layers that repeat."""

    field: str
    depth: int
    base: int  # layers of the shallowest model that has every kind of layer
    period: int  # layers after which the kinds repeat

    @property
    def more(self) -> float:
        """Periods of the full depth beyond the base."""
        return (self.depth - self.base) / self.period


def stacks(config: Any, every: int = 1, leading: int = 0) -> tuple[Stack, ...]:
    """Return the stacks of layers of a library config; none if it doesn't say its depth.

    With `every` the period is a multiple of it, such as 2 where every second layer is checkpointed; the first `leading`
    layers aren't like the others. Fields of a config inside are named with it, as "text_config.num_hidden_layers".
    """
    if getattr(config, "image_token_id", None) is not None:
        return _of_parts(config, every, leading)
    fields: tuple[str, ...] | None = next((pair for pair in _PAIRS if all(_depth(config, name) for name in pair)), None)
    if fields is None and _depth(config, "num_hidden_layers"):
        fields = ("num_hidden_layers",)
    return tuple(_stack(config, name, every, leading) for name in fields or ())


def _of_parts(config: Any, every: int, leading: int) -> tuple[Stack, ...]:
    """Return the stacks of a language model and, if its layers are alike, of the vision part before it.

    Qwen3-VL adds features of some of its vision layers to the first layers of the language model (DeepStack), and some
    of Qwen2.5-VL's vision layers attend beyond their window.
    """
    vision = config.vision_config
    deep = getattr(vision, "deepstack_visual_indexes", None) or ()
    found = {"text_config": _stack(config.text_config, "num_hidden_layers", every, max(leading, len(deep)))}
    if not deep and not getattr(vision, "fullatt_block_indexes", None) and _depth(vision, "num_hidden_layers"):
        stack = _stack(vision, "num_hidden_layers", every, leading)
        # LLaVA takes the features before the last layer: the layer that repeats mustn't be the one that makes them.
        found["vision_config"] = replace(stack, base=stack.base + stack.period)
    return tuple(replace(s, field=f"{part}.{s.field}") for part, s in found.items() if s.depth > s.base)


def shallower(config: Any, depths: dict[str, int]) -> Any:
    """Return a copy of `config` with other depths, by field."""
    config = copy.deepcopy(config)
    for path, depth in depths.items():
        *parts, name = path.split(".")
        part = functools.reduce(getattr, parts, config)
        full = getattr(part, name)
        for key, value in list(vars(part).items()):
            if isinstance(value, list | tuple) and len(value) == full:
                setattr(part, key, value[:depth])
        setattr(part, name, depth)
    return config


def without_chance(config: Any) -> Any:
    """Return a copy of `config` without layer drop and SpecAugment, so that each step is the same."""
    config = copy.deepcopy(config)
    for name in _LAYERDROPS:
        if getattr(config, name, None):
            setattr(config, name, 0.0)
    if hasattr(config, "mask_time_prob"):  # it stays, since at 0 the model would have a parameter less
        config.apply_spec_augment = False
    return config


def _stack(config: Any, name: str, every: int, leading: int) -> Stack:
    depth = int(getattr(config, name))
    leading = max(leading, *(int(getattr(config, field, 0) or 0) for field in _LEADING))
    period = _period(getattr(config, "layer_types", None), depth, leading)
    for field in _PERIODS:
        step = getattr(config, field, None)
        if isinstance(step, int) and step > 1:
            period = max(period, step)
    period = math.lcm(period, every)
    # Two periods, since the first layer differs: T5's holds the position biases, and under LoRA it has no input
    # gradient.
    base = leading + 2 * period
    base += (depth - base) % period  # the layers that are left over come first
    return Stack(field=name, depth=depth, base=base, period=period)


def _depth(config: Any, name: str) -> int:
    value = getattr(config, name, None)
    return value if isinstance(value, int) and not isinstance(value, bool) else 0


def _period(kinds: Sequence[Any] | None, depth: int, leading: int) -> int:
    """Return the number of layers after which their kinds repeat."""
    if not kinds or len(kinds) != depth:
        return 1
    rest = list(kinds[leading:])
    return next(p for p in range(1, len(rest) + 1) if all(a == b for a, b in zip(rest, rest[p:], strict=False)))
