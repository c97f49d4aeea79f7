"""What trackers are told of a search: of each trial and of the answer, as plain names and figures. Pure."""

from __future__ import annotations

import statistics

from pydantic import Field, NonNegativeInt

from autotune.planning.plan import SearchPlan
from autotune.space.changes import changes
from autotune.space.knobs import shown_changes
from autotune.space.points import Scalar, make_point
from autotune.units import GIB
from autotune.value import Value
from autotune.values.config import TrainConfig
from autotune.values.result import ResultData
from autotune.values.trial import Failure, Measurement, TrialResult

# Beyond this, MLflow refuses a tag (MAX_TAG_VAL_LENGTH of its validation is 8,000; older servers take 5,000).
_LONGEST_TAG = 1000


class Entry(Value):
    """One run of a tracker: a trial, or the answer."""

    name: str
    step: NonNegativeInt = Field(description="number of the trial; of the answer the number of trials")
    completed: bool
    params: dict[str, bool | int | float | str] = Field(description="the configuration")
    metrics: dict[str, float]
    tags: dict[str, str]


def entry_of(plan: SearchPlan, result: TrialResult) -> Entry:
    """Return what is told of a trial that has ended."""
    request, outcome = result.request, result.outcome
    metrics = {"duration_s": result.duration_s}
    if isinstance(outcome, Measurement):
        metrics |= _measured(outcome)
    elif outcome.memory is not None and outcome.memory.is_known:
        metrics["peak_memory_gib"] = outcome.memory.peak_bytes / GIB
    if request.prediction is not None:
        metrics["predicted_samples_per_second"] = request.prediction.samples_per_second
        metrics["predicted_peak_memory_gib"] = request.prediction.peak_bytes / GIB
    tags = {
        "purpose": str(request.purpose),
        "status": str(result.status),
        "changes": shown_changes(changes(request.config, plan))[:_LONGEST_TAG],
        "config_id": request.config.config_id,
    }
    if isinstance(outcome, Failure):
        tags["cause"] = outcome.cause[:_LONGEST_TAG]
    return Entry(
        name=f"trial-{request.number:04d}",
        step=request.number,
        completed=result.measurement is not None,
        params=params_of(request.config),
        metrics=metrics,
        tags=tags,
    )


def answer_of(result: ResultData) -> Entry:
    """Return what is told of the answer."""
    metrics = {"search_time_s": result.search_time_s}
    if result.best.measurement is not None:
        metrics |= _measured(result.best.measurement)
    if result.baseline.measurement is not None:
        metrics["baseline_samples_per_second"] = result.baseline.measurement.samples_per_second
    if result.speedup is not None:
        metrics["speedup"] = result.speedup.ratio
    return Entry(
        name="answer",
        step=sum(t.number is not None for t in result.trials),
        completed=True,
        params=params_of(result.best.config),
        metrics=metrics,
        tags={
            "purpose": "answer",
            "status": result.verdict,
            "changes": shown_changes(result.best.changes)[:_LONGEST_TAG],
            "config_id": result.best.config.config_id,
        },
    )


def about(plan: SearchPlan) -> dict[str, str]:
    """Return what all runs of a search have in common."""
    workload = plan.workload
    return {
        "model": workload.model.name,
        "task": str(workload.task),
        "global_batch_size": str(workload.global_batch_size or "any"),
        "device": plan.hardware.name,
        "memory_budget_gib": f"{plan.memory_bytes / GIB:.2f}",
        "allow": str(plan.allowance),
        "effort": str(plan.budget.effort),
    }


def params_of(config: TrainConfig) -> dict[str, bool | int | float | str]:
    """Return a configuration as parameters by name, nested ones behind a dot; of several devices only if there are."""
    point = make_point(config)
    shown = {n: v for n, v in point.items() if not (config.parallelism.is_single and n.startswith("parallelism."))}
    return {name: _param(value) for name, value in shown.items()}


def _param(value: Scalar) -> bool | int | float | str:
    return "none" if value is None else value


def _measured(measured: Measurement) -> dict[str, float]:
    figures: dict[str, float | None] = {
        "samples_per_second": measured.samples_per_second,
        "tokens_per_second": measured.tokens_per_second,
        "step_time_s": statistics.fmean(measured.step_times_s),
        "first_step_s": measured.first_step_s,
        "startup_s": measured.startup_s,
        "peak_memory_gib": measured.memory.peak_bytes / GIB if measured.memory.is_known else None,
        "data_wait_share": measured.data_wait_share,
        "loss": measured.loss,
    }
    return {name: value for name, value in figures.items() if value is not None}
