"""The default observer of a search that is started from Python.

If the logger `autotune` has handlers and level INFO, progress is logged line by line. Otherwise it is shown on stderr
if that is a terminal or a notebook's, and nowhere else. Nothing is printed on stdout.
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
    """Yield the user's observer of a search, or else the default one, which shows nothing if it is to be `quiet`."""
    console = _console() if observer is None and not quiet else None
    if console is None:
        yield ignore if observer is None else observer
        return
    from autotune.output.progress import Progress

    with Progress(console) as progress:
        yield progress


def _console() -> Console | None:
    """Return the console for progress, or None if there is neither a log, a notebook nor a terminal."""
    from autotune.output.terminal import Console

    if LOGGER.isEnabledFor(logging.INFO) and LOGGER.hasHandlers():
        return Console(file=_Log(), width=_COLUMNS, color_system=None, force_jupyter=False)
    console = Console(stderr=True)
    if console.is_jupyter:  # plain lines below the cell: rich itself would print them as output of stdout
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
