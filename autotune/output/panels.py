"""The charts of a report, with their names, titles and legends, for the HTML page and the picture."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from autotune.output.bars import component_icon, component_sizes, memory_bars, time_bars, waterfall, waterfall_steps
from autotune.output.run_report import RunReport
from autotune.output.scatter import best_over_time, predicted_against_measured, throughput_against_memory
from autotune.output.svg import Chart, line, mark, rectangle
from autotune.values.trial import TrialStatus


class Key(NamedTuple):
    """An entry of a legend; its icon is SVG within 18 by 16 units."""

    drawn: str
    words: str


class Panel(NamedTuple):
    """A chart; `draw` returns it at a given width, or None if there is nothing to draw."""

    name: str
    title: str
    draw: Callable[[float], Chart | None]
    legend: tuple[Key, ...] = ()


def panels(report: RunReport) -> list[Panel]:
    """Return the charts in the order of the page."""
    found = report.explanation
    return [
        Panel(
            "waterfall",
            "What each knob brought",
            lambda width: waterfall(found, width) if found is not None else None,
            _waterfall_keys(report),
        ),
        Panel("pareto", "Throughput against memory", lambda w: throughput_against_memory(report, w), _pareto(report)),
        Panel("progress", "Best so far", lambda w: best_over_time(report, w), _PROGRESS),
        Panel(
            "predicted_rate",
            "Predicted against measured throughput",
            lambda width: predicted_against_measured(report, "rate", width),
            _AGREEMENT,
        ),
        Panel(
            "predicted_memory",
            "Predicted against measured memory",
            lambda width: predicted_against_measured(report, "memory", width),
            _AGREEMENT,
        ),
        Panel("memory", "Where the memory goes", lambda width: memory_bars(report, width), _memory_keys(report)),
        Panel("time", "Where the time went", lambda width: time_bars(report.spent, width)),
    ]


def _marked(shape: str, kind: str, words: str) -> Key:
    return Key(mark(shape, 9, 8, kind, size=5.0), words)


def _lined(kind: str, words: str) -> Key:
    return Key(line(1, 8, 17, 8, kind), words)


_AGREEMENT = (_marked("circle", "trial", "a trial"), _lined("agree", "predicted = measured"))

_PROGRESS = (
    _lined("best-line", "best so far; after the finals the winner"),
    _marked("circle", "trial", "a trial of the search"),
    _marked("diamond", "best", "the winner, measured again in the finals"),
    _marked("diamond", "baseline", "the baseline, measured again"),
    _marked("cross", "failed", "failed"),
)


def _pareto(report: RunReport) -> tuple[Key, ...]:
    keys = [
        _marked("square", "baseline", "baseline"),
        _marked("star", "best", "winner"),
        _marked("circle", "front", "Pareto front: nothing is faster with as little memory"),
        _marked("circle", "trial", "other configurations; above the winner those measured once"),
        _lined("budget", "memory budget"),
    ]
    if any(t.status is TrialStatus.OUT_OF_MEMORY for t in report.trials):
        keys.append(_marked("cross", "failed", "ran out of memory, at what was predicted"))
    return tuple(keys)


def _waterfall_keys(report: RunReport) -> tuple[Key, ...]:
    """Return the legend of the kinds of bars in the waterfall."""
    found = report.explanation
    if found is None:
        return ()
    kinds = {step.kind for step in waterfall_steps(found)}
    keys = []
    if kinds & {"gain", "loss"}:
        keys.append(Key(rectangle(1, 3, 16, 10, "bar gain"), "measured in turn, with its 95 % interval"))
    if kinds & {"gain weak", "loss weak"}:
        keys.append(Key(rectangle(1, 3, 16, 10, "bar gain weak"), "told by trials of the search, or not surely"))
    if found.together is not None:
        keys.append(Key(rectangle(1, 3, 16, 10, "bar gain rest"), "together"))
    return tuple(keys)


def _memory_keys(report: RunReport) -> tuple[Key, ...]:
    """Return the legend of the memory components."""
    keys = [Key(component_icon(name), name) for name in component_sizes(report)]
    return (*keys, _marked("triangle", "best", "measured peak"))
