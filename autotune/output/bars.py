"""Charts of bars: what each knob brought, memory by component, where the time went. Pure.

A row is a line of text with its bar below, so that words have room on narrow screens, too.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from autotune.output.run_report import Breakdown
from autotune.output.svg import (
    Chart,
    Scale,
    line,
    logarithmic,
    mark,
    number,
    rectangle,
    round_values,
    text,
    text_width,
    ticks,
)
from autotune.space.knobs import SHORT_NAMES
from autotune.units import show_memory, show_rate, show_time
from autotune.values.estimate import MemoryBreakdown
from autotune.values.explanation import Contribution, Explanation
from autotune.values.problem import Change
from autotune.values.time_spent import Spent
from autotune.values.trial import Interval

_ROW = 42.0
_BAR = 14.0


def change_words(changed: Sequence[Change]) -> str:
    """Return what a knob became: 'precision fp32 → bf16'."""
    return ", ".join(f"{SHORT_NAMES.get(c.knob, c.knob)} {c.before} → {c.after}" for c in changed)


def ratio_words(contribution: Contribution) -> str:
    """Return what a knob brought: '×1.43 (1.40 to 1.46)'."""
    if contribution.ratio is None:
        return {"fails": "needed", "slow": "too slow"}.get(contribution.basis, "not told")
    return factor_words(contribution.ratio, contribution.interval)


def how_known(contribution: Contribution) -> str:
    """Return how a knob's factor is known, or why it isn't."""
    if contribution.cause is not None:
        return contribution.cause
    numbers = [label.removeprefix("explain ") for label in contribution.trials]
    of_explain = any(label.startswith("explain ") for label in contribution.trials)
    trials = f" ({'explain ' if of_explain else ''}trials {', '.join(sorted(numbers, key=int))})" if numbers else ""
    return f"{BASIS[contribution.basis]}{trials}"


def together_words(explanation: Explanation) -> str:
    """Return what the knobs bring together, empty if that isn't known."""
    together = explanation.together
    return "" if together is None else factor_words(together, explanation.together_interval)


def factor_words(ratio: float, interval: Interval | None) -> str:
    """Return a factor with its interval, where that has an end."""
    if interval is None or not math.isfinite(interval.high):
        return f"×{ratio:.2f}"
    return f"×{ratio:.2f} ({interval.low:.2f} to {interval.high:.2f})"


class Step(NamedTuple):
    """A row of the waterfall: from where to where a knob brings the throughput."""

    words: str
    value: str
    start: float | None
    end: float | None
    low: float | None
    high: float | None
    kind: str
    tip: str


def waterfall_steps(explanation: Explanation) -> list[Step]:
    """Return the rows between baseline and winner; where there is no baseline, each ends at the winner."""
    found = []
    at, winner = explanation.baseline_samples_per_second, explanation.winner_samples_per_second
    for part in explanation.contributions:
        words = change_words(part.changes)
        if part.ratio is None or winner is None:
            found.append(Step(words, ratio_words(part), None, None, None, None, "", part.cause or ""))
            continue
        start = at if at is not None else winner / part.ratio
        known = part.interval is not None and math.isfinite(part.interval.high) and part.interval.low > 0
        low, high = (start * part.interval.low, start * part.interval.high) if known and part.interval else (None, None)
        kind = ("gain" if part.ratio >= 1 else "loss") + ("" if part.basis == "in turn" else " weak")
        tip = f"{words}: {ratio_words(part)}\n{how_known(part)}"
        found.append(Step(words, ratio_words(part), start, start * part.ratio, low, high, kind, tip))
        at = start * part.ratio if at is not None else None
    together = explanation.together
    if together is not None and at is not None:
        tip = "what the knobs bring together beyond the product of the parts"
        kind = f"rest {'gain' if together >= 1 else 'loss'}"
        found.append(Step("together", together_words(explanation), at, at * together, None, None, kind, tip))
    return found


BASIS = {
    "in turn": "measured in turn with the winner",
    "once": "told by one trial of the search each",
    "elsewhere": "told by two other trials of the search that differ in it alone",
    "fails": "the winner does not run without it",
    "slow": "without it no trial ends within its time limit",
    "unknown": "not told by the trials at hand",
}


def waterfall(explanation: Explanation, width: float) -> Chart | None:
    """Return how the knobs lead from the baseline's throughput to the winner's; the axis is logarithmic."""
    steps = waterfall_steps(explanation)
    drawn = [s for s in steps if s.start is not None]
    winner, base = explanation.winner_samples_per_second, explanation.baseline_samples_per_second
    if winner is None or not drawn:
        return None
    values = [v for s in drawn for v in (s.start, s.end, s.low, s.high) if v] + [winner] + ([base] if base else [])
    left, right = 8.0, width - 8.0
    low, high = min(values) / 1.04, max(values) * 1.04
    x = logarithmic(low, high, left, right)
    rows = len(steps) + 1 + (base is not None)
    bottom = rows * _ROW + 6
    parts = [_axis(low, high, x, bottom, left, right)]
    row = 0
    if base is not None:
        parts.append(_end("baseline", base, x, 0, "square", "baseline", width))
        row = 1
    for step in steps:
        parts.append(_waterfall_row(step, x, row * _ROW, width))
        row += 1
    parts.append(_end("best", winner, x, row * _ROW, "star", "best", width))
    parts.append(text(width / 2, bottom + 34, "samples/s", anchor="middle", kind="muted"))
    label = f"What each of {len(explanation.contributions)} knobs brought, up to {show_rate(winner)} samples/s"
    return Chart("".join(parts), width, bottom + 42, label)


