"""Tells a model's layers apart by the names of their parameters: what is sharded, gathered and prefetched together.

FSDP2 through the Trainer makes a unit of each transformer layer, one of the input embeddings, and one of the last norm
and the head (accelerate's `fsdp2_prepare_model`). A layer is what a name's first number counts. Pure.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from autotune.cost.profile import ParameterGroup

_LAYER = re.compile(r"^(.*?\.\d+)\.")


@dataclass(frozen=True)
class Layers:
    """The layers of a model.

    Attributes:
        largest: Parameters of the largest one.
        outside: Parameters that are in none.
        count: How many there are.
    """

    largest: tuple[ParameterGroup, ...]
    outside: tuple[ParameterGroup, ...]
    count: int

    def with_more(self, count: int) -> Layers:
        """Return the same with `count` layers more."""
        return Layers(self.largest, self.outside, self.count + count)


def layers_of(names: Sequence[str], groups: Sequence[ParameterGroup]) -> Layers:
    """Return the layers of a model's parameters, given in the same order as their names."""
    by_layer: dict[str, list[ParameterGroup]] = {}
    outside: list[ParameterGroup] = []
    for name, group in zip(names, groups, strict=True):
        match = _LAYER.match(name)
        (by_layer.setdefault(match[1], []) if match else outside).append(group)
    largest = max(by_layer.values(), key=total_bytes, default=[])
    return Layers(_counted(largest), _counted(outside), len(by_layer))


def total_bytes(groups: Sequence[ParameterGroup], *, trained: bool = False) -> float:
    """Return the bytes of parameters, or of those that are trained."""
    return sum(g.count * g.elements * g.element_bytes for g in groups if g.trained or not trained)


def _counted(groups: Sequence[ParameterGroup]) -> tuple[ParameterGroup, ...]:
    return tuple(group.model_copy(update={"count": count}) for group, count in Counter(groups).items())
