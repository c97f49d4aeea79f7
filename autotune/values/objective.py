"""What a search maximises: samples per second, of the steady state or of a whole run with its start. Values only.

A compiler costs time at the start and wins some at each step: whether it pays depends on how long the run is.
"""

from __future__ import annotations

import math
import statistics

from pydantic import Field

from autotune.value import Value
from autotune.values.trial import Measurement


class Objective(Value):
    """The throughput that configurations are compared by."""

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
