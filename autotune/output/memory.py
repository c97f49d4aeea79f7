"""Predicted memory: stacked bars of its components, and what is alive at its peak as a table and as an icicle.

The icicle shows kind, module by module, and operator.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

from rich.console import RenderableType

from autotune.output.drawing import COLOURS, COMPONENTS, ROW, bar, blank, cut, mark, row_axes, row_text, with_legend
from autotune.output.terminal import table_of
from autotune.units import GIB, show_memory
from autotune.values.estimate import Alive, MemoryBreakdown
from autotune.values.result import RunReport

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Rows of the table; what takes less is in the icicle and in JSON.
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


class Slice(NamedTuple):
    """A column of the icicle: a kind, parts of a module's name or an operator, with what is inside."""

    name: str
    level: int  # 0: a kind
    start: int  # bytes to the left of it
    nbytes: int
    kind: str
    knobs: tuple[str, ...]  # that would shrink it


def alive_slices(rows: Sequence[Alive]) -> list[Slice]:
    """Return the columns of the icicle; the parts of each by falling size, a single part joined with the whole."""
    paths = [((row.kind, *filter(None, row.module.replace(".*", "*").split(".")), row.operator), row) for row in rows]
    return list(_slices(paths, 0, 0))


def _slices(paths: Sequence[tuple[tuple[str, ...], Alive]], level: int, start: int) -> Iterator[Slice]:
    parts: dict[str, list[tuple[tuple[str, ...], Alive]]] = {}
    for (first, *others), row in (each for each in paths if each[0]):
        parts.setdefault(first, []).append((tuple(others), row))
    sizes = {name: sum(row.allocated_bytes for _, row in inside) for name, inside in parts.items()}
    for name, nbytes in sorted(sizes.items(), key=lambda item: -item[1]):
        inside, words = parts[name], name
        while inside[0][0] and len({path[:1] for path, _ in inside}) == 1:
            words += f" {inside[0][0][0]}"
            inside = [(path[1:], row) for path, row in inside]
        knobs = sorted({row.knob for _, row in inside if row.knob})
        yield Slice(words, level, start, nbytes, inside[0][1].kind, tuple(knobs))
        yield from _slices(inside, level + 1, start)
        start += nbytes


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


def colour_of(name: str) -> str:
    """Return the name of a component's colour; see `drawing`."""
    first = name.partition(" ")[0]
    return f"part-{first if first in COMPONENTS else 'beyond'}"


def memory_bars(report: RunReport, width: float) -> Figure | None:
    """Return a stacked bar for each breakdown, with a mark at the measured peak."""
    found = report.breakdowns
    if not found:
        return None
    label = "Predicted peak memory by component, and what was measured"
    figure = blank(width, len(found) * (ROW + 16) + 6, label)
    axes = row_axes(figure, len(found))
    axes.axis("off")
    for row, breakdown in enumerate(found):
        said = f"predicted {show_memory(breakdown.predicted.device_peak_bytes)}"
        at = 0
        for name, size in memory_parts(breakdown.predicted, on_cpu=report.hardware.is_cpu).items():
            if size > 0:
                tip = f"{breakdown.name}: {name} {show_memory(size)}"
                bar(axes, row, at, size, COLOURS[colour_of(name)], tip, label=name)
                at += size
        if breakdown.measured_bytes is not None:
            shown = f"measured {show_memory(breakdown.measured_bytes)}"
            said += f", {shown}"
            mark(
                axes,
                "measured peak",
                breakdown.measured_bytes,
                row + 0.98,
                f"{breakdown.name}: {shown}",
                "measured peak",
            )
        row_text(axes, row, breakdown.name, said, width)
    return with_legend(figure, width, left=4, right=16, top=0, bottom=6)


def icicle(rows: Sequence[Alive], width: float) -> Figure | None:
    """Return a chart whose top is all that is alive and whose columns get finer downwards; None if nothing is known."""
    found = alive_slices(rows)
    total = sum(s.nbytes for s in found if s.level == 0)
    if not total:
        return None
    levels = 1 + max(s.level for s in found)
    label = f"What is alive at the predicted peak of {show_memory(total)}, by kind, module and operator"
    figure = blank(width, levels * 24.0 + 6, label)
    axes = row_axes(figure, levels)
    axes.axis("off")
    axes.set_xlim(0, total)
    for part in found:
        room = part.nbytes / total * width
        if room < 2:
            continue
        tip = f"{part.name}\n{show_memory(part.nbytes)}" + (
            f"\nshrunk by {', '.join(part.knobs)}" if part.knobs else ""
        )
        bar(axes, part.level - 0.2, part.start, part.nbytes, COLOURS[colour_of(part.kind)], tip, height=1.0)
        if room > 50:
            behind = {"facecolor": COLOURS["card"], "edgecolor": "none", "pad": 1}
            axes.text(
                part.start + 6 / width * total, part.level + 0.5, cut(part.name, room - 10), va="center", bbox=behind
            )
    return figure
