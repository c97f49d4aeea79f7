"""Shows the events of a running search: as a live display in a terminal, as plain lines elsewhere.

The display has phase, running trials, fastest configuration, memory and remaining time; no information depends on
colour. Finished trials and notes are printed in both, so that they stay in the scroll-back or the log. `--verbose` adds
the prediction of each trial, disturbances, and its seconds by phase.

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
from dataclasses import dataclass
from typing import Any, Self

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.live import Live
from rich.table import Table
from rich.text import Text

from autotune.output import terminal
from autotune.output.table import measurement_detail, show_config, trial_line
from autotune.space.knobs import shown_changes
from autotune.units import GIB, show_memory, show_rate, show_time, visible
from autotune.values.problem import (
    Detail,
    Event,
    Note,
    Observer,
    Phase,
    PhaseBegan,
    Standing,
    TrialEnded,
    TrialStarted,
    ignore,
)
from autotune.values.trial import Failure, TrialResult

# Number of concurrent trials that are shown.
_MOST_SHOWN = 3


@dataclass(frozen=True)
class MemoryBar:
    """Memory as a bar, which the budget fills, with `words` after it, or below it where there is no room."""

    used_bytes: float
    budget_bytes: float
    words: str

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Draw the bar at the available width."""
        share = self.used_bytes / self.budget_bytes
        beside = options.max_width - cell_len(self.words) - 1
        is_beside = beside >= 6
        width = min(30, beside if is_beside else options.max_width)
        filled = round(min(1.0, share) * width)
        full, empty = ("#", ".") if options.ascii_only else ("█", "░")
        style = "red" if share > 1 else "yellow" if share >= 0.9 else "cyan"  # predictions are off by some percent
        text = Text(overflow="fold").append(full * filled, style=style).append(empty * (width - filled), style="dim")
        yield text.append(" " if is_beside else "\n").append(self.words)


class LiveView:
    """The state of a running search by its events; `clock` returns seconds since a fixed moment."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._phase = Phase.LOOKING
        self._phase_began_s = clock()
        self._running: dict[int, tuple[TrialStarted, float]] = {}  # with when it began
        self._latest: tuple[TrialStarted, float] | None = None
        self._standing: Standing | None = None

    def take(self, event: Event) -> None:
        """Update the view by an event."""
        if isinstance(event, PhaseBegan):
            self._enter(event.phase)
        elif isinstance(event, TrialStarted):
            self._enter(Phase.of(event.purpose))
            self._latest = self._running[event.number] = (event, self._clock())
            self._standing = event.standing or self._standing
        elif isinstance(event, TrialEnded):
            self._running.pop(event.result.request.number, None)
            self._standing = event.standing or self._standing

    def _enter(self, phase: Phase) -> None:
        if phase is not self._phase:
            self._phase, self._phase_began_s = phase, self._clock()

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Draw the search as it stands now."""
        grid = Table.grid(padding=(0, 1))
        grid.add_column(no_wrap=True, style="dim")
        grid.add_column(overflow="fold")
        grid.add_row("now", self._headline())
        for label, drawn in (*self._trial_rows(), *self._leader_rows()):
            grid.add_row(label, drawn)
        if (counts := self._standing) is not None:
            failed = f"{counts.failed} failed · " if counts.failed else ""
            tried = f"{counts.completed} measured · {counts.out_of_memory} out of memory"
            grid.add_row("so far", f"{tried} · {failed}{counts.refused} refused")
        # A terminal shows Ctrl-C as ^C at the end of the last line; if that wrapped, rich could not erase the display.
        yield from console.render(grid, options.update(width=max(1, options.max_width - len("^C"))))

    def _headline(self) -> Text:
        """Return the phase, and the remaining time and trials."""
        text = Text(str(self._phase), style="bold")
        if self._latest is None:
            return text.append(f" · {show_time(self._clock() - self._phase_began_s)}", style="not bold")
        event, began_s = self._latest
        left_s = max(0.0, event.time_left_s - (self._clock() - began_s))
        return text.append(f" · {what_is_left(event, left_s)}", style="not bold")

    def _trial_rows(self) -> list[tuple[str, RenderableType]]:
        running = list(self._running.values())
        rows: list[tuple[str, RenderableType]] = []
        for event, began_s in running[:_MOST_SHOWN]:
            whole = "" if event.changes else f": {show_config(event.config)}"  # of the baseline
            rows.append((f"trial {event.number}", Text(shown_changes(event.changes) + whole)))
            elapsed = show_time(self._clock() - began_s)
            expected = event.prediction.peak_bytes if event.prediction is not None else None
            rows.append(("", self._bar(expected, "predicted", elapsed)))
        if len(running) > _MOST_SHOWN:
            rows.append(("", Text(f"and {len(running) - _MOST_SHOWN} more trials at once")))
        return rows

    def _leader_rows(self) -> list[tuple[str, RenderableType]]:
        leader = self._standing.leader if self._standing is not None else None
        if leader is None:
            return []
        rate = f"{show_rate(leader.samples_per_second)} samples/s"
        if leader.speedup is not None:
            rate += f" · {leader.speedup:.2f} x the baseline"
        return [
            ("best", Text(shown_changes(leader.changes))),
            ("", Text(rate, style="green" if (leader.speedup or 0) > 1 else "")),
            ("", self._bar(leader.peak_bytes, "at its peak")),
        ]

    def _bar(self, used_bytes: float | None, what: str, more: str = "") -> RenderableType:
        """Return a bar of memory, or the text alone if the memory is unknown."""
        if used_bytes is None or self._standing is None:
            return Text(more)
        budget = self._standing.memory_bytes
        if budget >= GIB > 10 * used_bytes:  # too small for the budget's unit
            used = show_memory(used_bytes)
        else:
            used = f"{used_bytes / GIB:.2f}" if budget >= GIB else f"{used_bytes / (1 << 20):.0f}"
        memory = f"{used} of {show_memory(budget)} {what}"
        return MemoryBar(used_bytes, budget, f"{memory} · {more}" if more else memory)


