"""The terminal: rich's console, through which nothing acts but what is drawn here.

Names of models, files and devices are printed as they are, brackets and colons included, and what can't be seen as its
escape (see `visible`). New lines are left alone: tables have some of their own. Who prints a line makes it one.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import rich.console
from rich.console import ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.text import Text

from autotune.units import visible


class Console(rich.console.Console):
    """A console for texts of others: no markup, no names of emoji, no control characters.

    Args:
        **options: Of rich's console.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(markup=False, emoji=False, **options)

    def render_str(self, text: str, **options: Any) -> Text:
        """Return a text as it is measured and drawn."""
        return super().render_str(_seen(text), **options)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Yield what is drawn: also of texts that were no strings, which `render_str` doesn't see."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else segment._replace(text=_seen(segment.text))


def _seen(text: str) -> str:
    return "\n".join(map(visible, text.split("\n")))
