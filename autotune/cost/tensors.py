"""The kinds of tensors that a model is traced with: of the meta device, fake, or real ones. Called by `profiler`."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator

import torch

from autotune.values.estimate import TracedBy


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
    """Let no library warn of what concerns only those who train."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
