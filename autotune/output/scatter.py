"""Scatter charts of trials: throughput against memory, best over time, predicted against measured.

Each is drawn for a given width, since its texts keep their size on wide and on narrow screens.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import Literal, NamedTuple

from autotune.output import svg
from autotune.space.knobs import shown_changes
from autotune.units import GIB, show_memory, show_rate, show_time
from autotune.values.config import TrainConfig
from autotune.values.result import RunReport, TrialRow
from autotune.values.trial import Purpose, TrialStatus

_MIB = 1 << 20

# A budget above this multiple of the highest peak is drawn beyond a break of the axis, to leave room for the trials.
_FAR = 1.6

# Ratio of the largest to the smallest value from which on axes are logarithmic.
_WIDE = 20.0


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
    return [_spot(config, trials) for config, trials in by_config.items()]


def _spot(config: TrainConfig, trials: Sequence[TrialRow]) -> Spot:
    """Return a configuration with the rate that all outputs state; results of older versions lack it."""
    finals = [t for t in trials if t.purpose is Purpose.FINAL]
    rate = trials[0].config_samples_per_second
    if rate is None:
        rate = statistics.fmean(t.samples_per_second or 0.0 for t in finals or trials)
    peak = max(t.peak_bytes or 0 for t in trials)
    numbers = ", ".join(t.label for t in trials)
    tip = f"{shown_changes(trials[0].changes or ())}\n{show_rate(rate)} samples/s, {show_memory(peak)}\ntrial {numbers}"
    return Spot(config, rate, peak, tip if finals else f"{tip}, measured once", is_once=not finals)


def pareto(found: Sequence[Spot]) -> list[Spot]:
    """Return the Pareto front of throughput and memory, in ascending order of memory."""
    front: list[Spot] = []
    for spot in sorted(found, key=lambda s: (s.peak, -s.rate)):
        if not front or spot.rate > front[-1].rate:
            front.append(spot)
    return front


def throughput_against_memory(report: RunReport, width: float) -> svg.Chart | None:
    """Return the chart of configurations by peak memory and throughput, with budget and Pareto front."""
    found = spots(report)
    if not found:
        return None
    height = 330.0
    budget = report.memory_bytes
    lacking = [t for t in report.trials if t.status is TrialStatus.OUT_OF_MEMORY]
    far = budget > _FAR * max(s.peak for s in found) and not lacking
    frame = svg.Frame(52.0, 36.0, width - (54.0 if far else 12.0), height - 46.0)
    low, high = svg.padded([s.peak for s in found] + ([] if far else [budget]))
    unit, name = (GIB, "GiB") if high >= GIB else (_MIB, "MiB")
    x = svg.linear(low, high, frame.left, frame.right)
    y_low, y_high = svg.padded([s.rate for s in found], 0.1)
    y = svg.linear(y_low, y_high, frame.bottom - 14, frame.top)
    parts = [
        svg.x_axis(frame, svg.labelled(low, high, svg.most_labels(frame), unit), x),
        svg.rows(frame, svg.labelled(y_low, y_high, 6), y),
        svg.text(width / 2, height - 6, f"peak memory, {name}", anchor="middle", kind="muted"),
        svg.text(4, 12, "samples/s", kind="muted"),
        _budget_line(frame, budget, x, width, far=far),
    ]
    for trial in lacking:
        needed = trial.prediction.peak_bytes if trial.prediction is not None else trial.peak_bytes
        at = min(max(x(max(needed or budget, budget)), frame.left), frame.right)
        tip = f"{shown_changes(trial.changes or ())}\nran out of memory, trial {trial.label}"
        parts.append(svg.mark("cross", at, frame.bottom - 7, "failed", tip, 4.0))
    best = report.result.best if report.result is not None else None
    winner = best.measurement if best is not None and best.confirmed else None
    fastest = winner.samples_per_second if winner is not None else math.inf
    front = pareto([s for s in found if not s.is_once or s.rate <= fastest])
    parts.append(svg.path(svg.stairs([(x(s.peak), y(s.rate)) for s in front]), "front-line"))
    parts += [_marked(report, s, x(s.peak), y(s.rate), s in front) for s in _best_last(report, found)]
    label = f"Throughput against peak memory of {len(found)} configurations; budget {show_memory(budget)}"
    return svg.Chart("".join(parts), width, height, label)


def best_over_time(report: RunReport, width: float) -> svg.Chart | None:
    """Return the chart of the best throughput so far over the time of trials; after the finals it is the winner's."""
    explored = [t for t in report.trials if t.purpose is not None and t.purpose.explores and t.ended_s is not None]
    completed = sorted((t for t in explored if t.is_compared), key=lambda t: t.ended_s or 0.0)
    if not completed:
        return None
    height = 300.0
    again = [t for t in report.trials if t.is_compared and t.purpose is Purpose.FINAL]
    last = max(t.ended_s or 0.0 for t in [*explored, *again])
    unit, name = (3600.0, "hours") if last > 7200 else (60.0, "minutes") if last > 120 else (1.0, "seconds")
    frame = svg.Frame(52.0, 24.0, width - 12.0, height - 46.0)
    x = svg.linear(0.0, last, frame.left, frame.right - 8)
    y_low, y_high = svg.padded([t.samples_per_second or 0.0 for t in [*completed, *again]], 0.1)
    y = svg.linear(y_low, y_high, frame.bottom - 14, frame.top)
    parts = [
        svg.x_axis(frame, svg.labelled(0.0, last, svg.most_labels(frame), unit), x),
        svg.rows(frame, svg.labelled(y_low, y_high, 6), y),
        svg.text(width / 2, height - 6, f"{name} for which trials had run", anchor="middle", kind="muted"),
        svg.text(4, 12, "samples/s", kind="muted"),
        svg.path(
            svg.stairs([(x(at), y(rate)) for at, rate in best_so_far(report, completed, again, last)]), "best-line"
        ),
    ]
    for trial in [*explored, *again]:
        at = x(trial.ended_s or 0.0)
        tip = _trial_tip(trial)
        if trial.samples_per_second is not None:
            shape = "diamond" if trial.purpose is Purpose.FINAL else "circle"
            kind = _kind(report, trial.config) if shape == "diamond" else "trial"
            parts.append(svg.mark(shape, at, y(trial.samples_per_second), kind, tip, 4.0))
        else:
            parts.append(svg.mark("cross", at, frame.bottom - 7, "failed", tip, 4.0))
    return svg.Chart("".join(parts), width, height, f"Best throughput so far over {show_time(last)} of trials")


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


