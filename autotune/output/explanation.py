"""The contributions of a winner's knobs: in words, as a table for the terminal, and as a waterfall."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from rich.console import Group, RenderableType
from rich.text import Text

from autotune.output.drawing import COLOURS, ROW, bar, blank, cut, limited, mark, row_axes, row_text, with_legend
from autotune.output.table import show_ratio
from autotune.output.terminal import table_of
from autotune.space.knobs import SHORT_NAMES
from autotune.units import show_rate
from autotune.values.problem import Change
from autotune.values.result import Contribution, Explanation

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

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


def waterfall(found: Explanation | None, width: float) -> Figure | None:
    """Return the waterfall from the baseline's throughput to the winner's, on a logarithmic axis."""
    steps = waterfall_steps(found) if found is not None else []
    told = [v for s in steps for v in (s.start, s.end, s.low, s.high) if v]
    if found is None or found.winner_samples_per_second is None or not told:
        return None
    base, winner = found.baseline_samples_per_second, found.winner_samples_per_second
    ends = ([("baseline", base, 0)] if base else []) + [("winner", winner, len(steps) + bool(base))]
    label = f"What each of {len(found.contributions)} knobs brought, up to {show_rate(winner)} samples/s"
    rows = len(steps) + len(ends)
    figure = blank(width, rows * ROW + 44, label)
    axes = row_axes(figure, rows)
    told += [rate for _, rate, _ in ends]
    axes.set(xscale="log", xlabel="samples/s")
    axes.grid(visible=True, axis="x")
    limited(axes, "x", min(told) / 1.04, max(told) * 1.04, width, logs=True)
    for words, rate, row in ends:
        row_text(axes, row, words, f"{show_rate(rate)} samples/s", width, weight="bold")
        mark(axes, words, rate, row + 0.7, f"{words}: {show_rate(rate)} samples/s", "_")
    for row, step in enumerate(steps, int(bool(base))):
        _waterfall_row(axes, row, step, width)
    return with_legend(figure, width, left=4, right=4, top=0)


# Kinds of bars in the waterfall: words of the legend, opacity, line around it.
_BARS = {
    "weak": ("told by trials of the search, or not surely", 0.35, "--"),
    "rest": ("together", 0.15, "-"),
    "": ("measured in turn, with its 95 % interval", 1.0, "none"),
}


def _waterfall_row(axes: Axes, row: int, step: Step, width: float) -> None:
    row_text(axes, row, step.words, step.value, width)
    if step.start is None or step.end is None:
        place = axes.get_yaxis_transform()
        axes.text(0, row + 0.7, cut(step.tip, width), transform=place, va="center", color=COLOURS["muted"])
        return
    words, opacity, style = next(_BARS[kind] for kind in _BARS if kind in step.kind)
    axes.plot([step.start] * 2, [row - 0.3, row + 0.7], color=COLOURS["line"], linewidth=1, zorder=0)
    colour = COLOURS["best" if "gain" in step.kind else "failed"], opacity
    bar(axes, row, step.start, step.end - step.start, colour, step.tip, label=words, edgecolor=COLOURS["ink"], ls=style)
    if step.low is not None and step.high is not None:
        axes.plot([step.low, step.high], [row + 0.7] * 2, color=COLOURS["ink"], marker="|", gid="tip:95 % interval")
