"""Who hears of a search that is started from Python without an observer of its own.

A program whose log takes what this package logs finds it there, line by line (logger `autotune`, level INFO). Otherwise
somebody who sits at a terminal or a notebook is shown on stderr how the search goes, and nobody else is told anything.
Nothing is ever printed on stdout. Called by `autotune.api`.
"""

from __future__ import annotations

import contextlib
import io
import logging
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

from autotune.values.events import Observer, ignore

if TYPE_CHECKING:
    from autotune.output.terminal import Console

LOGGER = logging.getLogger("autotune")

# Lines are not wrapped, so this only bounds what rich would pad.
_COLUMNS = 120


@contextlib.contextmanager
def heard_by(observer: Observer | None, *, quiet: bool = False) -> Iterator[Observer]:
    """Yield who hears of a search: the one that was given, or whoever is there.

    Args:
        observer: Of the user.
        quiet: Whether nobody is told where none was given.
    """
    console = _console() if observer is None and not quiet else None
    if console is None:
        yield ignore if observer is None else observer
        return
    from autotune.output.progress import Progress

    with Progress(console) as progress:
        yield progress


def _console() -> Console | None:
    """Return where to a search is told; None: nobody would read it."""
    from autotune.output.terminal import Console

    if LOGGER.isEnabledFor(logging.INFO) and LOGGER.hasHandlers():
        return Console(file=_Log(), width=_COLUMNS, color_system=None, force_jupyter=False)
    console = Console(stderr=True)
    if console.is_jupyter:  # in plain lines below the cell: rich's own way there is to print each on stdout's place
        return Console(file=sys.stderr, width=_COLUMNS, color_system=None, force_jupyter=False)
    return console if sys.stderr is not None and sys.stderr.isatty() else None


class _Log(io.StringIO):
    """A file whose lines are logged."""

    def __init__(self) -> None:
        super().__init__()
        self._begun = ""

    def write(self, text: str) -> int:
        """Log the lines that are complete."""
        *lines, self._begun = (self._begun + text).split("\n")
        for line in lines:
            LOGGER.info("%s", line)
        return len(text)
