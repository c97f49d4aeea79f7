"""Bar charts: contributions of knobs (a waterfall), memory by component, time by kind of work.

Each row is a line of text with its bar below, so that texts have room on narrow screens.
"""

from __future__ import annotations

import itertools
from typing import NamedTuple

from autotune.output import svg
from autotune.output.explanation_table import change_words, how_known, ratio_words, together_words
from autotune.units import show_memory, show_rate, show_time
from autotune.values.estimate import MemoryBreakdown
from autotune.values.result import Explanation, RunReport
from autotune.values.time_spent import Spent

_ROW = 42.0
_BAR = 14.0


class Step(NamedTuple):
    """A row of the waterfall: throughput in samples/s without and with a knob, and the interval of the latter."""

    words: str
    value: str
    tip: str
    kind: str = ""
    start: float | None = None
    end: float | None = None
    low: float | None = None
    high: float | None = None


def waterfall_steps(explanation: Explanation) -> list[Step]:
    """Return the rows from baseline to winner; without a baseline, each row ends at the winner."""
    found = []
    at, winner = explanation.baseline_samples_per_second, explanation.winner_samples_per_second
    for part in explanation.contributions:
        words, value, ratio, interval = change_words(part.changes), ratio_words(part), part.ratio, part.interval
        if ratio is None or winner is None:
            found.append(Step(words, value, part.cause or ""))
            continue
        start = at if at is not None else winner / ratio
        ends: tuple[float | None, float | None] = (None, None)
        is_told = interval is not None and interval.is_narrow
        if interval is not None and is_told:
            ends = start * interval.low, start * interval.high
        kind = ("gain" if ratio >= 1 else "loss") + ("" if part.basis == "in turn" and is_told else " weak")
        found.append(Step(words, value, f"{words}: {value}\n{how_known(part)}", kind, start, start * ratio, *ends))
        at = start * ratio if at is not None else None
    together = explanation.together
    if together is not None and at is not None:
        tip = "the total beyond the product of the knobs' factors"
        kind = f"rest {'gain' if together >= 1 else 'loss'}"
        found.append(Step("together", together_words(explanation), tip, kind, at, at * together))
    return found


def waterfall(explanation: Explanation, width: float) -> svg.Chart | None:
    """Return the waterfall from the baseline's throughput to the winner's, on a logarithmic axis."""
    steps = waterfall_steps(explanation)
    drawn = [s for s in steps if s.start is not None]
    winner, base = explanation.winner_samples_per_second, explanation.baseline_samples_per_second
    if winner is None or not drawn:
        return None
    values = [v for s in drawn for v in (s.start, s.end, s.low, s.high) if v] + [winner] + ([base] if base else [])
    left, right = 8.0, width - 8.0
    low, high = min(values) / 1.04, max(values) * 1.04
    x = svg.logarithmic(low, high, left, right)
    bottom = (len(steps) + 1 + (base is not None)) * _ROW + 6
    tops = itertools.count(0.0, _ROW)
    parts = [_axis(low, high, x, bottom, left, right)]
    if base is not None:
        parts.append(_end("baseline", base, x, next(tops), width))
    parts += [_waterfall_row(step, x, next(tops), width) for step in steps]
    parts.append(_end("winner", winner, x, next(tops), width))
    parts.append(svg.text(width / 2, bottom + 34, "samples/s", anchor="middle", kind="muted"))
    label = f"What each of {len(explanation.contributions)} knobs brought, up to {show_rate(winner)} samples/s"
    return svg.Chart("".join(parts), width, bottom + 42, label)


def _axis(low: float, high: float, x: svg.Scale, bottom: float, left: float, right: float) -> str:
    parts = [svg.line(left, bottom, right, bottom, "axis")]
    most = max(4, int((right - left) / 110))
    found = svg.round_values(low, high, most, logs=True)
    for value in found if len(found) > 1 else svg.ticks(low, high, most):
        if value > 0 and left + 12 <= x(value) <= right - 12:
            parts.append(svg.line(x(value), 0, x(value), bottom, "grid"))
            parts.append(svg.text(x(value), bottom + 17, svg.number(value), anchor="middle"))
    return "".join(parts)


def _end(words: str, value: float, x: svg.Scale, top: float, width: float) -> str:
    shape, kind = ("star", "best") if words == "winner" else ("square", "baseline")
    return (
        svg.text(2, top + 14, words, kind="strong")
        + svg.text(width - 2, top + 14, f"{show_rate(value)} samples/s", anchor="end", kind="strong")
        + svg.mark(shape, x(value), top + 28, kind, f"{words}: {show_rate(value)} samples/s", 6.0)
    )


