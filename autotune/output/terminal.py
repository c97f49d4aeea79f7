"""A console that prints foreign texts literally, and tables that adapt to its width.

Names of models, files and devices are printed without rich's markup, with control characters escaped (see `visible`).
Newlines are kept, since tables contain them; a caller that prints one line removes them.

Tables don't break words that have room in a line. Where the columns don't fit side by side, each row becomes a
paragraph of its cells.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

import rich.console
from rich.console import ConsoleOptions, RenderableType, RenderResult
from rich.measure import Measurement
from rich.padding import Padding
from rich.segment import Segment
from rich.style import Style
from rich.table import Table
from rich.text import Text

from autotune.units import visible


class Console(rich.console.Console):
    """A console for foreign texts: without markup, names of emoji and control characters."""

    def __init__(self, **options: Any) -> None:
        super().__init__(markup=False, emoji=False, **options)

    def render_str(self, text: str, **options: Any) -> Text:
        """Return a string as a text, with control characters escaped."""
        return super().render_str(_seen(text), **options)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Yield segments with control characters escaped, also those of `Text`, which don't pass `render_str`."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else segment._replace(text=_seen(segment.text))


@dataclass(frozen=True)
class Fitted:
    """A table that adapts to the available width; its cells are all text."""

    table: Table

    def __rich_console__(self, console: rich.console.Console, options: ConsoleOptions) -> RenderResult:
        """Draw the table if it fits, otherwise a paragraph for each row."""
        spans, frame = self._needed(console, options)
        room = options.max_width - frame
        if sum(span.minimum for span in spans) > room:
            yield from self._stacked(console)
            return
        for column, width in zip(self.table.columns, _widths(spans, room), strict=True):
            column.width = width
        yield self.table

    def _needed(self, console: rich.console.Console, options: ConsoleOptions) -> tuple[list[Measurement], int]:
        """Return the minimum and maximum width of each column, and the width of lines and padding."""
        unbounded = options.update(width=100_000)
        for column in self.table.columns:
            column.width = None
        spans = []  # a column's longest word (its longest line, if it isn't wrapped) and its longest line
        for column in self.table.columns:
            cells = [Measurement.get(console, unbounded, cell) for cell in (column.header, *column.cells)]
            most = max(cell.maximum for cell in cells)
            spans.append(Measurement(most if column.no_wrap else max(cell.minimum for cell in cells), most))
        whole = Measurement.get(console, unbounded, self.table).maximum
        return spans, whole - sum(span.maximum for span in spans)

    def _stacked(self, console: rich.console.Console) -> Iterator[Text | Padding]:
        """Yield the title and, for each row, its first cell and a paragraph of its other non-empty cells."""
        if self.table.title:
            yield _text(console, self.table.title, self.table.title_style)
        names = [" ".join(_text(console, column.header).plain.split()) for column in self.table.columns]
        rows = zip(*(column.cells for column in self.table.columns), strict=True)
        for row, cells in zip_longest(self.table.rows, rows):
            first, *others = (_text(console, cell, row.style) for cell in cells)
            yield Text.assemble((f"{names[0]} ", "dim"), first) if first.plain.isdigit() else first
            said = [
                Text.assemble((f"{name} " if name else "", "dim"), cell)
                for name, cell in zip(names[1:], others, strict=True)
                if cell.plain.strip()
            ]
            yield Padding(Text(" · ", "dim").join(said), (0, 0, 0, 2), expand=False)
        if self.table.caption:
            yield _text(console, self.table.caption)


def table_of(
    headings: Sequence[str],
    rows: Iterable[Sequence[str | Text]],
    *,
    right: Collection[str] = (),
    whole: Collection[str] = (),
    **options: Any,
) -> Fitted:
    """Return a table that adapts to the available width, with `options` of rich's table, such as its title.

    Columns whose headings are in `right` are aligned right; the lines of those in `whole` are never broken.
    """
    table = Table(**{"title_justify": "left", **options})
    for heading in headings:
        is_right = heading in right
        table.add_column(heading, justify="right" if is_right else "left", no_wrap=heading in whole, overflow="fold")
    for row in rows:
        table.add_row(*row)
    return Fitted(table)


def _text(console: rich.console.Console, cell: object, style: Style | str | None = None) -> Text:
    found = cell if isinstance(cell, Text) else console.render_str(str(cell))
    found = found.copy()
    found.stylize_before(style or "")
    return found


def _widths(spans: Sequence[Measurement], room: int) -> list[int]:
    """Return the width of each column: its minimum, and an even share of the rest up to its maximum."""
    widths = [span.minimum for span in spans]
    left = room - sum(widths)
    wanting = sorted(range(len(spans)), key=lambda i: spans[i].maximum - spans[i].minimum)
    for done, i in enumerate(wanting):
        share = min(spans[i].maximum - spans[i].minimum, left // (len(wanting) - done))
        widths[i] += share
        left -= share
    return widths


def _seen(text: str) -> str:
    return "\n".join(map(visible, text.split("\n")))
