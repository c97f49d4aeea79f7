"""What a search is to solve: a training, the device it runs on, and what may change of it."""

from __future__ import annotations

from typing import Any

from pydantic import Field, PositiveInt

from autotune.value import Value
from autotune.values.config import Allowance, TrainConfig, Workload
from autotune.values.hardware import Hardware
from autotune.values.model import ModelFacts


class Problem(Value):
    """A training with its device, its memory budget, and the deepest change of it that is admitted.

    Plans, recorded tables and reports extend it, so their JSON has these fields beside their own.
    """

    workload: Workload
    facts: ModelFacts
    hardware: Hardware
    memory_bytes: PositiveInt = Field(description="the memory budget, of each device")
    allowance: Allowance
    baseline: TrainConfig = Field(description="the user's own configuration, or the Trainer's defaults")

    def problem_fields(self) -> dict[str, Any]:
        """Return the fields of the problem alone, to make another value of them."""
        return {name: getattr(self, name) for name in Problem.model_fields}


class Change(Value):
    """One knob that differs from the baseline's."""

    knob: str
    before: str
    after: str
    allowance: Allowance
