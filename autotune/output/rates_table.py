"""Draws the rates of a device: what was measured beside what the data sheets let expect."""

from __future__ import annotations

from rich.console import RenderableType
from rich.table import Table

from autotune.output.fitted import Fitted
from autotune.units import show_rate
from autotune.values.estimate import Rates


def rates_table(measured: Rates, expected: Rates | None, file: str) -> RenderableType:
    """Return the rates as a table.

    Args:
        measured: Kept in `file`.
        expected: By the table, None if the device isn't in it.
        file: Named below the table.
    """
    table = Table(title="rates", title_justify="left", caption=f"kept in {file}", caption_justify="left")
    table.add_column("")
    for heading in ("measured", "by the table"):
        table.add_column(heading, justify="right")
    beside = _rows(expected) if expected else {}
    for name, value in _rows(measured).items():
        table.add_row(name, value, beside.get(name, "-"))
    return Fitted(table)


def _rows(rates: Rates) -> dict[str, str]:
    products = {f"large products, {name}": _flops(flops) for name, flops in rates.matmul_flops.items()}
    return {
        **products,
        "element-wise operators": f"{show_rate(rates.bandwidth / 1e9)} GB/s",
        "an operator at the least": f"{show_rate(rates.launch_s * 1e6)} us",
        "host to device": f"{show_rate(rates.host_bandwidth / 1e9)} GB/s",
    }


def _flops(flops: float) -> str:
    if flops >= 1e12:
        return f"{show_rate(flops / 1e12)} TFLOP/s"
    return f"{show_rate(flops / 1e9)} GFLOP/s"
