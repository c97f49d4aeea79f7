"""The cost of training on a given number of tokens: FLOP and hours, without evaluation, saving and restarts."""

from __future__ import annotations

from autotune.errors import InputError
from autotune.estimates.report import Predicted, RunCost
from autotune.values.trial import Interval
from autotune.values.workload import Workload

PETAFLOP_S_DAY = 1e15 * 86_400

_HOUR_S = 3600.0


def run_cost(predicted: Predicted, *, tokens: float, workload: Workload, parameters: int) -> RunCost:
    """Return the cost of training on `tokens`, source and target together, with a configuration."""
    tokens_per_step = workload.samples_per_step(predicted.config) * tokens_per_sample(workload)
    hours = interval = None
    speed = predicted.speed
    if speed is not None and speed.tokens_per_second is not None and speed.tokens_per_second_interval is not None:
        rates = speed.tokens_per_second_interval
        hours = tokens / speed.tokens_per_second / _HOUR_S
        interval = Interval(low=tokens / rates.high / _HOUR_S, high=tokens / rates.low / _HOUR_S)
    devices = predicted.config.parallelism.world_size
    by_parameters = 6.0 * parameters * tokens
    needed = predicted.flops_per_step / tokens_per_step * tokens
    return RunCost(
        tokens=tokens,
        parameters=parameters,
        flops_by_parameters=by_parameters,
        petaflop_s_days_by_parameters=by_parameters / PETAFLOP_S_DAY,
        needed_flops=needed,
        needed_petaflop_s_days=needed / PETAFLOP_S_DAY,
        hours=hours,
        devices=devices,
        gpu_hours=None if hours is None else hours * devices,
        hours_interval=interval,
    )


def tokens_per_sample(workload: Workload) -> float:
    """Return the tokens of a sample, source and target together."""
    if workload.tokens_per_sample is None:
        what = "sound, which has" if workload.task.takes_audio else "images, which have"
        raise InputError(f"--tokens: {workload.model.name} is trained on {what} none")
    return workload.tokens_per_sample
