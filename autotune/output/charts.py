"""Charts of a report as SVG: throughput over memory, best over time, and the contributions of a winner's knobs.

Series have the colours of Okabe and Ito, some of them darker (Color Universal Design,
https://jfly.uni-koeln.de/color/): distinguishable with the common kinds of colour blindness, and at a contrast of 3:1
to white or more (WCAG 2.2, 1.4.11). Each has a shape or a label of its own as well.
"""

from __future__ import annotations

import io
import itertools
import re
import textwrap
import warnings
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from markupsafe import Markup, escape

from autotune.output.table import COULD_NOT_TELL, contribution_rows
from autotune.space.knobs import shown_changes
from autotune.units import GIB, show_memory, show_rate, show_time, visible
from autotune.values.config import TrainConfig
from autotune.values.result import Explanation, RunReport, TrialRow
from autotune.values.trial import Purpose, TrialStatus

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS = {
    "baseline": "#6b7280", "winner": "#0072b2", "front": "#007f5c", "trial": "#7d8590", "failed": "#d55e00",
    "budget": "#a8327d", "text": "#565e69",
}  # fmt: skip

_STYLE = {
    "font.family": "DejaVu Sans", "font.size": 12, "text.parse_math": False, "figure.dpi": 72,
    "axes.edgecolor": COLOURS["text"], "axes.labelcolor": COLOURS["text"], "axes.titlecolor": COLOURS["text"],
    "axes.titlelocation": "left", "axes.titlesize": 12, "axes.axisbelow": True, "axes.grid": True,
    "axes.spines.left": False, "axes.spines.right": False, "axes.spines.top": False, "axes.formatter.useoffset": False,
    "grid.color": "#e7e9ed", "legend.frameon": False, "svg.fonttype": "none",
}  # fmt: skip

# Marker, size and colour; a mark of white is filled with white.
_LOOKS = {
    "trial": ("o", 8, "white"), "front": ("o", 9, "front"), "baseline": ("s", 10, "baseline"),
    "winner": ("*", 17, "winner"), "failed": ("x", 8, "failed"), "final": ("D", 7, "front"),
}  # fmt: skip

_WIDTH, _ROW = 540, 42  # pixels


def svg(draw: Callable[[], Figure | None], name: str) -> Markup:
    """Draw a figure as an SVG element whose ids hold for this `name` alone; empty if `draw` returns none.

    Screen readers read the figure's label. An artist's `gid` of the form "tip:..." becomes its title.
    """
    import matplotlib.style

    file = io.StringIO()
    style: list[Any] = ["default", {**_STYLE, "svg.hashsalt": name}]  # whatever the user's own settings are
    with warnings.catch_warnings(), matplotlib.style.context(style):
        warnings.filterwarnings("ignore", message="Glyph .* missing from")  # the browser has its own fonts
        figure = draw()
        if figure is None:
            return Markup()
        figure.savefig(file, format="svg", metadata=dict.fromkeys(("Creator", "Date", "Format", "Type")))
    _, _, body = file.getvalue().partition("</style>\n </defs>")
    body = re.sub(r"<g id=([\"'])tip:(.*?)\1>", r"<g><title>\2</title>", body)
    body = re.sub(r'<g id="[^"]*"(/?)>', r"<g\1>", body).replace("xlink:href", "href")
    size = f"0 0 {_WIDTH} {figure.get_figheight() * 72:g}"
    label = escape(visible(str(figure.get_label())))
    return Markup(f'<svg viewBox="{size}" role="img" aria-label="{label}">{body.strip()}')


class Spot(NamedTuple):
    """A configuration with its rate in samples/s and peak memory in bytes, the highest of its trials."""

    config: TrainConfig
    rate: float
    peak: int
    tip: str
    is_once: bool  # measured in the search alone: the fastest of many such is likely to have been lucky


