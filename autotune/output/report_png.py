"""A report as one PNG picture: the result in words, and the charts of the page.

The optional package `vl-convert-python` (the extra `png`) renders the SVG; it contains its own fonts, so the picture is
the same everywhere.
"""

from __future__ import annotations

import html
from importlib import resources

from autotune.errors import MachineError
from autotune.output import report_facts as facts
from autotune.output.panels import Key, Panel, panels
from autotune.output.run_report import RunReport
from autotune.output.svg import FONT, Chart, rectangle, resolved, tag, text, text_width

_COLUMN, _GAP, _EDGE = 620.0, 36.0, 24.0
_HEADING = 20.0  # font size of the answer
_SCALE = 1.5  # pixels per unit


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
    for line in wrapped(facts.answer(report), width - 2 * _EDGE, _HEADING):
        parts.append(text(_EDGE, y, line, kind="answer"))
        y += _HEADING * 1.3
    parts.append(text(_EDGE, y, facts.subject(report), kind="muted", limit=width - 2 * _EDGE))
    bottoms = [y + 34.0, y + 34.0]
    for panel in panels(report):
        chart = panel.draw(_COLUMN)
        if chart is None:
            continue
        column = bottoms.index(min(bottoms))  # the shorter one
        drawn, height = _placed(panel, chart, _EDGE + column * (_COLUMN + _GAP), bottoms[column])
        parts.append(drawn)
        bottoms[column] += height + 40
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


def _placed(panel: Panel, chart: Chart, x: float, y: float) -> tuple[str, float]:
    """Return a panel at a position, and its height."""
    parts = [text(x, y, panel.title, kind="strong")]
    inside = tag("g", chart.body, transform=f"translate({x} {y + 14})")
    legend, lines = _legend(panel.legend, x, y + 14 + chart.height + 14)
    return "".join([*parts, inside, legend]), 14 + chart.height + 14 + 20 * lines


def _legend(keys: tuple[Key, ...], x: float, y: float) -> tuple[str, int]:
    """Return a legend in lines no wider than a column, and the number of lines."""
    parts = []
    at, line = 0.0, 0
    for key in keys:
        needed = 24 + text_width(key.words) + 16
        if at and at + needed > _COLUMN:
            at, line = 0.0, line + 1
        top = y + 20 * line
        parts.append(tag("g", key.drawn, transform=f"translate({x + at} {top})"))
        parts.append(text(x + at + 24, top + 12, key.words, kind="muted"))
        at += needed
    return "".join(parts), line + 1 if keys else 0
