"""Shows the events of a running search: as a live display in a terminal, as plain lines elsewhere.

Finished trials and notes are printed in both, so that they stay in the scroll-back or the log. `--verbose` adds the
prediction of each trial, disturbances, and its seconds by phase.

A search that is started from Python logs its progress line by line if the logger `autotune` has handlers and level
INFO. Otherwise it is shown on stderr if that is a terminal or a notebook's, and nowhere else; never on stdout.
"""

from __future__ import annotations

import contextlib
import io
import logging
import sys
import time
from collections.abc import Callable, Iterator
from typing import Self

from rich.console import Console
from rich.live import Live

from autotune.output import terminal
from autotune.output.live_view import LiveView, what_is_left
from autotune.output.table import measurement_detail, trial_line
from autotune.space.knobs import shown_changes
from autotune.units import show_memory, show_rate, show_time, visible
from autotune.values.conditions import Conditions
from autotune.values.problem import Detail, Event, Note, Observer, PhaseBegan, TrialEnded, TrialStarted, ignore
from autotune.values.trial import Failure, Phases, TrialResult

LOGGER = logging.getLogger("autotune")

# Lines are not wrapped, so this only bounds what rich would pad.
_COLUMNS = 120

# Low, since drawing (4.3 ms of processor time, rich 15.0, 80 columns) competes with the measured trial.
_REFRESHES_PER_SECOND = 0.5

_SHARES = {"others_share": "other processes", "stolen_share": "the hypervisor", "waited_share": "waiting for a core"}


class Progress:
    """An observer that draws on `console` while entered; `verbose`: predictions, refusals and conditions as well."""

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

    def __exit__(self, *raised: object) -> None:
        if self._live is not None:
            self._live.stop()

    def __call__(self, event: Event) -> None:
        """Show `event`."""
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
        result, outcome = event.result, event.result.outcome
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
    """Return whether the console is a terminal that can redraw; rich's forced colours don't make it one."""
    return console.is_interactive and not console.is_dumb_terminal and not console.quiet and console.file.isatty()


def opening_line(event: TrialStarted) -> str:
    """Return the line about a trial that begins: changes, prediction, remaining time."""
    left = what_is_left(event, event.time_left_s)
    expected = "nothing is predicted of it"
    if (prediction := event.prediction) is not None:
        rate, peak = show_rate(prediction.samples_per_second), show_memory(prediction.peak_bytes)
        expected = f"predicted {rate} samples/s, peak {peak}"
    return f"trial {event.number} begins ({event.purpose}): {shown_changes(event.changes)}: {expected}; {left}"


def closing_lines(result: TrialResult) -> list[str]:
    """Return a trial's seconds by phase, its conditions and effects, a line each."""
    measured, phases = result.measurement, result.outcome.phases
    lines = [f"seconds: {_seconds(phases)}"] if phases is not None else []
    if measured is not None:
        if measured.conditions is not None and (seen := _conditions(measured.conditions)):
            lines.append(f"conditions: {seen}")
        if effects := [f"{knob} {seen}" for knob, seen in measured.effects.items() if seen != "none"]:
            lines.append(f"in effect: {', '.join(effects)}")
    return lines


def _seconds(phases: Phases) -> str:
    spent = {name.removesuffix("_s").replace("_", " "): seconds for name, seconds in phases}
    return ", ".join(f"{name} {seconds:.1f}" for name, seconds in spent.items() if seconds >= 0.05)


def _conditions(seen: Conditions) -> str:
    parts = [f"{what} {share:.1%}" for name, what in _SHARES.items() if (share := getattr(seen, name)) is not None]
    if seen.clock_mhz is not None:
        highest = f" of {seen.max_clock_mhz:.0f}" if seen.max_clock_mhz is not None else ""
        parts.append(f"clock {seen.clock_mhz:.0f}{highest} MHz")
    if seen.idle_share is not None:
        parts.append(f"GPU idle {seen.idle_share:.0%}")
    if seen.temperature_c is not None:
        parts.append(f"{seen.temperature_c:.0f} °C")
    return ", ".join(parts)


@contextlib.contextmanager
def heard_by(observer: Observer | None, *, quiet: bool = False) -> Iterator[Observer]:
    """Yield the user's observer of a search, or else the default one, which shows nothing if it is to be `quiet`."""
    console = _console() if observer is None and not quiet else None
    if console is None:
        yield ignore if observer is None else observer
        return
    with Progress(console) as progress:
        yield progress


def _console() -> Console | None:
    """Return the console for progress, or None if there is neither a log, a notebook nor a terminal."""
    if LOGGER.isEnabledFor(logging.INFO) and LOGGER.hasHandlers():
        return terminal.Console(file=_Log(), width=_COLUMNS, color_system=None, force_jupyter=False)
    console = terminal.Console(stderr=True)
    if console.is_jupyter:  # plain lines below the cell: rich itself would print them as output of stdout
        return terminal.Console(file=sys.stderr, width=_COLUMNS, color_system=None, force_jupyter=False)
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
