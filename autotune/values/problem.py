"""What a search is to solve: a training, the device it runs on, what may change of it, and what is maximised."""

from __future__ import annotations

import math
import statistics
from typing import Any

from pydantic import Field, PositiveInt

from autotune.value import Value
from autotune.values.config import TrainConfig
from autotune.values.hardware import Hardware
from autotune.values.knob import Allowance
from autotune.values.model import ModelFacts
from autotune.values.trial import Measurement
from autotune.values.workload import Workload


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


class Objective(Value):
    """The throughput that configurations are compared by: samples per second, of the steady state or of a whole run.

    A compiler costs time at the start and wins some at each step: whether it pays depends on how long the run is.
    """

    run_samples: float | None = Field(
        default=None, gt=0, description="samples of the run whose time counts; None: the start costs nothing"
    )

    def start_s_per_sample(self, measurement: Measurement) -> float:
        """Return what the start costs, spread over the samples of the run."""
        return 0.0 if self.run_samples is None else cold_start_s(measurement) / self.run_samples

    def rate(self, measurement: Measurement) -> float:
        """Return samples per second."""
        return 1.0 / (1.0 / measurement.samples_per_second + self.start_s_per_sample(measurement))


def cold_start_s(measurement: Measurement) -> float:
    """Return what the first step took more than those that were measured: compilation, above all."""
    return max(0.0, measurement.first_step_s - statistics.fmean(measurement.step_times_s))


def break_even_steps(measurement: Measurement, reference: Measurement) -> int | None:
    """Return the steps after which a slower start is won back; None where steps are no faster.

    Args:
        measurement: With the slower start.
        reference: What it is compared with, at the same samples a step.
    """
    won_s = statistics.fmean(reference.step_times_s) - statistics.fmean(measurement.step_times_s)
    cost_s = cold_start_s(measurement) - cold_start_s(reference)
    return math.ceil(max(0.0, cost_s) / won_s) if won_s > 0 else None
