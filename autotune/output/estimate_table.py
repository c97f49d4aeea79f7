"""Draws estimates: one configuration by component, a ranking, the devices of the table; within 80 columns."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from autotune.estimates.report import (
    ConfigReport,
    Device,
    DeviceRow,
    DevicesReport,
    Predicted,
    RankingReport,
    Report,
    RunCost,
    Speed,
    SpreadReport,
)
from autotune.output.fitted import Fitted
from autotune.output.spread_table import spread_parts
from autotune.output.table import show_config
from autotune.units import GIB, show_memory, show_rate
from autotune.values.config import Precision, TrainConfig, Workload
from autotune.values.trial import Interval

_FITS = {
    "yes": "fits {memory}",
    "probably": "fits {memory} by the prediction, but not by the upper end of its interval",
    "probably not": "does not fit {memory} by the prediction, but does by the lower end of its interval",
    "no": "does not fit {memory}",
}


def estimate_table(report: Report, *, with_notes: bool = True) -> RenderableType:
    """Return an estimate as tables and lines, with what was assumed below it."""
    if isinstance(report, ConfigReport):
        parts = _configuration(report)
    elif isinstance(report, RankingReport):
        parts = _ranking(report)
    elif isinstance(report, SpreadReport):
        parts = [*spread_parts(report, _about(report.workload)), *map(Text, _run_lines(report.run))]
    else:
        parts = _devices(report)
    return Group(*parts, *(Text(f"note: {note}") for note in report.notes if with_notes))


def _configuration(report: ConfigReport) -> list[RenderableType]:
    found = report.predicted
    table = Table()
    table.add_column("", overflow="fold")
    table.add_column("predicted", justify="right", no_wrap=True)
    table.add_column("95 % interval", justify="right", no_wrap=True)
    for row in (*_memory_rows(found, on_cpu=report.device.hardware.is_cpu), *_speed_rows(found.speed)):
        table.add_row(*row)
    if found.speed is not None and found.config.parallelism.world_size > 1:
        table.add_row("  waiting for others or the host", f"{found.communication_s / found.speed.step_time_s:.0%}", "")
    world = found.config.parallelism.world_size
    title = f"{_about(report.workload)}, on {f'{world} x ' * (world > 1)}{_device(report.device)}"
    config = f"{show_config(found.config)}; {_accumulation(found)}"
    largest = report.largest_micro_batch
    lines = [
        f"{_FITS[found.fits].format(memory=show_memory(report.device.memory_bytes))}; "
        + (f"largest micro-batch that fits: {largest}" if largest else "no micro-batch does"),
        *_run_lines(report.run),
    ]
    return [Text(title, style="bold"), Text(config), Fitted(table), *map(Text, lines)]


def _memory_rows(found: Predicted, *, on_cpu: bool) -> list[tuple[str, str, str]]:
    memory = found.memory
    components = {
        "weights": memory.weights_bytes,
        "gradients": memory.gradients_bytes,
        "optimizer states": memory.optimizer_state_bytes,
        "activations": memory.activations_bytes,
        "temporaries": memory.temporaries_bytes,
        "communication": memory.communication_bytes,
        "correction by earlier trials": memory.allocated_peak_bytes - _sum(found),
    }
    rows = [(f"  {name}", _gib(value), "") for name, value in components.items() if round(value / GIB, 2)]
    rows.append(("allocated at the peak", _gib(memory.allocated_peak_bytes), _gib_interval(memory.allocated_interval)))
    if not on_cpu:
        rows.append(
            ("reserved by the allocator", _gib(memory.reserved_peak_bytes), _gib_interval(memory.reserved_interval))
        )
    rows.append((f"  beyond the {'tensors' if on_cpu else 'allocator'}", _gib(memory.framework_bytes), ""))
    whole = "process" if on_cpu else "device, as nvidia-smi shows"
    rows.append((whole, _gib(memory.device_peak_bytes), _gib_interval(memory.device_interval)))
    if found.host_bytes:
        rows.append(("  of the host's memory, for each device", _gib(found.host_bytes), ""))
    return rows


def _sum(found: Predicted) -> int:
    """Return the allocated peak as the components have it."""
    memory = found.memory
    return (
        memory.weights_bytes
        + memory.gradients_bytes
        + memory.optimizer_state_bytes
        + memory.activations_bytes
        + memory.temporaries_bytes
        + memory.communication_bytes
    )


def _speed_rows(speed: Speed | None) -> list[tuple[str, str, str]]:
    if speed is None:
        return []
    rows = [
        ("optimizer step, seconds", show_rate(speed.step_time_s), _interval(speed.step_time_interval)),
        ("samples/s", show_rate(speed.samples_per_second), _interval(speed.samples_per_second_interval)),
    ]
    if speed.tokens_per_second is not None and speed.tokens_per_second_interval is not None:
        rows.append(("tokens/s", show_rate(speed.tokens_per_second), _interval(speed.tokens_per_second_interval)))
    if speed.mfu is not None and speed.mfu_interval is not None:
        low, high = speed.mfu_interval.low, speed.mfu_interval.high
        rows.append(("model FLOP utilisation", f"{speed.mfu:.0%}", f"{low:.0%} to {high:.0%}"))
    return rows


def _ranking(report: RankingReport) -> list[RenderableType]:
    title = f"{_about(report.workload)}, on {_device(report.device)}"
    table = Table()
    unit = "tokens/s" if report.workload.task.takes_text else "samples/s"
    with_speed = report.device.rates is not None
    headings = [f"{unit}\n(95 %)", "MFU"] if with_speed else []
    for heading in (*headings, "memory\nGiB", "configuration"):
        table.add_column(heading, justify="left" if heading == "configuration" else "right", overflow="fold")
    for found in report.best:
        sure = "" if found.fits == "yes" else " ?"
        cells = [_rate(found.speed), _share(found.speed.mfu)] if found.speed is not None else []
        table.add_row(*cells, f"{found.memory.device_peak_bytes / GIB:.1f}{sure}", show_config(found.config))
    lines = [
        f"{report.considered} configurations predicted (--allow {report.allowance}), {report.fitting} may fit; of each "
        "kind the best micro-batch"
    ]
    if any(found.fits != "yes" for found in report.best):
        lines.append("? the upper end of the interval is beyond the memory")
    return [Text(title, style="bold"), Fitted(table), *map(Text, (*lines, *_run_lines(report.run)))]


def _devices(report: DevicesReport) -> list[RenderableType]:
    with_run = any(row.run is not None for row in report.rows)
    currency = next(
        (row.run.currency for row in report.rows if row.run is not None and row.run.money is not None), None
    )
    table = Table()
    unit = "tokens/s" if report.workload.task.takes_text else "samples/s"
    headings = [
        "largest\nmicro-\nbatch",
        unit,
        "MFU",
        *(["hours"] if with_run else []),
        *([currency] if currency else []),
    ]
    table.add_column("device\nGiB", overflow="fold")
    for heading in headings:
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("best configuration, its memory", overflow="fold")
    for row in report.rows:
        if row.best is not None:
            table.add_row(*_device_cells(row, row.best, with_run=with_run, with_money=currency is not None))
    left_out: dict[str, list[str]] = {}
    for row in report.rows:
        if row.best is None:
            left_out.setdefault(row.why_not or "", []).append(row.device.name)
    lines = [f"not, as {reason}: {', '.join(names)}" for reason, names in left_out.items()]
    first = next((row.run for row in report.rows if row.run is not None), None)
    return [Text(_about(report.workload), style="bold"), Fitted(table), *map(Text, (*lines, *_work_lines(first)))]


def _device_cells(row: DeviceRow, best: Predicted, *, with_run: bool, with_money: bool) -> list[str]:
    speed, run = best.speed, row.run
    hours = "" if run is None or run.hours is None else f"{run.hours:,.0f}"
    money = "" if run is None or run.money is None else f"{run.money:,.0f}"
    return [
        f"{row.device.name}\n{row.device.memory_bytes / GIB:.1f}",
        str(row.largest_micro_batch or ""),
        "" if speed is None else show_rate(speed.tokens_per_second or speed.samples_per_second),
        "" if speed is None else _share(speed.mfu),
        *([hours] if with_run else []),
        *([money] if with_money else []),
        f"{_brief(best.config)}; {show_memory(best.memory.device_peak_bytes)}",
    ]


def _run_lines(run: RunCost | None) -> list[str]:
    """Return what a run of so many tokens costs."""
    lines = _work_lines(run)
    if run is not None and run.hours is not None and run.hours_interval is not None:
        low, high = run.hours_interval.low, run.hours_interval.high
        hours = f"{show_rate(run.hours)} hours ({show_rate(low)} to {show_rate(high)})"
        where = "one device" if run.devices == 1 else f"{run.devices} devices"
        lines.append(f"{hours} on {where}, so {show_rate(run.gpu_hours or 0.0)} GPU-hours")
    if run is not None and run.money is not None and run.money_interval is not None:
        low, high = run.money_interval.low, run.money_interval.high
        price = f"{run.price_per_hour} {run.currency} an hour"
        lines.append(f"{run.money:,.2f} {run.currency} ({low:,.2f} to {high:,.2f}) at {price}")
    return lines


def _work_lines(run: RunCost | None) -> list[str]:
    if run is None:
        return []
    return [
        f"{run.tokens:.4g} tokens: 6 P D = 6 x {run.parameters:,} x {run.tokens:.4g} = {run.flops_by_parameters:.3e} "
        f"FLOP/s-s = {run.petaflop_s_days_by_parameters:,.3g} PetaFLOP/s-days",
        f"as traced, attention counted and what a token doesn't pass through left out: {run.needed_flops:.3e} "
        f"FLOP/s-s = {run.needed_petaflop_s_days:,.3g} PetaFLOP/s-days",
    ]


def _about(workload: Workload) -> str:
    batch = f"global batch {workload.global_batch_size}" if workload.global_batch_size else "free global batch"
    length = f", {workload.shown_length}" if workload.shown_length else ""
    target = f" + {workload.target_length}" if workload.target_length else ""
    return f"{workload.model.name} ({workload.task}), {batch}{length}{target}"


def _device(device: Device) -> str:
    return f"{device.name} of {show_memory(device.memory_bytes)}"


def _accumulation(found: Predicted) -> str:
    steps = found.accumulation_steps
    return f"{steps} micro-batches a step" if steps > 1 else "one micro-batch a step"


def _brief(config: TrainConfig) -> str:
    """Return what of a configuration devices differ in."""
    tf32 = config.tf32 and config.precision is Precision.FP32
    parts = [str(config.per_device_train_batch_size), "tf32" if tf32 else str(config.precision), config.optim]
    if config.checkpointing != "none":
        parts.append("checkpointing")
    if config.adapter is not None:
        parts.append(config.adapter.kind)
    if config.quantization is not None:
        parts.append(config.quantization)
    return ", ".join(parts)


def _rate(speed: Speed) -> str:
    rate, interval = speed.tokens_per_second, speed.tokens_per_second_interval
    if rate is None or interval is None:
        rate, interval = speed.samples_per_second, speed.samples_per_second_interval
    return f"{show_rate(rate)}\n{_interval(interval)}"


def _interval(interval: Interval) -> str:
    return f"{show_rate(interval.low)} to {show_rate(interval.high)}"


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.0%}"


def _gib(value: float) -> str:
    return f"{value / GIB:.2f} GiB"


def _gib_interval(interval: Interval) -> str:
    return f"{interval.low / GIB:.2f} to {interval.high / GIB:.2f}"
