"""Charts of a report: throughput against memory, best over time, and the contributions of a winner's knobs.

Each is drawn within `chart_style.styled` for a given width in pixels, since texts keep their size on narrow screens.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from autotune.output.chart_style import (
    COLOURS,
    ROW,
    blank,
    cut,
    limited,
    mark,
    padded,
    row_text,
    tip_of,
    trial_axes,
    with_legend,
)
from autotune.output.table import contribution_rows, show_ratio
from autotune.space.knobs import shown_changes
from autotune.units import GIB, show_memory, show_rate, show_time
from autotune.values.config import TrainConfig
from autotune.values.result import Explanation, RunReport, TrialRow
from autotune.values.trial import Purpose, TrialStatus

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class Spot(NamedTuple):
    """A configuration with rate and peak memory over its trials."""

    config: TrainConfig
    rate: float  # samples per second
    peak: int  # bytes, the highest of its trials
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
        finals = [t for t in trials if t.purpose is Purpose.FINAL]
        rate = trials[0].config_samples_per_second  # the rate that all outputs state; results of older versions lack it
        if rate is None:
            rate = statistics.fmean(t.samples_per_second or 0.0 for t in finals or trials)
        peak, changed = max(t.peak_bytes or 0 for t in trials), shown_changes(trials[0].changes or ())
        tip = f"{changed}\n{show_rate(rate)} samples/s, {show_memory(peak)}\ntrial {', '.join(t.label for t in trials)}"
        found.append(Spot(config, rate, peak, tip if finals else f"{tip}, measured once", is_once=not finals))
    return found


def pareto(found: Sequence[Spot]) -> list[Spot]:
    """Return the Pareto front of throughput and memory, in ascending order of memory."""
    front: list[Spot] = []
    for spot in sorted(found, key=lambda s: (s.peak, -s.rate)):
        if not front or spot.rate > front[-1].rate:
            front.append(spot)
    return front


def throughput_against_memory(report: RunReport, width: float) -> Figure | None:
    """Return the chart of configurations by peak memory and throughput, with budget and Pareto front."""
    found = spots(report)
    if not found:
        return None
    lacking = [t for t in report.trials if t.status is TrialStatus.OUT_OF_MEMORY]
    budget, most = report.memory_bytes, max(s.peak for s in found)
    far = budget > 1.6 * most and not lacking  # drawn beyond a break of the axis, to leave room for the trials
    low, high = padded([s.peak for s in found] + ([] if far else [budget]), 0.06)
    unit, name = (GIB, "GiB") if high >= GIB else (1 << 20, "MiB")
    label = f"Throughput against peak memory of {len(found)} configurations; budget {show_memory(budget)}"
    figure, axes = trial_axes(width, label, f"peak memory, {name}", "samples/s")
    limited(axes, "x", low / unit, high / unit, width)
    limited(axes, "y", *padded([s.rate for s in found], 0.1), width)
    best = report.result.best if report.result is not None else None
    winner = best.measurement if best is not None and best.confirmed else None
    fastest = winner.samples_per_second if winner is not None else math.inf
    front = pareto([s for s in found if not s.is_once or s.rate <= fastest])
    stairs = [s.peak / unit for s in front], [s.rate for s in front]
    words = "Pareto front: nothing is faster with as little memory"
    on_top = ("trial", "baseline", "winner")
    axes.step(*stairs, where="post", color=COLOURS["front"], label=words)
    for spot in sorted(found, key=lambda s: on_top.index(_kind(report, s.config))):
        peak, kind = spot.peak / unit, _kind(report, spot.config)
        if kind != "trial":
            mark(axes, kind, peak, spot.rate, f"{kind}: {spot.tip}", kind)
        elif spot in front:
            mark(axes, "front", peak, spot.rate, spot.tip, words)
        else:
            mark(axes, "trial", peak, spot.rate, spot.tip, "other configurations; above the winner those measured once")
    bottom = axes.get_xaxis_transform()
    for trial in lacking:
        needed = trial.prediction.peak_bytes if trial.prediction is not None else trial.peak_bytes
        at = min(max(needed or budget, budget), high) / unit
        tip = f"{shown_changes(trial.changes or ())}\nran out of memory, trial {trial.label}"
        mark(axes, "failed", at, 0.025, tip, "ran out of memory, at what was predicted", transform=bottom)
    edge, place = (1.06, axes.transAxes) if far else (budget / unit, bottom)
    look: dict[str, Any] = {"color": COLOURS["budget"], "transform": place}
    dashes = (0, (3, 2))
    axes.plot([edge, edge], [0, 1], label="memory budget", linewidth=2, linestyle=dashes, clip_on=False, **look)
    axes.text(edge, 1.02, f"budget {show_memory(budget)}", ha="right", **look)
    if far:
        axes.text(1.03, 0, "//", transform=place, ha="center", va="center", color=COLOURS["muted"])
    return with_legend(figure, width, right=0.09 * width if far else 12)


def best_over_time(report: RunReport, width: float) -> Figure | None:
    """Return the chart of the best throughput so far over the time of trials; after the finals it is the winner's."""
    explored = [t for t in report.trials if t.purpose is not None and t.purpose.explores and t.ended_s is not None]
    completed = sorted((t for t in explored if t.is_compared), key=lambda t: t.ended_s or 0.0)
    if not completed:
        return None
    again = [t for t in report.trials if t.is_compared and t.purpose is Purpose.FINAL]
    last = max(t.ended_s or 0.0 for t in [*explored, *again])
    unit, name = (3600.0, "hours") if last > 7200 else (60.0, "minutes") if last > 120 else (1.0, "seconds")
    label = f"Best throughput so far over {show_time(last)} of trials"
    figure, axes = trial_axes(width, label, f"{name} for which trials had run", "samples/s")
    limited(axes, "x", 0, last * 1.02 / unit, width)
    limited(axes, "y", *padded([t.samples_per_second or 0.0 for t in [*completed, *again]], 0.1), width)
    times, rates = zip(*best_so_far(report, completed, again, last), strict=True)
    words = "best so far; after the finals the winner"
    axes.step([t / unit for t in times], rates, where="post", color=COLOURS["best"], linewidth=2.2, label=words)
    for trial in [*explored, *again]:
        at, rate = (trial.ended_s or 0.0) / unit, trial.samples_per_second
        kind = _kind(report, trial.config)
        if rate is None:
            mark(axes, "failed", at, 0.025, _tip(trial), "failed", transform=axes.get_xaxis_transform())
        elif trial.purpose is not Purpose.FINAL:
            mark(axes, "trial", at, rate, _tip(trial), "a trial of the search")
        elif kind == "trial":
            mark(axes, "trial again", at, rate, _tip(trial), "a trial of the finals")
        else:
            mark(axes, f"{kind} again", at, rate, _tip(trial), f"the {kind}, measured again in the finals")
    return with_legend(figure, width)


