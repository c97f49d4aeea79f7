"""The charts of a report, each with its name, title and legend, for the HTML page and notebooks; and all as a picture.

The optional package `vl-convert-python` (the extra `png`) renders the picture's SVG; it contains its own fonts, so that
the picture is the same everywhere.
"""

from __future__ import annotations

import html
from collections.abc import Callable, Sequence
from importlib import resources
from typing import NamedTuple

from autotune.errors import MachineError
from autotune.output import report_facts as facts
from autotune.output.explanation import waterfall, waterfall_steps
from autotune.output.memory import component_icon, component_sizes, icicle, memory_bars
from autotune.output.scatter import best_over_time, predicted_against_measured, throughput_against_memory
from autotune.output.svg import FONT, Chart, line, mark, rectangle, resolved, tag, text, text_width
from autotune.units import show_time
from autotune.values.result import RunReport
from autotune.values.time_spent import Spent
from autotune.values.trial import TrialStatus

# Sizes of the picture, in units of the charts.
_COLUMN, _GAP, _EDGE = 620.0, 36.0, 24.0
_HEADING = 20.0  # font size of the answer
_SCALE = 1.5  # pixels per unit


class Key(NamedTuple):
    """An entry of a legend; its icon is SVG within 18 by 16 units."""

    drawn: str
    words: str


class Panel(NamedTuple):
    """A chart: `plot` returns it at a given width without its legend, or None if there is nothing to draw."""

    name: str
    title: str
    plot: Callable[[float], Chart | None]
    legend: Sequence[Key] = ()

    def draw(self, width: float) -> Chart | None:
        """Return the chart with its legend below, in lines no wider than that; None: nothing to draw."""
        chart = self.plot(width)
        if chart is None or not self.legend:
            return chart
        parts = [chart.body]
        x, y = 0.0, chart.height + 10
        for key in self.legend:
            lines = wrapped(key.words, width - 24)
            needed = 24 + max(map(text_width, lines))
            if x and x + needed > width:
                x, y = 0.0, y + 20
            parts.append(tag("g", key.drawn, transform=f"translate({x:.1f} {y:.1f})"))
            parts += [text(x + 24, y + 12 + 16 * at, words, kind="muted") for at, words in enumerate(lines)]
            x, y = x + needed + 16, y + 16 * (len(lines) - 1)
        return chart._replace(body="".join(parts), height=y + 20)


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
        Panel("alive", "What is alive at the peak", lambda width: _alive(report, width)),
        Panel("time", "Where the time went", lambda width: time_bars(report.spent, width)),
    ]


def _alive(report: RunReport, width: float) -> Chart | None:
    """Return the icicle of the winner, or of the baseline where that is all there is."""
    return icicle(report.breakdowns[-1].alive, width) if report.breakdowns else None


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


def time_bars(spent: Spent, width: float) -> Chart | None:
    """Return a bar for each kind of work in a search's time, in descending order."""
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
    label = f"Where the {show_time(spent.total_s)} of the search went{spent.waited}"
    return Chart("".join(parts), width, len(shares) * 36.0, label)


def png_report(report: RunReport) -> bytes:
    """Return the picture.

    Raises:
        MachineError: The package vl-convert-python isn't installed.
    """
    try:
        import vl_convert
    except ImportError:
        raise MachineError(
            "--format png: needs the package vl-convert-python: pip install 'autotune-train[png]'; html needs nothing"
        ) from None
    return bytes(vl_convert.svg_to_png(poster(report), scale=_SCALE))


def poster(report: RunReport, theme: str = "light") -> str:
    """Return the picture as SVG, with CSS variables replaced by the colours of `theme`."""
    width = 2 * _EDGE + 2 * _COLUMN + _GAP
    parts = []
    y = _EDGE + _HEADING
    for words in wrapped(facts.answer(report), width - 2 * _EDGE, _HEADING):
        parts.append(text(_EDGE, y, words, kind="answer"))
        y += _HEADING * 1.3
    parts.append(text(_EDGE, y, facts.subject(report), kind="muted", limit=width - 2 * _EDGE))
    bottoms = [y + 34.0, y + 34.0]
    for panel in panels(report):
        chart = panel.draw(_COLUMN)
        if chart is None:
            continue
        column = bottoms.index(min(bottoms))  # the shorter one
        x, y = _EDGE + column * (_COLUMN + _GAP), bottoms[column]
        parts.append(text(x, y, panel.title, kind="strong"))
        parts.append(tag("g", chart.body, transform=f"translate({x} {y + 14})"))
        bottoms[column] += chart.height + 54
    style = resolved((resources.files("autotune.output") / "templates" / "chart.css").read_text(), theme)
    style += resolved(" .page { fill: var(--card); } .answer { font-size: 20px; font-weight: 600; }", theme)
    height = max(bottoms)
    inside = tag("style", html.escape(style)) + rectangle(0, 0, width, height, "page") + "".join(parts)
    return tag(
        "svg", inside, xmlns="http://www.w3.org/2000/svg", width=width, height=height, viewBox=f"0 0 {width} {height}"
    )


def wrapped(words: str, limit: float, size: float = FONT) -> list[str]:
    """Return `words` in lines no wider than `limit`."""
    lines = [""]
    for word in words.split():
        longer = f"{lines[-1]} {word}".strip()
        if text_width(longer, size) <= limit or not lines[-1]:
            lines[-1] = longer
        else:
            lines.append(word)
    return lines
