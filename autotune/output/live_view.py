"""The live display of a running search: phase, running trials, fastest configuration, memory, remaining time.

The view collects the tuner's events and can be drawn at any time and width; `autotune.output.progress` draws it. No
information depends on colour.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.table import Table
from rich.text import Text

from autotune.output.table import show_config
from autotune.space.knobs import shown_changes
from autotune.units import GIB, show_memory, show_rate, show_time
from autotune.values.problem import Event, Phase, PhaseBegan, Standing, TrialEnded, TrialStarted

# Number of concurrent trials that are shown.
_MOST_SHOWN = 3

_SHORTEST_BAR = 6
_LONGEST_BAR = 30

# Share of the budget from which on memory is drawn as a warning: predictions are off by some percent.
_CLOSE = 0.9

# Columns left free at the right: a terminal shows Ctrl-C as ^C at the end of the last line, and if that wrapped, rich
# could not erase the display.
_ECHO = len("^C")


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
        width = min(_LONGEST_BAR, beside if beside >= _SHORTEST_BAR else options.max_width)
        filled = round(min(1.0, share) * width)
        full, empty = ("#", ".") if options.ascii_only else ("█", "░")
        style = "red" if share > 1 else "yellow" if share >= _CLOSE else "cyan"
        text = Text(overflow="fold").append(full * filled, style=style).append(empty * (width - filled), style="dim")
        yield text.append(" " if beside >= _SHORTEST_BAR else "\n").append(self.words)


class _Running(NamedTuple):
    event: TrialStarted
    began_s: float


class LiveView:
    """The state of a running search by its events; `clock` returns seconds since a fixed moment."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._phase = Phase.LOOKING
        self._phase_began_s = clock()
        self._running: dict[int, _Running] = {}
        self._latest: _Running | None = None
        self._standing: Standing | None = None

    def take(self, event: Event) -> None:
        """Update the view by an event."""
        if isinstance(event, PhaseBegan):
            self._enter(event.phase)
        elif isinstance(event, TrialStarted):
            self._enter(Phase.of(event.purpose))
            self._latest = self._running[event.number] = _Running(event, self._clock())
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
        if self._standing is not None:
            grid.add_row("so far", _counts(self._standing))
        yield from console.render(grid, options.update(width=max(1, options.max_width - _ECHO)))

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
        memory = f"{_of(used_bytes, budget)} {what}"
        return MemoryBar(used_bytes, budget, f"{memory} · {more}" if more else memory)


def _of(used_bytes: float, budget_bytes: float) -> str:
    """Return memory and budget in one unit, unless the memory is too small for it: '3.21 of 8.00 GiB'."""
    budget = show_memory(budget_bytes)
    if budget_bytes >= GIB > 10 * used_bytes:
        return f"{show_memory(used_bytes)} of {budget}"
    used = f"{used_bytes / GIB:.2f}" if budget_bytes >= GIB else f"{used_bytes / (1 << 20):.0f}"
    return f"{used} of {budget}"


def _counts(standing: Standing) -> str:
    """Return the numbers of trials by outcome."""
    failed = f"{standing.failed} failed · " if standing.failed else ""
    tried = f"{standing.completed} measured · {standing.out_of_memory} out of memory"
    return f"{tried} · {failed}{standing.refused} refused"


def what_is_left(event: TrialStarted, time_left_s: float) -> str:
    """Return the remaining time and, before finals and checks, trials: 'at most 5 min and 7 trials left'."""
    left = f"at most {show_time(time_left_s)}"
    if event.purpose.closes:
        return f"{left} left"
    return f"{left} and {event.trials_left} trial{'s' if event.trials_left != 1 else ''} left"
