"""The contributions of a winner's knobs: in words, as a table for the terminal, and as a waterfall."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

from rich.console import Group, RenderableType
from rich.text import Text

from autotune.output import svg
from autotune.output.table import show_ratio
from autotune.output.terminal import table_of
from autotune.space.knobs import SHORT_NAMES
from autotune.units import show_rate
from autotune.values.problem import Change
from autotune.values.result import Contribution, Explanation

_ROW = 42.0  # a line of text with its bar below, so that texts have room on narrow screens
_BAR = 14.0

HEADINGS = ("factor", "how it is known")

_BASIS = {
    "in turn": "measured in turn with the winner",
    "once": "told by one trial of the search each",
    "elsewhere": "told by two other trials of the search that differ in it alone",
    "fails": "the winner does not run without it",
    "slow": "without it no trial ends within its time limit",
    "unknown": "not told by the trials at hand",
}


def explanation_table(found: Explanation) -> RenderableType:
    """Return the table of contributions, in descending order, and of their interaction."""
    lines = ["a factor is the winner's throughput over that of the winner with the baseline's value in this knob"]
    if not found.is_settled:
        lines.append("not all of it was measured in turn with the winner; `autotune explain` goes on")
    headings = ("knob of the winner", *HEADINGS)
    table = table_of(headings, contribution_rows(found), title=_title(found), title_style="bold")
    return Group(table, *map(Text, lines))


def _title(found: Explanation) -> str:
    rate = found.winner_samples_per_second
    words = "the winner" if rate is None else f"the winner: {show_rate(rate)} samples/s"
    if found.total is None:
        return words
    return f"{words}; x baseline: {show_ratio(found.total, found.total_interval)}"


def contribution_rows(found: Explanation) -> list[tuple[str, str, str]]:
    """Return change, factor and evidence of each knob, and in the last row the interaction."""
    rows = [(change_words(part.changes), ratio_words(part), how_known(part)) for part in found.contributions]
    if found.together is not None:
        rows.append(("together", together_words(found), "the total beyond the product of the parts"))
    return rows


def change_words(changed: Sequence[Change]) -> str:
    """Return changes in words: 'precision fp32 → bf16'."""
    return ", ".join(f"{SHORT_NAMES.get(c.knob, c.knob)} {c.before} → {c.after}" for c in changed)


def ratio_words(contribution: Contribution) -> str:
    """Return the factor of a knob in words: '1.43 (1.40 to 1.46)'."""
    if contribution.ratio is None:
        return {"fails": "needed", "slow": "too slow"}.get(contribution.basis, "not told")
    return show_ratio(contribution.ratio, contribution.interval)


def how_known(contribution: Contribution) -> str:
    """Return how a knob's factor is known, or why it isn't."""
    if contribution.cause is not None:
        return contribution.cause
    numbers = [label.removeprefix("explain ") for label in contribution.trials]
    of_explain = any(label.startswith("explain ") for label in contribution.trials)
    trials = f" ({'explain ' if of_explain else ''}trials {', '.join(sorted(numbers, key=int))})" if numbers else ""
    return f"{_BASIS[contribution.basis]}{trials}"


def together_words(explanation: Explanation) -> str:
    """Return the factor of the interaction in words; empty: unknown."""
    together = explanation.together
    return "" if together is None else show_ratio(together, explanation.together_interval)


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
