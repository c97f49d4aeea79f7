"""What is alive at the predicted peak of memory, as a table and as an icicle: kind, module by module, operator."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from rich.console import RenderableType

from autotune.output.svg import COMPONENTS, Chart, rectangle, text, text_width
from autotune.output.terminal import table_of
from autotune.units import GIB, show_memory
from autotune.values.estimate import Alive, MemoryBreakdown

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
        kind, knobs = part.rows[0].kind, sorted({row.knob for row in part.rows if row.knob})
        tip = f"{name}\n{show_memory(part.nbytes)}" + (f"\nshrunk by {', '.join(knobs)}" if knobs else "")
        first = kind.partition(" ")[0]
        colour = first if first in COMPONENTS else "beyond"
        yield rectangle(left, level * _HEIGHT, wide, _HEIGHT - 1, f"part part-{colour}", tip)
        if wide > text_width("mm....") + 6:
            yield text(left + 3, level * _HEIGHT + 15, name, limit=wide - 6)
        yield from _drawn(part, left, level + 1, scale)
        left += wide