class Miss(NamedTuple):
    """A trial's prediction and what was measured."""

    trial: TrialRow
    predicted: float
    measured: float

    @property
    def error(self) -> float:
        """Relative error of the prediction."""
        return self.predicted / self.measured - 1


def misses(report: RunReport, what: Literal["rate", "memory"]) -> list[Miss]:
    """Return the predictions of trials, made before they ran, with the measured values."""
    found = []
    for trial in report.trials:
        prediction = trial.prediction
        if prediction is None or not trial.is_compared or not trial.peak_bytes or not trial.samples_per_second:
            continue
        rate = what == "rate"
        predicted = prediction.samples_per_second if rate else float(prediction.peak_bytes)
        if math.isfinite(predicted) and predicted > 0:
            found.append(Miss(trial, predicted, trial.samples_per_second if rate else float(trial.peak_bytes)))
    return found


def median_error(found: Sequence[Miss]) -> float:
    """Return the median absolute relative error."""
    return statistics.median(abs(m.error) for m in found)


def predicted_against_measured(report: RunReport, what: Literal["rate", "memory"], width: float) -> svg.Chart | None:
    """Return the chart of predicted against measured values, with the line on which they agree."""
    found = misses(report, what)
    if not found:
        return None
    height = min(width, 330.0)
    everything = [v for m in found for v in (m.predicted, m.measured)]
    low, high = min(everything) * 0.93, max(everything) * 1.07
    unit, name = (1, "samples/s") if what == "rate" else (GIB, "GiB") if high >= GIB else (_MIB, "MiB")
    frame = svg.Frame(52.0, 24.0, width - 12.0, height - 46.0)
    scale = svg.logarithmic if high / low > _WIDE else svg.linear
    x, y = scale(low, high, frame.left, frame.right), scale(low, high, frame.bottom, frame.top)
    values = svg.labelled(low, high, svg.most_labels(frame), unit, logs=scale is svg.logarithmic)
    parts = [
        svg.x_axis(frame, values, x),
        svg.rows(frame, values, y),
        svg.line(x(low), y(low), x(high), y(high), "agree"),
        svg.text(width / 2, height - 6, f"measured, {name}", anchor="middle", kind="muted"),
        svg.text(4, 12, f"predicted, {name}", kind="muted"),
    ]
    for miss in found:
        tip = f"{_trial_tip(miss.trial)}\npredicted {miss.error:+.0%}"
        parts.append(svg.mark("circle", x(miss.measured), y(miss.predicted), "trial", tip, 4.0))
    quantity = "throughput" if what == "rate" else "memory"
    label = f"Predicted against measured {quantity} of {len(found)} trials, median error {median_error(found):.0%}"
    return svg.Chart("".join(parts), width, height, label)


def _budget_line(frame: svg.Frame, budget: int, x: svg.Scale, width: float, *, far: bool) -> str:
    words = f"budget {show_memory(budget)}"
    if not far:
        at = x(budget)
        return svg.line(at, frame.top - 4, at, frame.bottom, "budget") + svg.text(
            at + 4, frame.top - 8, words, anchor="end", kind="budget-text"
        )
    at, gap = width - 18, frame.right + 12
    broken = svg.path([(gap - 4, frame.bottom + 5), (gap, frame.bottom - 5)], "axis") + svg.path(
        [(gap + 3, frame.bottom + 5), (gap + 7, frame.bottom - 5)], "axis"
    )
    axis = svg.line(gap + 6, frame.bottom, width - 6, frame.bottom, "axis")
    label = svg.text(width - 6, frame.top - 8, words, anchor="end", kind="budget-text")
    return broken + axis + svg.line(at, frame.top - 4, at, frame.bottom, "budget") + label


def _best_last(report: RunReport, found: Sequence[Spot]) -> list[Spot]:
    """Return the spots in the order of drawing: baseline and winner last, so that they are on top."""
    best = report.result.best.config if report.result is not None else None
    return sorted(found, key=lambda s: (s.config == report.baseline) + 2 * (s.config == best))


def _kind(report: RunReport, config: TrainConfig) -> str:
    """Return the CSS class of a configuration's mark."""
    if report.result is not None and config == report.result.best.config:
        return "best"
    return "baseline" if config == report.baseline else "trial"


def _marked(report: RunReport, spot: Spot, x: float, y: float, on_front: bool) -> str:
    kind = _kind(report, spot.config)
    if kind == "trial":
        return svg.mark("circle", x, y, "front" if on_front else "trial", spot.tip, 4.0)
    shape, size, words = ("star", 6.0, "winner") if kind == "best" else ("square", 5.0, "baseline")
    return svg.mark(shape, x, y, kind, f"{words}: {spot.tip}", size)


def _trial_tip(trial: TrialRow) -> str:
    rate = f", {show_rate(trial.samples_per_second)} samples/s" if trial.samples_per_second is not None else ""
    return f"trial {trial.label}: {shown_changes(trial.changes or ())}\n{trial.status}{rate}"
