"""Rankings by prediction: the best configurations of one device, or the best of every device of the table."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np

from autotune.errors import InputError
from autotune.estimates.fitting import MUCH_FASTER, nothing_fits
from autotune.estimates.forecast import Forecast, Question
from autotune.estimates.report import DeviceRow, DevicesReport, Predicted, RankingReport
from autotune.estimates.request import config_of, refusal, table_target, with_packages
from autotune.planning.plan import too_large
from autotune.space.knobs import allowance_of, changes, in_words, make_point, shown_changes
from autotune.space.space import SearchSpace
from autotune.units import show_memory
from autotune.values.catalogue.gpus import gpus
from autotune.values.config import Allowance, TrainConfig

BEST = 8  # configurations that a ranking shows

RANKED = (
    "ranked: precision (bf16 stands for fp16 where the device has both), tf32, micro-batch, optimizer, checkpointing; "
    "with --allow method pure bf16 and LoRA too; what else there is (attention, compile, adapter-rank, chunked-loss, "
    "QLoRA as adapter=lora,quantization=nf4) is estimated when it is given (--fix)"
)

# Predicted rates that differ by less than this share count as equal; then the smaller allowance class comes first.
_EQUAL_RATES = 0.01

# The parameters for which the notes name the values that no shown configuration has.
_PARAMETERS = ("precision", "tf32", "optim", "checkpointing", "adapter")


def ranking(question: Question, forecast: Forecast, notes: tuple[str, ...]) -> RankingReport:
    """Return the best predicted configurations of a device.

    Raises:
        InputError: The model can't be traced.
        NothingFitsError: No configuration fits.
    """
    plan, device = forecast.plan, forecast.device
    configs = plan.every_config()
    best, fitting = fastest(forecast, configs, BEST)
    if not best:
        raise nothing_fits(forecast, configs, plan.allowance)
    rows = tuple(forecast.predicted(c).model_copy(update={"changes": changes(c, plan)}) for c in best)
    return RankingReport(
        workload=plan.workload,
        device=device,
        allowance=plan.allowance,
        considered=len(configs),
        fitting=fitting,
        baseline=plan.baseline,
        best=rows,
        run=question.run(rows[0]),
        notes=(
            *_by_method(forecast, configs, rows[0]),
            *notes,
            RANKED,
            *ranking_notes(plan.search_space, best),
            *forecast.basis(rows[0].config, rows[0].traced_by),
            *rows[0].notes,
        ),
    )


def _by_method(forecast: Forecast, configs: Sequence[TrainConfig], best: Predicted) -> tuple[str, ...]:
    """Return a line on LoRA in 16 bits where of `configs` full precision alone fits and LoRA would be much faster."""
    plan = forecast.plan
    forced = best.config.precision == "fp32" and any(config.precision != "fp32" for config in configs)
    if not forced or best.speed is None or plan.allowance.admits(Allowance.METHOD):
        return ()
    # LoRA as a first look takes it, as each that is traced takes seconds.
    others = [
        config
        for config in plan.model_copy(update={"allowance": Allowance.METHOD}).every_config()
        if config.adapter is not None
        and config.optim == plan.baseline.optim
        and config.checkpointing in ("none", "full")
    ]
    lightest = "pure_bf16" if any(config.precision == "pure_bf16" for config in others) else "fp16"
    found, _ = fastest(forecast, [config for config in others if config.precision == lightest], 1)
    times = forecast.predicted(found[0]).samples_per_second / best.samples_per_second if found else 0.0
    if times < MUCH_FASTER:
        return ()
    return (f"with --allow method {times:.1f} times as fast: {shown_changes(changes(found[0], plan))}",)


def ranking_notes(space: SearchSpace, best: Sequence[TrainConfig]) -> tuple[str, ...]:
    """Return lines that name the values of the ranked space which none of the `best` configurations has, and why."""
    reasons: dict[str, list[str]] = {}
    for (name, value), reason in space.left_out.items():
        if name in _PARAMETERS:
            reasons.setdefault(reason, []).append(in_words(name, value))
    refused = [f"not ranked: {', '.join(options)}: {reason}" for reason, options in reasons.items()]
    points = [make_point(config) for config in best]
    behind = [
        in_words(dimension.name, value)
        for dimension in space.dimensions
        if dimension.name in _PARAMETERS
        for value in dimension.choices
        # Of two configurations that differ in tf32 alone only the better is shown, so a missing False says nothing.
        if value is not False and all(point.get(dimension.name) != value for point in points)
    ]
    if not behind:
        return tuple(refused)
    return (*refused, f"predicted too, but slower than these or too large: {', '.join(behind)}")


def survey(question: Question, notes: tuple[str, ...]) -> DevicesReport:
    """Return the best predicted configuration of each device of the table, fastest first.

    Raises:
        InputError: No device can run the configuration that the user gave, or the model can't be traced.
        NothingFitsError: No configuration fits any of them.
    """
    legal: dict[object, list[TrainConfig]] = {}  # of devices with the same abilities
    rows: list[DeviceRow] = []
    tried: list[tuple[Forecast, list[TrainConfig]]] = []
    for gpu in gpus():
        forecast = question.forecast(with_packages(table_target(gpu), question.point))
        plan, device = forecast.plan, forecast.device
        if question.point:
            configs = question.with_micro_batches(config_of(plan, question.point))
            if (reason := refusal(plan, configs[0])) is not None:
                why_not = reason.replace(plan.hardware.name, "it")
                rows.append(DeviceRow(device=device, best=None, largest_micro_batch=None, why_not=why_not))
                continue
        else:
            # A rule reads no other ability that differs in the table.
            abilities = plan.hardware.capability, plan.hardware.arithmetic
            if abilities not in legal:
                legal[abilities] = plan.every_config()
            configs = legal[abilities]
        tried.append((forecast, configs))
        best, _ = fastest(forecast, configs, 1)
        if not best:
            why_not = f"the least takes {show_memory(forecast.device_bytes(forecast.tightest(configs)))}"
            rows.append(DeviceRow(device=device, best=None, largest_micro_batch=None, why_not=why_not))
            continue
        found, largest = forecast.predicted(best[0]), forecast.largest_micro_batch(best[0])
        rows.append(DeviceRow(device=device, best=found, largest_micro_batch=largest, run=question.run(found)))
    if not tried:
        raise InputError(f"not possible on any device of the table: {rows[0].why_not}")
    if not any(row.best for row in rows):
        forecast, configs = max(tried, key=lambda pair: pair[0].device.memory_bytes)
        raise nothing_fits(forecast, configs, Allowance.METHOD if question.point else question.allowance)
    return DevicesReport(
        workload=question.workload,
        allowance=None if question.point else question.allowance,
        rows=tuple(sorted(rows, key=lambda row: -row.best.samples_per_second if row.best else 0.0)),
        notes=(*notes, *(() if question.point else (RANKED,)), "rates by data sheets; nothing else on the device"),
    )


def fastest(forecast: Forecast, configs: Sequence[TrainConfig], count: int) -> tuple[list[TrainConfig], int]:
    """Return up to `count` of the fastest configurations that fit, and how many configurations may fit at all.

    Of configurations that differ in micro-batch and tf32 alone, only the fastest is returned. Predicted rates that
    are as good as equal (`_EQUAL_RATES`) are ordered by allowance class, then by position in `configs`. A
    configuration may fit if the lower bound of its memory is within the device's. Nothing is traced for one whose
    weights, gradients and optimizer states alone aren't.
    """
    configs = [config for config in configs if not too_large(forecast.plan, config)]
    found = forecast.model.predict(configs)
    rates = found.samples_per_second.tolist()
    with np.errstate(invalid="ignore"):
        rows: list[int] = np.flatnonzero(found.least_bytes <= forecast.device.memory_bytes).tolist()
    left = sorted(rows, key=lambda row: -rates[row])
    chosen: dict[TrainConfig, TrainConfig] = {}
    while left and len(chosen) < count:
        lowest = rates[left[0]] * (1 - _EQUAL_RATES)
        equal = itertools.takewhile(lambda row: rates[row] >= lowest, left)  # noqa: B023  # used up in this round
        row = min(equal, key=lambda row: (allowance_of(configs[row], forecast.plan).rank, -rates[row], row))
        left.remove(row)
        kind = configs[row].model_copy(update={"per_device_train_batch_size": 1, "tf32": False})
        if kind not in chosen and forecast.fits(configs[row]):
            chosen[kind] = configs[row]
    return list(chosen.values()), len(rows)
