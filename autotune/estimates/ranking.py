"""Rankings of predictions: the best configurations of a device, and the devices of the table side by side."""

from __future__ import annotations

from collections.abc import Sequence

from autotune.errors import InputError
from autotune.estimates.forecast import Forecast, Question, with_micro_batch
from autotune.estimates.report import DeviceRow, DevicesReport, RankingReport
from autotune.estimates.request import config_of, refusal, table_target, with_packages
from autotune.space.knobs import knobs, shown
from autotune.space.points import Scalar, make_point
from autotune.space.space import MICRO_BATCH, SearchSpace, micro_batches
from autotune.units import show_memory
from autotune.values.catalogue.gpus import gpus
from autotune.values.config import TrainConfig
from autotune.values.estimate import MemoryBreakdown
from autotune.values.knob import Allowance

BEST = 8  # rows of the ranking of a device

RANKED = (
    "ranked: precision (bf16 stands for fp16 where the device has both), tf32, micro-batch, optimizer, checkpointing; "
    "with --allow method pure bf16 and LoRA too; what else there is (--attention, --compile, --adapter-rank) is "
    "estimated when it is given"
)

# Of what is ranked, the parameters whose values a reader may miss.
_PARAMETERS = ("precision", "tf32", "optim", "checkpointing", "adapter")

# As a space writes values that aren't words.
_WRITTEN: dict[str, Scalar] = {"True": True, "False": False, "None": None}


def ranking(question: Question, forecast: Forecast, notes: tuple[str, ...]) -> RankingReport:
    """Return the best predicted configurations of a device.

    Raises:
        NothingFitsError: None has the memory.
    """
    plan, device = forecast.plan, forecast.device
    configs = plan.every_config()
    best, fitting = forecast.best(configs, BEST)
    if not best:
        raise forecast.nothing_fits(configs, plan.allowance)
    rows = tuple(forecast.predicted(config) for config in best)
    return RankingReport(
        workload=plan.workload,
        device=device,
        allowance=plan.allowance,
        considered=len(configs),
        fitting=fitting,
        best=rows,
        run=question.run(rows[0], device.name),
        notes=(
            *notes,
            RANKED,
            *ranking_notes(plan.search_space(), best),
            *forecast.basis(rows[0].config, rows[0].traced_by),
            *rows[0].notes,
        ),
    )


def ranking_notes(space: SearchSpace, best: Sequence[TrainConfig]) -> tuple[str, ...]:
    """Return lines on the values that no configuration of a ranking has.

    Args:
        space: What was ranked.
        best: What is shown of it.
    """
    return (*_refused(space), *_behind(space, best))


def _refused(space: SearchSpace) -> list[str]:
    """Return a line for each reason why values weren't predicted at all."""
    reasons: dict[str, list[str]] = {}
    for written, reason in space.left_out.items():
        name, _, value = written.partition("=")
        if name in _PARAMETERS:
            reasons.setdefault(reason, []).append(_option(name, _WRITTEN.get(value, value)))
    return [f"not ranked: {', '.join(options)}: {reason}" for reason, options in reasons.items()]


def _behind(space: SearchSpace, best: Sequence[TrainConfig]) -> list[str]:
    """Return a line on the values that were predicted, and came out behind those that are shown."""
    points = [make_point(config) for config in best]
    missing = [
        _option(dimension.name, value)
        for dimension in space.dimensions
        if dimension.name in _PARAMETERS
        for value in dimension.choices
        # Of each kind the better of with and without tf32 is shown.
        if value is not False and all(point.get(dimension.name) != value for point in points)
    ]
    return [f"predicted too, and behind these or too large: {', '.join(missing)}"] if missing else []


def _option(parameter: str, value: Scalar) -> str:
    option = next((knob.option for knob in knobs() if knob.parameter == parameter), parameter)
    return shown(option, value)


def survey(question: Question, notes: tuple[str, ...]) -> DevicesReport:
    """Return the best predicted configuration of each device of the table, fastest first.

    Raises:
        InputError: No device can run the configuration that was given.
        NothingFitsError: None has the memory.
    """
    memories: dict[TrainConfig, MemoryBreakdown] = {}
    spaces: dict[object, list[TrainConfig]] = {}
    rows: list[DeviceRow] = []
    tried: list[tuple[Forecast, list[TrainConfig]]] = []
    for gpu in gpus():
        target = with_packages(table_target(gpu), question.point)
        forecast = question.forecast(target, memories)
        configs = _candidates(question, forecast, spaces)
        if isinstance(configs, str):
            rows.append(DeviceRow(device=target.device, best=None, largest_micro_batch=None, why_not=configs))
        else:
            tried.append((forecast, configs))
            rows.append(_row(question, forecast, configs))
    if not tried:
        raise InputError(f"not possible on any device of the table: {rows[0].why_not}")
    if not any(row.best for row in rows):
        forecast, configs = max(tried, key=lambda pair: pair[0].device.memory_bytes)
        raise forecast.nothing_fits(configs, Allowance.METHOD if question.point else question.allowance)
    return DevicesReport(
        workload=question.workload,
        allowance=None if question.point else question.allowance,
        rows=tuple(sorted(rows, key=_by_speed)),
        notes=(*notes, *(() if question.point else (RANKED,)), "rates by data sheets; nothing else on the device"),
    )


def _candidates(
    question: Question, forecast: Forecast, spaces: dict[object, list[TrainConfig]]
) -> list[TrainConfig] | str:
    """Return the configurations that are compared on a device, or why there is none."""
    plan = forecast.plan
    if question.point:
        config = config_of(plan, question.point)
        sizes = micro_batches(plan.workload.global_batch_size)
        configs = [config] if MICRO_BATCH in question.point else [with_micro_batch(config, size) for size in sizes]
        reason = refusal(plan, configs[0])
        return configs if reason is None else reason.replace(plan.hardware.name, "it")
    abilities = (plan.hardware.capability, plan.hardware.arithmetic)  # all that tells the table's devices apart
    if abilities not in spaces:
        spaces[abilities] = plan.every_config()
    return spaces[abilities]


def _row(question: Question, forecast: Forecast, configs: Sequence[TrainConfig]) -> DeviceRow:
    device = forecast.device
    best, _ = forecast.best(configs, 1)
    if not best:
        least = forecast.device_bytes(forecast.tightest(configs))
        why_not = f"the least takes {show_memory(least)}"
        return DeviceRow(device=device, best=None, largest_micro_batch=None, why_not=why_not)
    found = forecast.predicted(best[0])
    return DeviceRow(
        device=device,
        best=found,
        largest_micro_batch=forecast.largest_micro_batch(best[0]),
        run=question.run(found, device.name),
    )


def _by_speed(row: DeviceRow) -> float:
    return -row.best.speed.samples_per_second if row.best is not None and row.best.speed is not None else 0.0