def spots(report: RunReport) -> list[Spot]:
    """Return the configurations that completed, in the order of their first trial."""
    by_config: dict[TrainConfig, list[TrialRow]] = {}
    for trial in report.trials:
        if trial.is_compared and trial.peak_bytes is not None:
            by_config.setdefault(trial.config, []).append(trial)
    found = []
    for config, trials in by_config.items():
        rate, peak = trials[0].config_samples_per_second, max(t.peak_bytes or 0 for t in trials)
        is_once = not any(t.purpose is Purpose.FINAL for t in trials)
        if rate is not None:
            of = f"trial {', '.join(t.label for t in trials)}{', measured once' * is_once}"
            tip = f"{shown_changes(trials[0].changes or ())}: {show_rate(rate)} samples/s, {show_memory(peak)}, {of}"
            found.append(Spot(config, rate, peak, tip, is_once))
    return found


def pareto(found: Sequence[Spot]) -> list[Spot]:
    """Return the Pareto front of throughput and memory, in ascending order of memory."""
    front: list[Spot] = []
    for spot in sorted(found, key=lambda s: (s.peak, -s.rate)):
        if not front or spot.rate > front[-1].rate:
            front.append(spot)
    return front


def throughput_against_memory(report: RunReport) -> Figure | None:
    found = spots(report)
    if not found:
        return None
    lacking = [t for t in report.trials if t.status is TrialStatus.OUT_OF_MEMORY]
    budget, most = report.memory_bytes, max(s.peak for s in found)
    is_far = budget > 1.6 * most and not lacking  # it would leave the trials no room
    unit, name = (GIB, "GiB") if (most if is_far else max(most, budget)) >= GIB else (1 << 20, "MiB")
    label = f"Throughput against peak memory of {len(found)} configurations; budget {show_memory(budget)}"
    figure, axes = _figure(label, f"peak memory, {name}", "samples/s")
    title = f"budget {show_memory(budget)}{', further right' * is_far}"
    axes.set_title(title, loc="right", color=COLOURS["budget"])
    if not is_far:
        axes.axvline(budget / unit, label="memory budget", color=COLOURS["budget"], linewidth=2, linestyle="--")
    best = report.result.best if report.result is not None else None
    winner = best.measurement if best is not None and best.confirmed else None
    front = pareto([s for s in found if not s.is_once or winner is None or s.rate <= winner.samples_per_second])
    words = {"front": "Pareto front: fastest with as little memory"}
    words["trial"] = "others; above the winner those measured once"
    stairs = [s.peak / unit for s in front], [s.rate for s in front]
    axes.step(*stairs, where="post", color=COLOURS["front"], label=words["front"])
    kinds = {report.baseline: "baseline", **({best.config: "winner"} if best is not None else {})}
    for spot in found:
        kind = kinds.get(spot.config, "trial")
        look = "front" if kind == "trial" and spot in front else kind
        tip = spot.tip if kind == "trial" else f"{kind}: {spot.tip}"
        _mark(axes, look, spot.peak / unit, spot.rate, tip, words.get(look, look))
    for trial in lacking:
        needed = trial.prediction.peak_bytes if trial.prediction is not None else trial.peak_bytes
        at = min(max(needed or budget, budget), 1.1 * max(budget, most)) / unit
        tip = f"{shown_changes(trial.changes or ())}: ran out of memory, trial {trial.label}"
        _mark(axes, "failed", at, None, tip, "ran out of memory, at what was predicted")
    return _with_legend(figure, axes)


