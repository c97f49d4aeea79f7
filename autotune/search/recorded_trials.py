"""Trials of the lasting record as results of this search: read, compared in speed, and scaled to the present speed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from autotune.errors import AutotuneError
from autotune.execution.outcome import OUTCOMES
from autotune.planning.plan import SearchPlan, request_of
from autotune.storage.recorded import RecordedSearch, RecordedTrial
from autotune.units import show_memory
from autotune.values.config import TrainConfig
from autotune.values.trial import Interval, Measurement, Memory, TrialResult, TrialStatus

# Relative difference between the peaks of two runs of one configuration, as in `autotune.cost.corrections`.
_MEMORY_NOISE = 0.01


class Known(NamedTuple):
    """A recorded trial of an earlier search."""

    recorded: RecordedTrial
    result: TrialResult  # the same as a result of this search
    search: int  # index of the earlier search, the latest first

    @property
    def config(self) -> TrainConfig:
        """The configuration that was tried."""
        return self.result.request.config


def tried(plan: SearchPlan, search: RecordedSearch, index: int) -> dict[TrainConfig, Known]:
    """Return the trials of an earlier search by configuration; of several trials of one configuration, the median.

    Finals and checks are left out, and so are numbers of devices that this search, with the `plan`, doesn't try.
    """
    found: dict[TrainConfig, list[Known]] = {}
    for recorded in search.trials:
        result = _result(plan, recorded) if recorded.purpose.explores else None
        if result is not None and result.request.config.parallelism.world_size in plan.world_sizes:
            found.setdefault(result.request.config, []).append(Known(recorded, result, index))
    return {config: _median(several) for config, several in found.items()}


def _median(several: list[Known]) -> Known:
    completed = sorted(
        (known for known in several if known.recorded.samples_per_second is not None),
        key=lambda known: known.recorded.samples_per_second or 0.0,
    )
    return completed[len(completed) // 2] if completed else several[-1]


def _result(plan: SearchPlan, recorded: RecordedTrial) -> TrialResult | None:
    """Return a recorded trial as a result; None if this version can't read its configuration or outcome."""
    try:
        config = TrainConfig.model_validate(recorded.config)
        request = request_of(
            plan, config, recorded.purpose, number=recorded.number, timeout_s=recorded.duration_s + 1.0
        )
        outcome = OUTCOMES.validate_python(recorded.outcome)
    except (ValueError, AutotuneError):
        return None
    if isinstance(outcome, Measurement) and not 0 < outcome.samples_per_second < math.inf:
        return None  # from a damaged record
    limits = request.limits.model_copy(update={"memory_bytes": recorded.memory_bytes})
    request = request.model_copy(update={"limits": limits})
    return TrialResult(request=request, outcome=outcome, duration_s=recorded.duration_s)


def speed(then: Known | None, now: TrialResult | None) -> float | None:
    """Return how many times as fast the machine is now, by two trials of one configuration; None if they don't show it.

    If the trial runs into its time limit now, 1 is returned: the machine is not faster.
    """
    if then is None or now is None:
        return None
    if now.measurement is None:
        return 1.0 if now.status is TrialStatus.TIMED_OUT else None
    if then.result.measurement is None:
        return None
    return now.measurement.samples_per_second / then.result.measurement.samples_per_second


def scaled(result: TrialResult, factor: float) -> TrialResult:
    """Return a trial as it would be on a machine `factor` times as fast."""
    measured = result.measurement
    if measured is None:
        return result
    interval, tokens = measured.samples_per_second_interval, measured.tokens_per_second
    faster = {
        "step_times_s": tuple(step / factor for step in measured.step_times_s),
        "samples_per_second": measured.samples_per_second * factor,
        "samples_per_second_interval": Interval(low=interval.low * factor, high=interval.high * factor),
        "tokens_per_second": None if tokens is None else tokens * factor,
        "first_step_s": measured.first_step_s / factor,
    }
    return result.model_copy(update={"outcome": measured.model_copy(update=faster)})


def beyond(every: Sequence[Known], budget_bytes: int) -> dict[TrainConfig, str]:
    """Return the configurations that needed more memory than a budget, with words on how that is known.

    A configuration that fitted in a later trial is left out.
    """
    fitted: dict[TrainConfig, str] = {}
    for known in every:
        measured = known.result.measurement
        if measured is not None and _least_bytes(measured.memory) <= budget_bytes:
            fitted[known.config] = max(fitted.get(known.config, ""), known.recorded.ended)
    found: dict[TrainConfig, str] = {}
    for known in every:
        measured, recorded = known.result.measurement, known.recorded
        if fitted.get(known.config, "") > recorded.ended:
            continue
        if measured is not None and (needed := _least_bytes(measured.memory)) > budget_bytes * (1 + _MEMORY_NOISE):
            found.setdefault(known.config, f"took {show_memory(needed)} on {recorded.day} (record)")
        elif recorded.status is TrialStatus.OUT_OF_MEMORY and recorded.memory_bytes >= budget_bytes:
            words = f"ran out of memory within {show_memory(recorded.memory_bytes)} on {recorded.day} (record)"
            found.setdefault(known.config, words)
    return found


def _least_bytes(memory: Memory) -> int:
    """Return the bytes that a trial needs at the least: its device peak without the allocator's unused reserve.

    Under a smaller limit the allocator would reserve less.
    """
    if memory.device_bytes is None or memory.reserved_bytes is None or memory.allocated_bytes is None:
        return memory.peak_bytes if memory.is_known else 0
    return memory.device_bytes - memory.reserved_bytes + memory.allocated_bytes