def what_is_left(event: TrialStarted, time_left_s: float) -> str:
    """Return the remaining time and, before finals and checks, trials: 'at most 5 min and 7 trials left'."""
    left = f"at most {show_time(time_left_s)}"
    if event.purpose.closes:
        return f"{left} left"
    return f"{left} and {event.trials_left} trial{'s' if event.trials_left != 1 else ''} left"


LOGGER = logging.getLogger("autotune")

# Lines are not wrapped, so this only bounds what rich would pad.
_COLUMNS = 120

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
            # Seldom, since drawing (4.3 ms of processor time, rich 15.0, 80 columns) competes with the measured trial.
            self._live = Live(self._view, console=self._console, refresh_per_second=0.5, transient=True)
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
                self._began(event)
            case PhaseBegan() if self._live is None:
                self._line(f"{event.phase} ...")
        if self._live is not None:
            self._live.refresh()

    def _line(self, text: str) -> None:
        self._console.print(visible(text), highlight=False, soft_wrap=True)

    def _began(self, event: TrialStarted) -> None:
        expected = "nothing is predicted of it"
        if (prediction := event.prediction) is not None:
            rate, peak = show_rate(prediction.samples_per_second), show_memory(prediction.peak_bytes)
            expected = f"predicted {rate} samples/s, peak {peak}"
        left = what_is_left(event, event.time_left_s)
        about = f"trial {event.number} begins ({event.purpose}): {shown_changes(event.changes)}"
        self._line(f"{about}: {expected}; {left}")

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
        for line in _details(result) if self._verbose else ():
            self._line(f"  {line}")


def can_be_live(console: Console) -> bool:
    """Return whether the console is a terminal that can redraw; rich's forced colours don't make it one."""
    return console.is_interactive and not console.is_dumb_terminal and not console.quiet and console.file.isatty()


def _details(result: TrialResult) -> Iterator[str]:
    """Yield a trial's seconds by phase, its conditions and effects, a line each."""
    if (phases := result.outcome.phases) is not None:
        spent = {name.removesuffix("_s").replace("_", " "): seconds for name, seconds in phases}
        yield f"seconds: {', '.join(f'{name} {s:.1f}' for name, s in spent.items() if s >= 0.05)}"
    if (measured := result.measurement) is None:
        return
    if (seen := measured.conditions) is not None:
        parts = [f"{what} {share:.1%}" for name, what in _SHARES.items() if (share := getattr(seen, name)) is not None]
        if seen.clock_mhz is not None:
            highest = f" of {seen.max_clock_mhz:.0f}" if seen.max_clock_mhz is not None else ""
            parts.append(f"clock {seen.clock_mhz:.0f}{highest} MHz")
        if seen.idle_share is not None:
            parts.append(f"GPU idle {seen.idle_share:.0%}")
        if seen.temperature_c is not None:
            parts.append(f"{seen.temperature_c:.0f} °C")
        if parts:
            yield f"conditions: {', '.join(parts)}"
    if effects := [f"{knob} {effect}" for knob, effect in measured.effects.items() if effect != "none"]:
        yield f"in effect: {', '.join(effects)}"


@contextlib.contextmanager
def heard_by(observer: Observer | None, *, quiet: bool = False) -> Iterator[Observer]:
    """Yield the user's observer of a search, or else the default one, which shows nothing if it is to be `quiet`.

    Nothing is shown either where there is neither a log, a notebook nor a terminal.
    """
    console: Console | None = None
    if observer is None and not quiet:
        plain: dict[str, Any] = {"width": _COLUMNS, "color_system": None, "force_jupyter": False}
        console = terminal.Console(stderr=True)
        if LOGGER.isEnabledFor(logging.INFO) and LOGGER.hasHandlers():
            console = terminal.Console(file=_Log(), **plain)
        elif console.is_jupyter:  # plain lines below the cell: rich itself would print them as output of stdout
            console = terminal.Console(file=sys.stderr, **plain)
        elif sys.stderr is None or not sys.stderr.isatty():
            console = None
    if console is None:
        yield ignore if observer is None else observer
        return
    with Progress(console) as progress:
        yield progress


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