def _waterfall_row(step: Step, x: svg.Scale, top: float, width: float) -> str:
    value_width = svg.text_width(step.value)
    parts = [
        svg.text(2, top + 14, step.words, limit=width - value_width - 16),
        svg.text(width - 2, top + 14, step.value, anchor="end", kind="strong"),
    ]
    if step.start is None or step.end is None:
        parts.append(svg.text(2, top + 32, step.tip, kind="muted", limit=width - 4))
        return "".join(parts)
    first, last = sorted((x(step.start), x(step.end)))
    parts.append(svg.line(x(step.start), top - 14, x(step.start), top + 21 + _BAR, "link"))
    parts.append(svg.rectangle(first, top + 21, last - first, _BAR, f"bar {step.kind}", step.tip))
    if step.low is not None and step.high is not None:
        middle = top + 21 + _BAR / 2
        parts.append(svg.line(x(step.low), middle, x(step.high), middle, "whisker"))
        parts += [svg.line(x(v), middle - 4, x(v), middle + 4, "whisker") for v in (step.low, step.high)]
    return "".join(parts)


def memory_parts(memory: MemoryBreakdown, *, on_cpu: bool) -> dict[str, int]:
    """Return the bytes of each component of predicted memory by name, in the order of the stacked bar.

    The last component is the difference between the others and the device's peak.
    """
    parts = memory.components
    beyond = "beyond the tensors" if on_cpu else "context, allocator"
    return {**parts, beyond: max(0, memory.device_peak_bytes - sum(parts.values()))}


def component_sizes(report: RunReport) -> dict[str, list[int]]:
    """Return the components above 0 in any of a report's breakdowns, with their bytes in each breakdown."""
    stacks = [memory_parts(b.predicted, on_cpu=report.hardware.is_cpu) for b in report.breakdowns]
    names = stacks[0] if stacks else ()
    return {name: [stack[name] for stack in stacks] for name in names if any(stack[name] for stack in stacks)}


def component_icon(name: str) -> str:
    """Return the legend's icon of a component, as SVG."""
    return svg.rectangle(1, 2, 16, 12, _part_class(name))


def _part_class(name: str) -> str:
    """Return the CSS class of a component's colour; see `svg`."""
    first = name.partition(" ")[0]
    return f"part part-{first if first in svg.COMPONENTS else 'beyond'}"


def memory_bars(report: RunReport, width: float) -> svg.Chart | None:
    """Return a stacked bar for each breakdown, with a mark at the measured peak."""
    found = report.breakdowns
    if not found:
        return None
    stacks = [memory_parts(b.predicted, on_cpu=report.hardware.is_cpu) for b in found]
    most = max(max(sum(stack.values()), b.measured_bytes or 0) for stack, b in zip(stacks, found, strict=True))
    scale = (width - 16) / most
    parts = []
    for row, (stack, breakdown) in enumerate(zip(stacks, found, strict=True)):
        top, at = row * 66.0, 8.0
        said = f"predicted {show_memory(breakdown.predicted.device_peak_bytes)}"
        measured = breakdown.measured_bytes
        if measured is not None:
            said += f", measured {show_memory(measured)}"
        parts.append(svg.text(2, top + 14, breakdown.name, kind="strong"))
        parts.append(svg.text(width - 2, top + 14, said, anchor="end"))
        for name, size in stack.items():
            if size > 0:
                tip = f"{breakdown.name}: {name} {show_memory(size)}"
                parts.append(svg.rectangle(at, top + 22, size * scale, 22, _part_class(name), tip))
                at += size * scale
        if measured is not None:
            tip = f"{breakdown.name}: measured {show_memory(measured)}"
            parts.append(svg.mark("triangle", 8 + measured * scale, top + 52, "best", tip, 6.0))
    return svg.Chart(
        "".join(parts), width, len(found) * 66.0, "Predicted peak memory by component, and what was measured"
    )


def time_bars(spent: Spent, width: float) -> svg.Chart | None:
    """Return a bar for each kind of work in a search's time, in descending order."""
    shares = spent.shares() if spent.total_s else {}
    if not shares:
        return None
    most = max(shares.values())
    parts = []
    for row, (what, share) in enumerate(shares.items()):
        top = row * 36.0
        said = f"{show_time(share * spent.total_s)} ({share:.0%})"
        parts.append(svg.text(2, top + 13, what))
        parts.append(svg.text(width - 2, top + 13, said, anchor="end"))
        parts.append(svg.rectangle(2, top + 19, (width - 4) * share / most, 10, "bar time", f"{what}: {said}"))
    label = f"Where the {show_time(spent.total_s)} of the search went{spent.waited}"
    return svg.Chart("".join(parts), width, len(shares) * 36.0, label)
