"""Shows a running search: a live line in a terminal, plain lines elsewhere. Listens to the tuner's events."""

from __future__ import annotations

from types import TracebackType
from typing import Self

from rich.console import Console
from rich.live import Live
from rich.spinner import Spinner

from autotune.events import Event, Note, TrialEnded, TrialStarted
from autotune.output.table import measurement_detail, show_changes, trial_line
from autotune.trial import Failure, Purpose
from autotune.units import show_rate, show_time

# The display must not compete with what is being timed: two refreshes a second cost well under a thousandth of a core.
_REFRESHES_PER_SECOND = 2


class Progress:
    """An observer that draws on `console`; use it as a context manager."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._best: float | None = None
        self._live: Live | None = None

    def __enter__(self) -> Self:
        if self._console.is_terminal:
            self._live = Live(
                Spinner("dots", text="looking at the machine and the model"),
                console=self._console,
                refresh_per_second=_REFRESHES_PER_SECOND,
                transient=True,
            )
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()

    def __call__(self, event: Event) -> None:
        """Draw `event`."""
        if isinstance(event, Note):
            self._line(event.text)
        elif isinstance(event, TrialStarted):
            self._started(event)
        else:
            self._ended(event)

    def _line(self, text: str) -> None:
        self._console.print(text, highlight=False, markup=False, soft_wrap=True)

    def _started(self, event: TrialStarted) -> None:
        what = "trial" if event.purpose is Purpose.SEARCH else event.purpose
        best = f", best {show_rate(self._best)} samples/s" if self._best else ""
        text = (
            f"{what} {event.number}: {show_changes(event.changes)}{best}, "
            f"at most {show_time(event.time_left_s)} and {event.trials_left} trials left"
        )
        if self._live is not None:
            self._live.update(Spinner("dots", text=text))

    def _ended(self, event: TrialEnded) -> None:
        self._best = event.best_samples_per_second
        result = event.result
        outcome = result.outcome
        if isinstance(outcome, Failure):
            detail = outcome.cause
        elif outcome.soaked is not None:
            detail = str(outcome.soaked)
        elif outcome.curve is not None:
            detail = f"{len(outcome.curve.losses)} losses, the last {outcome.curve.losses[-1]:.4g}"
        else:
            whole = not result.request.depths
            detail = measurement_detail(outcome, result.request.prediction if whole else None)
        if result.request.depths:
            detail = f"at a depth of {' + '.join(map(str, result.request.depths.values()))}: {detail}"
        purpose = "" if result.request.purpose.explores else f" ({result.request.purpose})"
        line = trial_line(result.request.number, result.status, event.changes, detail)
        place = f", {result.place}" if result.place else ""
        self._line(f"{line}{purpose}, {show_time(result.duration_s)}{place}")
        measured = result.measurement
        disturbed = measured.conditions.warnings() if measured is not None and measured.conditions is not None else ()
        for warning in (*result.warnings, *disturbed):
            self._line(f"  warning: {warning}")
