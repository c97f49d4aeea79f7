"""Draws the GPU table, within 80 columns."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from autotune.output.fitted import Fitted
from autotune.values.catalogue.gpus import Dtype, Gpu

NOTE = (
    "TFLOP/s are dense peaks with fp32 accumulation, by the data sheets; attainable is less. Memory is what a process "
    "may use; ~ nominal or as the driver shows it, a little more than that. --json gives fp8, int8 and the sources."
)


def gpus_table(found: Sequence[Gpu]) -> RenderableType:
    """Return devices as a table: memory, bandwidth, peaks."""
    table = Table(title=f"{len(found)} GPUs", title_justify="left")
    table.add_column("name", overflow="fold")
    for heading in ("memory\nGiB", "bandwidth\nGB/s", "bf16 / fp16\nTFLOP/s", "tf32 / fp32\nTFLOP/s"):
        table.add_column(heading, justify="right", no_wrap=True)
    for gpu in found:
        table.add_row(
            gpu.name,
            f"{'' if gpu.memory_from == 'cuda' else '~'}{gpu.memory_gib:.1f}",
            f"{gpu.bandwidth_gb_s:,.0f}",
            _pair(gpu, "bf16", "fp16"),
            _pair(gpu, "tf32", "fp32"),
        )
    return Group(Fitted(table), Text(NOTE))


def _pair(gpu: Gpu, left: Dtype, right: Dtype) -> str:
    return f"{_peak(gpu, left)} / {_peak(gpu, right)}"


def _peak(gpu: Gpu, dtype: Dtype) -> str:
    tflops = gpu.peak_tflops.get(dtype)
    if tflops is None:
        return "-"
    return f"{tflops:,.0f}" if tflops >= 100 else f"{tflops:.1f}"
