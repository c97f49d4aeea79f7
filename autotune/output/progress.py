"""Shows a running search: a live display in a terminal, a plain line an event elsewhere. Listens to the tuner's events.

What has happened is printed in both, so that it stays in the scroll-back or the log.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.live import Live

from autotune.output.live_view import LiveView
from autotune.output.table import measurement_detail, trial_line
from autotune.output.trial_details import closing_lines, opening_line
from autotune.units import show_time, visible
from autotune.values.events import Detail, Event, Note, PhaseBegan, TrialEnded, TrialStarted
from autotune.values.trial import Failure

# The display must not compete with what is being timed, and seconds tick in no hurry: docs/log.md has what it costs.
_REFRESHES_PER_SECOND = 0.5


class Progress:
    """An observer that draws on `console`; use it as a context manager.

    Args:
        console: Where; a quiet one draws nothing.
        verbose: Whether predictions, reasons of refusals and conditions are told as well.
        clock: Seconds from some moment on.
    """

    def __init__(self, console: Console, *, verbose: bool = False, clock: Callable[[], float] = time.monotonic) -> None:
        self._console = console
        self._verbose = verbose
        self._view = LiveView(clock)
        self._live: Live | None = None

    def __enter__(self) -> Self:
        if can_be_live(self._console):
            self._live = Live(
                self._view, console=self._console, refresh_per_second=_REFRESHES_PER_SECOND, transient=True
            )
            self._live.start(refresh=True)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()

    def __call__(self, event: Event) -> None:
        """Draw `event`."""
        self._view.take(event)
        match event:
            case TrialEnded():
                self._ended(event)
            case Note():
                self._line(event.text)
            case Detail() if self._verbose:
                self._line(event.text)
            case TrialStarted() if self._verbose:
                self._line(opening_line(event))
            case PhaseBegan() if self._live is None:
                self._line(f"{event.phase} ...")
        if self._live is not None:
            self._live.refresh()

    def _line(self, text: str) -> None:
        self._console.print(visible(text), highlight=False, soft_wrap=True)

    def _ended(self, event: TrialEnded) -> None:
        result = event.result
        outcome = result.outcome
        if isinstance(outcome, Failure):
            detail = outcome.cause
        elif outcome.soaked is not None:
            detail = str(outcome.soaked)
        elif outcome.curve is not None:
            detail = f"{len(outcome.curve.losses)} losses, the last {outcome.curve.losses[-1]:.4g}"
        else:
            detail = measurement_detail(outcome, result.request.prediction)
        purpose = "" if result.request.purpose.explores else f" ({result.request.purpose})"
        line = trial_line(result.request.number, result.status, event.changes, detail)
        place = f", {result.place}" if result.place else ""
        self._line(f"{line}{purpose}, {show_time(result.duration_s)}{place}")
        measured = result.measurement
        own = measured.warnings if measured is not None else ()
        disturbed = measured.conditions.warnings() if measured is not None and measured.conditions is not None else ()
        for warning in (*result.warnings, *own, *disturbed):
            self._line(f"  warning: {warning}")
        for line in closing_lines(result) if self._verbose else ():
            self._line(f"  {line}")


def can_be_live(console: Console) -> bool:
    """Whether a display can be drawn over and over: on a real terminal that is able to, whatever colours are forced."""
    return console.is_interactive and not console.is_dumb_terminal and not console.quiet and console.file.isatty()
