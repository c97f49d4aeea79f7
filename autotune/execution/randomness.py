"""Switches off what a model draws at random while it trains, so that two runs of it can be compared; and on again.

Dropout modules have a rate `p`; others keep theirs in an attribute or read it from the config at each call. Randomness
of another kind, in a model's own code, is not found: it shows as a difference between two runs.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

# Rates by name: dropout and its kin (attention_dropout, resid_pdrop, drop_path, layerdrop), a router's noise, and the
# shares of a recording that SpecAugment hides.
_WORDS = ("drop", "jitter")
_NAMES = frozenset({"mask_time_prob", "mask_feature_prob"})


@contextmanager
def randomness_off(model: nn.Module) -> Iterator[None]:
    """Set every rate of `model` to zero while entered."""
    before = _rates(model)
    try:
        for holder, name, value in before:
            setattr(holder, name, type(value)(0))
        yield
    finally:
        for holder, name, value in before:
            setattr(holder, name, value)


def is_random(model: nn.Module) -> bool:
    """Whether any rate of `model` is above zero."""
    return bool(_rates(model))


def _rates(model: nn.Module) -> list[tuple[Any, str, float]]:
    """Return the rates above zero, with what holds them and their names."""
    return [(h, name, value) for h in _holders(model) for name, value in vars(h).items() if _is_rate(h, name, value)]


def _holders(model: nn.Module) -> list[Any]:
    """Return the modules and their configs, each once."""
    modules = list(model.modules())
    configs = {id(c): c for m in modules if (c := getattr(m, "config", None)) is not None and hasattr(c, "to_dict")}
    return [*modules, *configs.values()]


def _is_rate(holder: Any, name: str, value: Any) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
        return False
    if isinstance(holder, nn.Module) and name == "p" and "Drop" in type(holder).__name__:
        return True
    return name in _NAMES or any(word in name for word in _WORDS)