def best_over_time(report: RunReport) -> Figure | None:
    """Return the chart of the best throughput so far over the time of trials; after the finals it is the winner's."""
    explored = [t for t in report.trials if t.purpose is not None and t.purpose.explores and t.ended_s is not None]
    completed = sorted((t for t in explored if t.is_compared), key=lambda t: t.ended_s or 0.0)
    if not completed:
        return None
    again = [t for t in report.trials if t.is_compared and t.purpose is Purpose.FINAL]
    last = max(t.ended_s or 0.0 for t in [*explored, *again])
    unit, name = (3600.0, "hours") if last > 7200 else (60.0, "minutes") if last > 120 else (1.0, "seconds")
    label = f"Best throughput so far over {show_time(last)} of trials"
    figure, axes = _figure(label, f"{name} for which trials had run", "samples/s")
    times = [t.ended_s or 0.0 for t in completed]
    rates = list(itertools.accumulate((t.samples_per_second or 0.0 for t in completed), max))
    winner = report.result.best.measurement if report.result is not None and again else None
    if winner is not None:
        times.append(max(t.ended_s or 0.0 for t in again))
        rates.append(winner.samples_per_second)
    line = [t / unit for t in [*times, last]], [*rates, rates[-1]]
    words = "best so far; after the finals the winner"
    axes.step(*line, where="post", color=COLOURS["winner"], linewidth=2.2, label=words)
    for trial in [*explored, *again]:
        rate, look, words = trial.samples_per_second, "trial", "a trial of the search"
        if rate is None:
            look = words = "failed"
        elif trial.purpose is Purpose.FINAL:
            look, words = "final", "a trial of the finals"
        measured = f", {show_rate(rate)} samples/s" if rate is not None else ""
        tip = f"trial {trial.label}: {shown_changes(trial.changes or ())}: {trial.status}{measured}"
        _mark(axes, look, (trial.ended_s or 0.0) / unit, rate, tip, words)
    return _with_legend(figure, axes)


def contributions(found: Explanation | None) -> Figure | None:
    """Return the chart of each knob's factor with its 95 % interval; factors that aren't told are left out."""
    parts = () if found is None else found.contributions
    rows = [] if found is None else contribution_rows(found)
    shown = [(row, part) for row, part in zip(rows, parts, strict=True) if part.ratio and row[1] != COULD_NOT_TELL]
    if not shown:
        return None
    label = f"Factors of the throughput that {len(shown)} knobs of the winner brought"
    figure, axes = _figure(label, "throughput with the knob over that without it", "", height=_ROW * len(shown) + 90)
    axes.set(ylim=(len(shown), 0), yticks=[])  # each row one unit high: a text, and a bar below it
    axes.axvline(1, color=COLOURS["text"], linewidth=1)
    place: dict[str, Any] = {"transform": axes.get_yaxis_transform(), "va": "center"}
    for at, ((words, factor, known), part) in enumerate(shown):
        ratio, interval = part.ratio or 1.0, part.interval
        axes.text(0, at + 0.25, textwrap.shorten(visible(words), 50, placeholder=" …"), **place)
        axes.text(1, at + 0.25, factor, ha="right", weight="bold", **place)
        colour, tip = COLOURS["winner" if ratio >= 1 else "failed"], visible(f"{words}: {factor}, {known}")
        axes.barh(at + 0.7, ratio - 1, left=1, height=0.34, color=colour, gid=f"tip:{tip}")
        if interval is not None and interval.is_narrow:
            ends = [[ratio - interval.low], [interval.high - ratio]]
            axes.errorbar(ratio, at + 0.7, xerr=ends, color=COLOURS["text"], capsize=4)
    return figure


def _figure(label: str, below: str, above: str, height: float = 360) -> tuple[Figure, Axes]:
    """Return a figure, which `label` describes, and its axes, with words below them and above at the left."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(_WIDTH / 72, height / 72), label=label, layout="constrained")
    return figure, figure.add_subplot(xlabel=below, title=above)


def _mark(axes: Axes, look: str, x: float, y: float | None, tip: str, words: str) -> None:
    """Draw a mark with a tip and an entry of the legend; where `y` is unknown, at the bottom."""
    marker, size, colour = _LOOKS[look]
    edge = COLOURS["trial"] if colour == "white" else COLOURS[colour] if marker == "x" else "white"
    where: dict[str, Any] = {"transform": axes.get_xaxis_transform()} if y is None else {}
    drawn: dict[str, Any] = {"marker": marker, "markersize": size, "markeredgecolor": edge, "linestyle": "none"}
    drawn |= {"gid": f"tip:{visible(tip)}", "label": words, "color": COLOURS.get(colour, colour), "clip_on": False}
    axes.plot(x, 0.03 if y is None else y, **drawn, **where)


def _with_legend(figure: Figure, axes: Axes) -> Figure:
    handles, labels = axes.get_legend_handles_labels()
    found = dict(zip(labels, handles, strict=True))  # of equal labels the last
    words = [textwrap.fill(label, 31) for label in found]
    figure.legend(list(found.values()), words, loc="outside lower left", ncols=2)
    return figure