def _axis(low: float, high: float, x: Scale, bottom: float, left: float, right: float) -> str:
    parts = [line(left, bottom, right, bottom, "axis")]
    most = max(4, int((right - left) / 110))
    found = round_values(low, high, most, logs=True)
    for value in found if len(found) > 1 else ticks(low, high, most):
        if value > 0 and left + 12 <= x(value) <= right - 12:
            parts.append(line(x(value), 0, x(value), bottom, "grid"))
            parts.append(text(x(value), bottom + 17, number(value), anchor="middle"))
    return "".join(parts)


def _end(words: str, value: float, x: Scale, top: float, shape: str, kind: str, width: float) -> str:
    return (
        text(2, top + 14, words, kind="strong")
        + text(width - 2, top + 14, f"{show_rate(value)} samples/s", anchor="end", kind="strong")
        + mark(shape, x(value), top + 28, kind, f"{words}: {show_rate(value)} samples/s", 6.0)
    )


def _waterfall_row(step: Step, x: Scale, top: float, width: float) -> str:
    value_width = text_width(step.value)
    parts = [
        text(2, top + 14, step.words, limit=width - value_width - 16),
        text(width - 2, top + 14, step.value, anchor="end", kind="strong"),
    ]
    if step.start is None or step.end is None:
        parts.append(text(2, top + 32, step.tip, kind="muted", limit=width - 4))
        return "".join(parts)
    first, last = sorted((x(step.start), x(step.end)))
    parts.append(line(x(step.start), top - 14, x(step.start), top + 21 + _BAR, "link"))
    parts.append(rectangle(first, top + 21, last - first, _BAR, f"bar {step.kind}", step.tip))
    if step.low is not None and step.high is not None:
        middle = top + 21 + _BAR / 2
        parts.append(line(x(step.low), middle, x(step.high), middle, "whisker"))
        parts += [line(x(v), middle - 4, x(v), middle + 4, "whisker") for v in (step.low, step.high)]
    return "".join(parts)


class Part(NamedTuple):
    """A component of memory."""

    name: str  # of its colour
    words: str
    size: int  # bytes


def memory_parts(memory: MemoryBreakdown, *, on_cpu: bool) -> list[Part]:
    """Return the components of a configuration's memory up to the device's peak, those that are empty left out."""
    sizes = {
        "weights": memory.weights_bytes,
        "gradients": memory.gradients_bytes,
        "optimizer": memory.optimizer_state_bytes,
        "activations": memory.activations_bytes,
        "temporaries": memory.temporaries_bytes,
        "communication": memory.communication_bytes,
    }
    sizes["beyond"] = max(0, memory.device_peak_bytes - sum(sizes.values()))
    names = part_words(on_cpu=on_cpu)
    return [Part(name, names[name], size) for name, size in sizes.items() if size > 0]


def part_words(*, on_cpu: bool) -> dict[str, str]:
    """Return what the components are called, in the order of the stack."""
    same = {name: name for name in ("weights", "gradients")}
    rest = {name: name for name in ("activations", "temporaries", "communication")}
    beyond = "beyond the tensors" if on_cpu else "context, allocator"
    return {**same, "optimizer": "optimizer states", **rest, "beyond": beyond}


def memory_bars(found: Sequence[Breakdown], *, on_cpu: bool, width: float) -> Chart | None:
    """Return a stacked bar for each configuration, with a mark where the measured peak lies."""
    if not found:
        return None
    stacks = [memory_parts(b.predicted, on_cpu=on_cpu) for b in found]
    most = max(max(sum(p.size for p in stack), b.measured_bytes or 0) for stack, b in zip(stacks, found, strict=True))
    scale = (width - 16) / most
    parts = []
    for row, (stack, breakdown) in enumerate(zip(stacks, found, strict=True)):
        top, at = row * 66.0, 8.0
        measured = breakdown.measured_bytes
        told = f", measured {show_memory(measured)}" if measured is not None else ""
        parts.append(text(2, top + 14, breakdown.name, kind="strong"))
        said = f"predicted {show_memory(breakdown.predicted.device_peak_bytes)}{told}"
        parts.append(text(width - 2, top + 14, said, anchor="end"))
        for part in stack:
            tip = f"{breakdown.name}: {part.words} {show_memory(part.size)}"
            parts.append(rectangle(at, top + 22, part.size * scale, 22, f"part part-{part.name}", tip))
            at += part.size * scale
        if measured is not None:
            tip = f"{breakdown.name}: measured {show_memory(measured)}"
            parts.append(mark("triangle", 8 + measured * scale, top + 52, "best", tip, 6.0))
    return Chart("".join(parts), width, len(found) * 66.0, "Predicted peak memory by component, and what was measured")


def time_bars(spent: Spent, width: float) -> Chart | None:
    """Return a bar for each kind of work that a search's time went into, the largest first."""
    shares = spent.shares() if spent.total_s else {}
    if not shares:
        return None
    most = max(shares.values())
    parts = []
    for row, (what, share) in enumerate(shares.items()):
        top = row * 36.0
        said = f"{show_time(share * spent.total_s)} ({share:.0%})"
        parts.append(text(2, top + 13, what))
        parts.append(text(width - 2, top + 13, said, anchor="end"))
        parts.append(rectangle(2, top + 19, (width - 4) * share / most, 10, "bar time", f"{what}: {said}"))
    label = f"Where the {show_time(spent.total_s)} of the search went"
    return Chart("".join(parts), width, len(shares) * 36.0, label)