def best_so_far(
    report: RunReport, searched: Sequence[TrialRow], finals: Sequence[TrialRow], last_s: float
) -> list[tuple[float, float]]:
    """Return the times at which the best throughput changed, with its new value, up to `last_s`.

    It is the fastest of the trials `searched`, in the order they ended, and after the last of `finals` the winner's.
    """
    points: list[tuple[float, float]] = []
    best = 0.0
    for trial in searched:
        if (trial.samples_per_second or 0.0) > best:
            best = trial.samples_per_second or 0.0
            points.append((trial.ended_s or 0.0, best))
    measured = report.result.best.measurement if report.result is not None and finals else None
    if measured is not None:
        best = measured.samples_per_second
        points.append((max(points[-1][0], *(t.ended_s or 0.0 for t in finals)), best))
    return [*points, (last_s, best)]


def _kind(report: RunReport, config: TrainConfig) -> str:
    if report.result is not None and config == report.result.best.config:
        return "winner"
    return "baseline" if config == report.baseline else "trial"


def _tip(trial: TrialRow) -> str:
    rate = f", {show_rate(trial.samples_per_second)} samples/s" if trial.samples_per_second is not None else ""
    return f"trial {trial.label}: {shown_changes(trial.changes or ())}\n{trial.status}{rate}"


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
    for part, (words, value, known) in zip(explanation.contributions, contribution_rows(explanation), strict=False):
        ratio, interval = part.ratio, part.interval
        if ratio is None or winner is None:
            found.append(Step(words, value, part.cause or ""))
            continue
        start = at if at is not None else winner / ratio
        ends: tuple[float | None, float | None] = (None, None)
        is_told = interval is not None and interval.is_narrow
        if interval is not None and is_told:
            ends = start * interval.low, start * interval.high
        kind = ("gain" if ratio >= 1 else "loss") + ("" if part.basis == "in turn" and is_told else " weak")
        found.append(Step(words, value, f"{words}: {value}\n{known}", kind, start, start * ratio, *ends))
        at = start * ratio if at is not None else None
    together = explanation.together
    if together is not None and at is not None:
        tip = "the total beyond the product of the knobs' factors"
        kind = f"rest {'gain' if together >= 1 else 'loss'}"
        value = show_ratio(together, explanation.together_interval)
        found.append(Step("together", value, tip, kind, at, at * together))
    return found


# Kinds of bars in the waterfall: words of the legend, opacity, line around it.
_BARS = {
    "weak": ("told by trials of the search, or not surely", 0.35, "--"),
    "rest": ("together", 0.15, "-"),
    "": ("measured in turn, with its 95 % interval", 1.0, "none"),
}


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
    axes = figure.add_subplot(ylim=(rows, 0), yticks=[])  # each row one unit high: a text, and a bar below it
    figure.subplots_adjust(0.005, 0, 0.995, 1)
    told += [rate for _, rate, _ in ends]
    axes.set(xscale="log", xlabel="samples/s")
    axes.grid(visible=False)
    axes.grid(visible=True, axis="x")
    limited(axes, "x", min(told) / 1.04, max(told) * 1.04, width, logs=True)
    for words, rate, row in ends:
        row_text(axes, row, words, f"{show_rate(rate)} samples/s", width, weight="bold")
        mark(axes, words, rate, row + 0.7, f"{words}: {show_rate(rate)} samples/s", "_")
    for row, step in enumerate(steps, int(bool(base))):
        row_text(axes, row, step.words, step.value, width)
        if step.start is None or step.end is None:
            place = axes.get_yaxis_transform()
            axes.text(0, row + 0.7, cut(step.tip, width), transform=place, va="center", color=COLOURS["muted"])
            continue
        label, opacity, style = next(_BARS[kind] for kind in _BARS if kind in step.kind)
        axes.plot([step.start] * 2, [row - 0.3, row + 0.7], color=COLOURS["line"], linewidth=1, zorder=0)
        look: dict[str, Any] = {
            "height": 0.34,
            "edgecolor": COLOURS["ink"],
            "ls": style,
            "clip_on": False,
            "label": label,
        }
        colour = COLOURS["best" if "gain" in step.kind else "failed"], opacity
        axes.barh(row + 0.7, step.end - step.start, left=step.start, color=colour, gid=tip_of(step.tip), **look)
        if step.low is not None and step.high is not None:
            axes.plot([step.low, step.high], [row + 0.7] * 2, color=COLOURS["ink"], marker="|", gid="tip:95 % interval")
    return with_legend(figure, width, left=4, right=4, top=0)
