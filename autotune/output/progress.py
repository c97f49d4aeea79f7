"""Shows the events of a running search: a line for each finished trial and note, and in a terminal live lines below.

No information depends on colour. `--verbose` adds the prediction of each trial, and how each knob took effect.

A search that is started from Python logs its progress line by line if the logger `autotune` has handlers and level
INFO. Otherwise it is shown on stderr if that is a terminal or a notebook's, and nowhere else; never on stdout.
"""

import contextlib
import logging
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Self

from rich.console import Console
from rich.constrain import Constrain
from rich.live import Live
from rich.text import Text

from autotune.output import terminal
from autotune.output.table import measurement_detail, trial_line
from autotune.space.knobs import shown_changes
from autotune.units import show_memory, show_rate, show_time, visible
from autotune.values.problem import Event, Leader, Note, Observer, Phase, PhaseBegan, TrialEnded, TrialStarted, ignore
from autotune.values.trial import Failure

LOGGER = logging.getLogger("autotune")


class Progress:
    """An observer that writes lines, by `write` or to a console, and while entered draws live lines below them.

    The live lines need a console that can redraw. `verbose`: predictions and effects are told as well.
    What can't be shown, on a terminal that is gone or a full disk, is left out, and the search goes on.
    """

    def __init__(
        self,
        console: Console,
        *,
        verbose: bool = False,
        clock: Callable[[], float] = time.monotonic,
        write: Callable[[str], None] | None = None,
    ) -> None:
        self._console = console
        self._verbose = verbose
        self._clock = clock
        self._write = write or partial(console.print, highlight=False, soft_wrap=True)
        self._live: Live | None = None
        self._phase, self._phase_began_s = Phase.LOOKING, clock()
        self._running: dict[int, tuple[TrialStarted, float]] = {}  # with when it began
        self._latest: tuple[TrialStarted, float] | None = None
        self._leader: Leader | None = None

    def __enter__(self) -> Self:
        if can_be_live(self._console):
            # Seldom, since drawing competes with the measured trial for the processor.
            self._live = Live(console=self._console, get_renderable=self.drawn, refresh_per_second=0.5, transient=True)
            self._live.start(refresh=True)
        return self

    def __exit__(self, *raised: object) -> None:
        with contextlib.suppress(OSError):
            if self._live is not None:
                self._live.stop()

    def __call__(self, event: Event) -> None:
        match event:
            case PhaseBegan():
                self._enter(event.phase)
                if self._live is None:
                    self._line(f"{event.phase} ...")
            case TrialStarted():
                request = event.request
                self._enter(Phase.of(request.purpose))
                self._latest = self._running[request.number] = (event, self._clock())
                self._leader = event.leader
                expected, prediction = "nothing is predicted of it", request.prediction
                if prediction is not None:
                    rate, peak = show_rate(prediction.samples_per_second), show_memory(prediction.peak_bytes)
                    expected = f"predicted {rate} samples/s, peak {peak}"
                if self._verbose:
                    about = f"trial {request.number} begins ({request.purpose}): {shown_changes(event.changes)}"
                    self._line(f"{about}: {expected}; {what_is_left(event, event.time_left_s)}")
            case TrialEnded():
                self._running.pop(event.result.request.number, None)
                self._leader = event.leader
                self._ended(event)
            case Note():
                self._line(event.text)
        with contextlib.suppress(OSError):
            if self._live is not None:
                self._live.refresh()

    def drawn(self) -> Constrain:
        now = self._clock()
        state = show_time(now - self._phase_began_s)
        if self._latest is not None:
            event, began_s = self._latest
            state = what_is_left(event, max(0.0, event.time_left_s - (now - began_s)))
        lines = [f"{self._phase} · {state}"]
        for number, (event, began_s) in list(self._running.items())[:1]:
            others = f" · and {len(self._running) - 1} more" * (len(self._running) > 1)
            lines.append(f"trial {number} · {show_time(now - began_s)} · {shown_changes(event.changes)}{others}")
        if (leader := self._leader) is not None:
            rate = f"{show_rate(leader.samples_per_second)} samples/s"
            times = f" · {leader.speedup:.2f} x the baseline" if leader.speedup is not None else ""
            lines.append(f"best · {rate}{times} · {shown_changes(leader.changes)}")
        # A terminal shows Ctrl-C as ^C at the end of the last line; if that wrapped, rich could not erase the display.
        text = Text("\n".join(map(visible, lines)), no_wrap=True, overflow="ellipsis")
        return Constrain(text, self._console.width - len("^C"))

    def _enter(self, phase: Phase) -> None:
        if phase is not self._phase:
            self._phase, self._phase_began_s = phase, self._clock()

    def _line(self, text: str) -> None:
        with contextlib.suppress(OSError):
            self._write(visible(text))

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
        warnings = [*result.warnings]
        if (measured := result.measurement) is not None:
            warnings += [*measured.warnings, *(measured.conditions.warnings() if measured.conditions else ())]
        for warning in warnings:
            self._line(f"  warning: {warning}")
        if self._verbose and (measured := result.measurement) is not None:
            found = [f"{knob} {effect}" for knob, effect in measured.effects.items() if effect != "none"]
            self._line(f"  in effect: {', '.join(found)}")


def what_is_left(event: TrialStarted, time_left_s: float) -> str:
    """Return the remaining time and, before finals and checks, trials: 'at most 5 min and 7 trials left'."""
    left = f"at most {show_time(time_left_s)}"
    if event.request.purpose.closes:
        return f"{left} left"
    return f"{left} and {event.trials_left} trial{'s' if event.trials_left != 1 else ''} left"


def can_be_live(console: Console) -> bool:
    """Whether the console is a terminal that can redraw; rich's forced colours don't make it one."""
    return console.is_interactive and not console.is_dumb_terminal and not console.quiet and console.file.isatty()


@contextlib.contextmanager
def observing(observer: Observer | None, *, quiet: bool = False) -> Iterator[Observer]:
    """Yield the user's observer; if there is none the default one, or if `quiet` one that shows nothing."""
    console = terminal.Console(stderr=True)
    if observer is not None or quiet:
        yield ignore if observer is None else observer
    elif LOGGER.isEnabledFor(logging.INFO) and LOGGER.hasHandlers():
        yield Progress(console, write=partial(LOGGER.info, "%s"))
    elif console.is_jupyter:  # plain lines below the cell: rich itself would print them as output of stdout
        yield Progress(console, write=partial(print, file=sys.stderr))
    elif sys.stderr is not None and sys.stderr.isatty():
        with Progress(console) as progress:
            yield progress
    else:
        yield ignore
