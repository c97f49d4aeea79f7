"""A console that prints foreign texts literally, and tables whose cells are never cut.

Names of models, files and devices are printed without rich's markup, with control characters but newlines escaped.
"""

from collections.abc import Collection, Iterable, Sequence
from typing import Any

import rich.console
from rich.console import ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from autotune.units import visible


class Console(rich.console.Console):
    """A console for foreign texts: without markup, names of emoji and control characters."""

    def __init__(self, **options: Any) -> None:
        super().__init__(markup=False, emoji=False, **options)
        if not self.width:  # COLUMNS=0, as of a terminal without a size: rich would print nothing at all
            self.width = 80

    def render_str(self, text: str, **options: Any) -> Text:
        return super().render_str(_printable(text), **options)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Yield segments with control characters escaped, also those of `Text`, which don't pass `render_str`."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else segment._replace(text=_printable(segment.text))

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError  # rich would end the program with exit code 1


def _printable(text: str) -> str:
    return "\n".join(map(visible, text.split("\n")))


def table_of(
    headings: Sequence[str], rows: Iterable[Sequence[str | Text]], *, right: Collection[str] = (), **options: Any
) -> Table:
    """Return a table with `options` of rich's, such as its title; columns headed as in `right` are aligned right."""
    table = Table(**{"title_justify": "left", **options})
    for heading in headings:
        table.add_column(heading, justify="right" if heading in right else "left", overflow="fold")
    for row in rows:
        table.add_row(*row)
    return table
