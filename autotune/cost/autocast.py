"""Autocast as libraries ask about it or switch it off, while a model is traced on the meta device, which has none.

The tracer casts by itself (`semantics`); this lets the code of libraries know.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch

from autotune.cost.family import Family
from autotune.cost.semantics import Semantics


@contextlib.contextmanager
def seen_autocast(family: Family) -> Iterator[None]:
    """Have peft's layers on packed weights see that they run under autocast, which they ask CUDA's about.

    Nothing on the meta device is cast by it.
    """
    if family.quantization is None or family.device == "cpu" or family.autocast is None:
        yield
        return
    before = torch.is_autocast_enabled("cuda")
    torch.set_autocast_enabled("cuda", True)
    try:
        yield
    finally:
        torch.set_autocast_enabled("cuda", before)


@contextlib.contextmanager
def switched_off_by_libraries(semantics: Semantics) -> Iterator[None]:
    """Let code switch autocast off for the meta device, as peft's LoRA on experts does: torch knows none for it."""
    original: Any = torch.autocast

    def autocast(device_type: str, *args: Any, **kwargs: Any) -> Any:
        if device_type == "meta" and not kwargs.get("enabled", True):
            return semantics.not_casting()
        return original(device_type, *args, **kwargs)

    with mock.patch.object(torch, "autocast", autocast):
        yield
