"""A table that fits where it is printed: none of its words is broken, as long as the longest alone has room.

Where the columns can't stand side by side like that, each row becomes a paragraph of what its columns say. Used by all
that draws tables for the terminal; the tables themselves are rich's.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import zip_longest

from rich.console import Console, ConsoleOptions, RenderResult
from rich.measure import Measurement
from rich.padding import Padding
from rich.style import Style
from rich.table import Column, Table
from rich.text import Text

# Spaces above, right, below and left of a row's paragraph.
_INDENTED = (0, 0, 0, 2)

# As wide as nothing is, for asking how wide something would be.
_UNBOUNDED = 100_000


class Fitted:
    """A table, at the width there is.

    Args:
        table: All of its cells are text.
    """

    def __init__(self, table: Table) -> None:
        self._table = table

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Draw it side by side if it fits, otherwise row by row."""
        spans, frame = self._needed(console, options)
        room = options.max_width - frame
        if sum(span.minimum for span in spans) > room:
            yield from self._stacked(console)
            return
        for column, width in zip(self._table.columns, _widths(spans, room), strict=True):
            column.width = width
        yield self._table

    def _needed(self, console: Console, options: ConsoleOptions) -> tuple[list[Measurement], int]:
        """Return how wide each column has to be, and would be at the most, and what lines and padding take."""
        unbounded = options.update(width=_UNBOUNDED)
        for column in self._table.columns:
            column.width = None
        spans = [_span(console, unbounded, column) for column in self._table.columns]
        whole = Measurement.get(console, unbounded, self._table).maximum
        return spans, whole - sum(span.maximum for span in spans)

    def _stacked(self, console: Console) -> Iterator[Text | Padding]:
        """Yield the title, and of each row its first cell and a paragraph of the others that say something."""
        if self._table.title:
            yield _text(console, self._table.title, self._table.title_style)
        names = [" ".join(_text(console, column.header).plain.split()) for column in self._table.columns]
        rows = zip(*(column.cells for column in self._table.columns), strict=True)
        for row, cells in zip_longest(self._table.rows, rows):
            first, *others = (_text(console, cell, row.style) for cell in cells)
            yield Text.assemble((f"{names[0]} ", "dim"), first) if first.plain.isdigit() else first
            said = [
                Text.assemble((f"{name} " if name else "", "dim"), cell)
                for name, cell in zip(names[1:], others, strict=True)
                if cell.plain.strip()
            ]
            yield Padding(Text(" · ", "dim").join(said), _INDENTED, expand=False)
        if self._table.caption:
            yield _text(console, self._table.caption)


def _text(console: Console, cell: object, style: Style | str | None = None) -> Text:
    found = cell if isinstance(cell, Text) else console.render_str(str(cell))
    found = found.copy()
    found.stylize_before(style or "")
    return found


def _span(console: Console, options: ConsoleOptions, column: Column) -> Measurement:
    """Return the width of a column's longest word, or line where it must not be wrapped, and of its longest line."""
    cells = [Measurement.get(console, options, cell) for cell in (column.header, *column.cells)]
    most = max(cell.maximum for cell in cells)
    return Measurement(most if column.no_wrap else max(cell.minimum for cell in cells), most)


def _widths(spans: Sequence[Measurement], room: int) -> list[int]:
    """Return a width for each column: what it needs, and an even share of the rest to who can use it."""
    widths = [span.minimum for span in spans]
    left = room - sum(widths)
    wanting = sorted(range(len(spans)), key=lambda i: spans[i].maximum - spans[i].minimum)
    for done, i in enumerate(wanting):
        share = min(spans[i].maximum - spans[i].minimum, left // (len(wanting) - done))
        widths[i] += share
        left -= share
    return widths
