"""A rehearsal: an unchanged training as it ran on the stand-in for a GPU, and whether it fits the GPU."""

import math
from typing import Literal

from pydantic import Field, PositiveInt

from autotune.value import Value
from autotune.values.problem import Change
from autotune.values.trial import Memory, PeakParts
from autotune.values.workload import Workload


class Lever(Value):
    """A change that leaves the mathematics of the training as they are, but for rounding, as it ran in the memory."""

    changes: tuple[Change, ...]
    memory: Memory | None = Field(description="None: it failed")
    chance_to_fit: float = Field(ge=0, le=1)


class Rehearsal(Value):
    """A training of the user's own on the stand-in for GPUs; its memory is that of torch's allocator on the first."""

    schema_version: Literal[1] = 1
    gpu: str = Field(description="by its name in the table of GPUs")
    devices: PositiveInt = Field(default=1, description="such GPUs that train it together")
    memory_bytes: int = Field(description="of each GPU, as CUDA reports it")
    workload: Workload
    peak: Memory = Field(description="with as much memory as it takes")
    parts: PeakParts
    chance_to_fit: float = Field(ge=0, le=1)
    short: str | None = Field(default=None, description="how it ended with the GPU's memory, where that isn't enough")
    levers: tuple[Lever, ...] = Field(default=(), description="where it doesn't fit: what was tried, in that order")
    refused: str | None = Field(default=None, description="why its memory can't be told here; all else is of no use")
    versions: dict[str, str]
    notes: tuple[str, ...] = ()


def chance_to_fit(memory: Memory, memory_bytes: int, context_spread_bytes: float) -> float:
    """Return the chance that a peak on the stand-in fits a GPU's memory, by the spreads of allocator and context."""
    # How far the stand-in was off in reserved memory: in six published runs at most 1.9 % (tests/fakecuda/README.md).
    spread = math.hypot(0.015 * (memory.reserved_bytes or 0), context_spread_bytes)
    return 0.5 * math.erfc((memory.peak_bytes - memory_bytes) / (spread * math.sqrt(2)))
