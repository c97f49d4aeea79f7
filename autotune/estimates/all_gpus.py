"""`autotune estimate --gpu all`: the devices of the table side by side. Called by `autotune.estimates.estimate`."""

from __future__ import annotations

from collections.abc import Sequence

from autotune.errors import InputError
from autotune.estimates.forecast import Forecast, Question, with_micro_batch
from autotune.estimates.ranking import RANKED
from autotune.estimates.report import DeviceRow, DevicesReport
from autotune.estimates.request import config_of, refusal, table_target, with_packages
from autotune.space.space import MICRO_BATCH, micro_batches
from autotune.units import show_memory
from autotune.values.catalogue.gpus import gpus
from autotune.values.config import Allowance, TrainConfig
from autotune.values.estimate import MemoryBreakdown


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
