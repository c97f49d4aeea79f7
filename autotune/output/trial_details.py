"""What `--verbose` tells of each trial: what was expected, what went on beside it, where its seconds went."""

from __future__ import annotations

from autotune.space.knobs import shown_changes
from autotune.units import show_memory, show_rate, show_time
from autotune.values.conditions import Conditions
from autotune.values.events import TrialStarted
from autotune.values.trial import Phases, Prediction, TrialResult

_SHARES = {
    "others_share": "other processes",
    "stolen_share": "the hypervisor",
    "waited_share": "waiting for a core",
}


def opening_line(event: TrialStarted) -> str:
    """Return what is expected of a trial that begins."""
    left = what_is_left(event, event.time_left_s)
    expected = _expected(event.prediction) if event.prediction is not None else "nothing is predicted of it"
    return f"trial {event.number} begins ({event.purpose}): {shown_changes(event.changes)}: {expected}; {left}"


def what_is_left(event: TrialStarted, time_left_s: float) -> str:
    """Return what is left at most of the search's time, and of its trials where this one is of those."""
    left = f"at most {show_time(time_left_s)}"
    if event.purpose.closes:
        return f"{left} left"
    return f"{left} and {event.trials_left} trial{'s' if event.trials_left != 1 else ''} left"


def _expected(prediction: Prediction) -> str:
    rate = show_rate(prediction.samples_per_second)
    return f"predicted {rate} samples/s, peak {show_memory(prediction.peak_bytes)}"


def closing_lines(result: TrialResult) -> list[str]:
    """Return what is known of a trial beside its figures, a line each."""
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
