"""Predicted memory: stacked bars of its components, and what is alive at its peak as a table and as an icicle.

The icicle shows kind, module by module, and operator.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from rich.console import RenderableType

from autotune.output.svg import COMPONENTS, Chart, mark, rectangle, text, text_width
from autotune.output.terminal import table_of
from autotune.units import GIB, show_memory
from autotune.values.estimate import Alive, MemoryBreakdown
from autotune.values.result import RunReport

# Rows of the table; what takes less is in the icicle and in JSON.
MOST_ROWS = 20

_HEIGHT = 22.0


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


@dataclass
class _Node:
    """A kind, a part of a module's name or an operator, with what is inside."""

    nbytes: int = 0
    rows: list[Alive] = field(default_factory=list)
    parts: dict[str, _Node] = field(default_factory=dict)

    def add(self, path: Sequence[str], row: Alive) -> None:
        """Put a row where its path says."""
        self.nbytes += row.allocated_bytes
        self.rows.append(row)
        if path:
            self.parts.setdefault(path[0], _Node()).add(path[1:], row)

    def depth(self) -> int:
        """Return how many levels there are, this one included."""
        return 1 + max((part.depth() for _, part in self.inside()), default=0)

    def inside(self) -> Iterator[tuple[str, _Node]]:
        """Yield the parts by falling size; one that has a single part is joined with it."""
        for first, part in sorted(self.parts.items(), key=lambda item: -item[1].nbytes):
            name, node = first, part
            while len(node.parts) == 1:
                ((inner, node),) = node.parts.items()
                name += f" {inner}"
            yield name, node


def icicle(rows: Sequence[Alive], width: float) -> Chart | None:
    """Return a chart whose top is all that is alive and whose columns get finer downwards; None if nothing is known."""
    top = _Node()
    for row in rows:
        modules = row.module.replace(".*", "*").split(".") if row.module else []
        top.add([row.kind, *modules, row.operator], row)
    if not top.nbytes:
        return None
    body = "".join(_drawn(top, 1.0, 0, (width - 2) / top.nbytes))
    label = f"What is alive at the predicted peak of {show_memory(top.nbytes)}, by kind, module and operator"
    return Chart(body, width, (top.depth() - 1) * _HEIGHT, label)


def _drawn(node: _Node, left: float, level: int, scale: float) -> Iterator[str]:
    for name, part in node.inside():
        wide = part.nbytes * scale
        if wide < 1:
            break
        knobs = sorted({row.knob for row in part.rows if row.knob})
        tip = f"{name}\n{show_memory(part.nbytes)}" + (f"\nshrunk by {', '.join(knobs)}" if knobs else "")
        yield rectangle(left, level * _HEIGHT, wide, _HEIGHT - 1, _part_class(part.rows[0].kind), tip)
        if wide > text_width("mm....") + 6:
            yield text(left + 3, level * _HEIGHT + 15, name, limit=wide - 6)
        yield from _drawn(part, left, level + 1, scale)
        left += wide


def memory_parts(memory: MemoryBreakdown, *, on_cpu: bool) -> dict[str, int]:
    """Return the bytes of each component of predicted memory by name, in the order of the stacked bar.

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


def component_icon(name: str) -> str:
    """Return the legend's icon of a component, as SVG."""
    return rectangle(1, 2, 16, 12, _part_class(name))


def _part_class(name: str) -> str:
    """Return the CSS class of a component's colour; see `svg`."""
    first = name.partition(" ")[0]
    return f"part part-{first if first in COMPONENTS else 'beyond'}"


def memory_bars(report: RunReport, width: float) -> Chart | None:
    """Return a stacked bar for each breakdown, with a mark at the measured peak."""
    found = report.breakdowns
    if not found:
        return None
    stacks = [memory_parts(b.predicted, on_cpu=report.hardware.is_cpu) for b in found]
    most = max(max(sum(stack.values()), b.measured_bytes or 0) for stack, b in zip(stacks, found, strict=True))
    scale = (width - 16) / most
    parts = []
    for row, (stack, breakdown) in enumerate(zip(stacks, found, strict=True)):
        top, at = row * 66.0, 8.0
        said = f"predicted {show_memory(breakdown.predicted.device_peak_bytes)}"
        measured = breakdown.measured_bytes
        if measured is not None:
            said += f", measured {show_memory(measured)}"
        parts.append(text(2, top + 14, breakdown.name, kind="strong"))
        parts.append(text(width - 2, top + 14, said, anchor="end"))
        for name, size in stack.items():
            if size > 0:
                tip = f"{breakdown.name}: {name} {show_memory(size)}"
                parts.append(rectangle(at, top + 22, size * scale, 22, _part_class(name), tip))
                at += size * scale
        if measured is not None:
            tip = f"{breakdown.name}: measured {show_memory(measured)}"
            parts.append(mark("triangle", 8 + measured * scale, top + 52, "best", tip, 6.0))
    return Chart("".join(parts), width, len(found) * 66.0, "Predicted peak memory by component, and what was measured")
