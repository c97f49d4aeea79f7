"""Predicted memory in words and tables: its components, the phases of a training, and what is alive at the peak."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import RenderableType

from autotune.output.terminal import table_of
from autotune.units import GIB, show_memory
from autotune.values.estimate import Alive, MemoryBreakdown
from autotune.values.result import RunReport

# Rows of the table; JSON has them all.
MOST_ROWS = 20


def phases_line(memory: MemoryBreakdown) -> str:
    """Return the largest phase of a training, and what is allocated in each.

    Evaluation and saving can take more: they are shown, and count where the user says how they evaluate.
    """
    each = ", ".join(f"{phase.name} {show_memory(phase.allocated_bytes)}" for phase in memory.phases)
    operator = next((phase.operator for phase in memory.phases if phase.name == memory.phase), "")
    counted = max((phase.allocated_bytes for phase in memory.phases if phase.name == memory.phase), default=0)
    more = " and ".join(phase.name for phase in memory.phases if phase.allocated_bytes > counted)
    left_out = f"; {more}, which takes more, counts with --eval-batch" if more else ""
    return f"the peak is in the phase {memory.phase}, at {operator}; allocated at most: {each}{left_out}"


def alive_table(rows: Sequence[Alive]) -> RenderableType:
    """Return the largest of what is alive at the peak, with the option that would shrink each."""
    cells = [
        (f"{row.allocated_bytes / GIB:.2f}", row.kind, _name(row), str(row.tensors or ""), row.knob or "")
        for row in rows[:MOST_ROWS]
    ]
    if rest := rows[MOST_ROWS:]:
        cells.append((f"{sum(row.allocated_bytes for row in rest) / GIB:.2f}", "", f"{len(rest)} more", "", ""))
    return table_of(("GiB", "at the peak", "module: operator", "of", "shrunk by"), cells, right=("GiB", "of"))


def _name(row: Alive) -> str:
    return ": ".join(filter(None, (row.module, row.operator)))


def memory_parts(memory: MemoryBreakdown, *, on_cpu: bool) -> dict[str, int]:
    """Return the bytes of each component of predicted memory by name.

    The last component is the difference between the others and the device's peak.
    """
    parts = memory.components
    beyond = "beyond the tensors" if on_cpu else "context, allocator"
    return {**parts, beyond: max(0, memory.device_peak_bytes - sum(parts.values()))}


def component_sizes(report: RunReport) -> dict[str, list[int]]:
    """Return the components above 0 in any of a report's breakdowns, with their bytes in each breakdown."""
    stacks = [memory_parts(b.predicted, on_cpu=report.hardware.is_cpu) for b in report.breakdowns]
    names = stacks[0] if stacks else ()
    return {name: [stack[name] for stack in stacks] for name in names if any(stack[name] for stack in stacks)}
