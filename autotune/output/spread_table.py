"""Draws the ways to spread a training over devices as a table, within 80 columns. Called by `estimate_table`."""

from __future__ import annotations

from rich import box
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from autotune.estimates.report import SpreadReport, SpreadRow
from autotune.output.fitted import Fitted
from autotune.units import GIB, show_rate


def spread_parts(report: SpreadReport, about: str) -> list[RenderableType]:
    """Return the heading, the table and what isn't possible.

    Args:
        report: The ways.
        about: The workload in words.
    """
    nodes = "one node" if report.nodes == 1 else f"{report.nodes} nodes"
    title = f"{about}, on {report.devices} x {report.device.name} in {nodes}"
    with_host = any(row.host_bytes for row in report.rows)
    with_speed = report.device.rates is not None
    unit = "tokens/s" if report.workload.task.takes_text else "samples/s"
    table = Table(box=box.SIMPLE_HEAD)
    table.add_column("way", overflow="fold")
    headings = [unit, "MFU", "wait"] if with_speed else []
    for heading in (*headings, "GiB", *(["host\nGiB"] if with_host else []), "micro x\nsteps"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("check-\npoint", no_wrap=True)
    for row in report.rows:
        table.add_row(*_cells(row, with_host=with_host, with_speed=with_speed))
    lines = [
        f"{sum(row.fits_at_all for row in report.rows)} of {len(report.rows)} ways fit; no: the device's memory, "
        "host: a node's memory is too small; ?: by the prediction, but not by the upper end of its interval",
        f"{unit}: all devices together; wait: the share of a step in which devices wait for each other or for the "
        "host; GiB: of each device, as nvidia-smi shows"
        + ("; host: of each node; " if with_host else "; ")
        + "micro x steps: samples of a micro-batch, micro-batches of a step; TP, PP, DP: tensor, pipeline and data "
        "parallel",
    ]
    lines += [f"not possible: {', '.join(names)}: {reason}" for reason, names in report.refused.items()]
    return [Text(title, style="bold"), Fitted(table), *map(Text, lines)]


def _cells(row: SpreadRow, *, with_host: bool, with_speed: bool) -> list[str]:
    found = row.predicted
    cells = [row.way]
    if with_speed:
        cells += _speed_cells(row)
    cells.append(f"{found.memory.device_peak_bytes / GIB:.1f} {_mark(row)}".rstrip())
    if with_host:
        cells.append(f"{row.host_bytes / GIB:,.0f}" if row.host_bytes else "")
    cells.append(f"{found.config.per_device_train_batch_size} x {found.accumulation_steps}")
    return [*cells, found.config.checkpointing]


def _speed_cells(row: SpreadRow) -> list[str]:
    speed = row.predicted.speed
    if speed is None or not row.fits_at_all:
        return ["", "", ""]
    mfu = "-" if speed.mfu is None else f"{speed.mfu:.0%}"
    waiting = row.predicted.communication_s / speed.step_time_s
    return [show_rate(speed.tokens_per_second or speed.samples_per_second), mfu, f"{waiting:.0%}"]


def _mark(row: SpreadRow) -> str:
    if not row.predicted.fits_at_all:
        return "no"
    if not row.host_fits:
        return "host"
    return "" if row.predicted.fits == "yes" else "?"
