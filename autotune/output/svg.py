"""Building blocks of charts: colours of a light and a dark theme, SVG elements with escaped texts, scales and axes.

Series have the colours of Okabe and Ito (Color Universal Design, https://jfly.uni-koeln.de/color/), distinguishable
with the common kinds of colour blindness; each has a shape or a label of its own as well. Some are made darker or
lighter for a contrast to the background of at least 3:1 for marks and 4.5:1 for text (WCAG 2.2, 1.4.11 and 1.4.3).
"""

from __future__ import annotations

import html
import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from autotune.units import visible


class Shade(NamedTuple):
    """One colour in both themes."""

    light: str
    dark: str


# Colours of surfaces and texts.
PAPER = {
    "page": Shade("#f4f5f7", "#101317"),
    "card": Shade("#ffffff", "#191d23"),
    "line": Shade("#d5d9df", "#343b45"),
    "grid": Shade("#e7e9ed", "#2a3038"),
    "ink": Shade("#16191d", "#eceff3"),
    "muted": Shade("#565e69", "#a3adb9"),
}

# Colours of marks and lines on a card.
SERIES = {
    "baseline": Shade("#6b7280", "#9aa4b1"),
    "best": Shade("#0072b2", "#56b4e9"),
    "front": Shade("#007f5c", "#17a67d"),
    "trial": Shade("#7d8590", "#8a94a1"),
    "failed": Shade("#d55e00", "#f0803c"),
    "budget": Shade("#a8327d", "#e58fc4"),
    "gain": Shade("#0072b2", "#56b4e9"),
    "loss": Shade("#d55e00", "#f0803c"),
}

# Colours of memory components, in the order of the stacked bar; neighbours differ in lightness.
COMPONENTS = {
    "weights": Shade("#0072b2", "#0072b2"),
    "gradients": Shade("#56b4e9", "#56b4e9"),
    "optimizer": Shade("#e69f00", "#e69f00"),
    "activations": Shade("#009e73", "#009e73"),
    "temporaries": Shade("#cc79a7", "#cc79a7"),
    "communication": Shade("#f0e442", "#f0e442"),
    "beyond": Shade("#8c8c8c", "#8c8c8c"),
}


_COLOURS = {**PAPER, **SERIES, **{f"part-{name}": shade for name, shade in COMPONENTS.items()}}


def variables(theme: str) -> str:
    """Return the declarations of CSS variables for 'light' or 'dark'."""
    return " ".join(f"--{name}: {getattr(shade, theme)};" for name, shade in _COLOURS.items())


def resolved(style: str, theme: str) -> str:
    """Return `style` with its CSS variables replaced by values, for renderers that don't support variables."""
    for name, shade in _COLOURS.items():
        style = style.replace(f"var(--{name})", getattr(shade, theme))
    return style


# Width of a character in ems: measured over labels in DejaVu Sans and Liberation Sans the mean is 0.50 to 0.58.
_EM = 0.6
FONT = 12.0

Scale = Callable[[float], float]


class Chart(NamedTuple):
    """The body of an SVG drawing, with its size in user units; CSS of the page sets size and colours."""

    body: str
    width: float
    height: float
    label: str  # description for screen readers

    def svg(self, kind: str = "") -> str:
        """Return the chart as an SVG element of the class `kind`."""
        return tag(
            "svg",
            self.body,
            viewBox=f"0 0 {_short(self.width)} {_short(self.height)}",
            role="img",
            aria_label=self.label,
            class_=kind or None,
        )


def _escaped(words: str) -> str:
    """Return words escaped for HTML; newlines, which tips contain, are kept."""
    return html.escape("\n".join(map(visible, words.split("\n"))))


def tag(name: str, inside: str = "", **attributes: object) -> str:
    """Return an element with `inside`, which is markup, and escaped attributes; None leaves an attribute out.

    Underscores in names of attributes become hyphens; a trailing one, as in `class_`, is dropped.
    """
    written = "".join(
        f' {_attribute(key)}="{_escaped(_short(value) if isinstance(value, float) else str(value))}"'
        for key, value in attributes.items()
        if value is not None
    )
    return f"<{name}{written}>{inside}</{name}>" if inside else f"<{name}{written}/>"


def text(x: float, y: float, words: str, *, anchor: str = "start", kind: str = "", limit: float | None = None) -> str:
    """Return a text, shortened to the width `limit`."""
    shown = words if limit is None else shortened(words, limit)
    full = tag("title", _escaped(words)) if shown != words else ""
    return tag("text", full + _escaped(shown), x=float(x), y=float(y), text_anchor=anchor, class_=f"t {kind}".strip())


def line(x1: float, y1: float, x2: float, y2: float, kind: str) -> str:
    """Return a line of the class `kind`."""
    return tag("line", x1=float(x1), y1=float(y1), x2=float(x2), y2=float(y2), class_=kind)


def rectangle(x: float, y: float, width: float, height: float, kind: str, tip: str | None = None) -> str:
    """Return a rectangle of at least 1 unit in width."""
    return tag("rect", x=float(x), y=float(y), width=max(1.0, width), height=float(height), class_=kind, data_tip=tip)


def path(points: Iterable[tuple[float, float]], kind: str) -> str:
    """Return a line through `points`."""
    steps = " L".join(f"{_short(x)} {_short(y)}" for x, y in points)
    return tag("path", d=f"M{steps}", class_=kind)


def mark(shape: str, x: float, y: float, kind: str, tip: str | None = None, size: float = 5.0) -> str:
    """Return a mark of the shape 'circle', 'square', 'diamond', 'star', 'cross' or 'triangle'."""
    if shape == "circle":
        return tag("circle", cx=float(x), cy=float(y), r=size, class_=kind, data_tip=tip)
    if shape == "cross":
        wide = f"{2 * size:g}"
        d = f"M{_short(x - size)} {_short(y - size)} l{wide} {wide} m0 -{wide} l-{wide} {wide}"
        return tag("path", d=d, class_=kind, data_tip=tip)
    corners = _CORNERS[shape]
    drawn = " L".join(f"{_short(x + size * dx)} {_short(y + size * dy)}" for dx, dy in corners)
    return tag("path", d=f"M{drawn}Z", class_=kind, data_tip=tip)


def _star() -> list[tuple[float, float]]:
    turns = [(math.pi * at / 5, 1.6 if at % 2 == 0 else 0.7) for at in range(10)]
    return [(radius * math.sin(angle), -radius * math.cos(angle)) for angle, radius in turns]


_CORNERS: dict[str, list[tuple[float, float]]] = {
    "square": [(-1, -1), (1, -1), (1, 1), (-1, 1)],
    "diamond": [(0, -1.35), (1.35, 0), (0, 1.35), (-1.35, 0)],
    "triangle": [(0, -1.2), (1.2, 0.9), (-1.2, 0.9)],
    "star": _star(),
}


def text_width(words: str, size: float = FONT) -> float:
    """Return the approximate width of `words`, rather too large than too small."""
    return len(words) * _EM * size


def shortened(words: str, limit: float) -> str:
    """Return `words`, shortened with an ellipsis to the width `limit`."""
    if text_width(words, FONT) <= limit:
        return words
    letters = max(1, int(limit / (_EM * FONT)) - 1)
    return words[:letters].rstrip(" ,") + "…"


def linear(low: float, high: float, start: float, end: float) -> Scale:
    """Return the map of values from `low` to `high` onto positions from `start` to `end`."""
    span = (high - low) or 1.0
    return lambda value: start + (value - low) / span * (end - start)


def logarithmic(low: float, high: float, start: float, end: float) -> Scale:
    """Return the logarithmic map of positive values from `low` to `high` onto positions from `start` to `end`."""
    inner = linear(math.log(low), math.log(high), start, end)
    return lambda value: inner(math.log(value))


def ticks(low: float, high: float, most: int) -> list[float]:
    """Return at most `most` round values within the range, evenly spaced: steps of 1, 2 or 5 times a power of ten."""
    if not high > low:
        return [low]
    step = 10.0 ** math.floor(math.log10((high - low) / most))
    while True:
        for factor in (1, 2, 5):
            first, last = math.ceil(low / (step * factor) - 1e-9), math.floor(high / (step * factor) + 1e-9)
            if last - first + 1 <= most:
                return [round(n * step * factor, 12) for n in range(first, last + 1)]
        step *= 10


def padded(values: Sequence[float], share: float = 0.06) -> tuple[float, float]:
    """Return the range of `values`, widened at both ends, but not below 0 if no value is."""
    low, high = min(values), max(values)
    room = (high - low) * share or abs(high) * share or 1.0
    return (max(0.0, low - room) if low >= 0 else low - room), high + room


def number(value: float) -> str:
    """Return the label of a tick, with up to four significant digits below 1,000."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def _attribute(key: str) -> str:
    if key == "viewBox":
        return key
    return key.removesuffix("_").replace("_", "-")


def _short(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0")


class Frame(NamedTuple):
    """The area of a chart in which data are drawn."""

    left: float
    top: float
    right: float
    bottom: float


def round_values(low: float, high: float, most: int, *, logs: bool) -> list[float]:
    """Return at most about `most` round values within the range, of a logarithmic axis 1, 2 and 5 of each decade."""
    if not logs:
        return ticks(low, high, most)
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    found = [f * 10.0**d for d in decades for f in (1, 2, 5) if low <= f * 10.0**d <= high]
    return found if len(found) <= most else found[:: math.ceil(len(found) / most)]


def labelled(low: float, high: float, most: int, unit: float = 1.0, *, logs: bool = False) -> list[tuple[float, str]]:
    """Return the values of the range that are round in `unit`, each with its label."""
    return [(v * unit, number(v)) for v in round_values(low / unit, high / unit, most, logs=logs)]


def most_labels(frame: Frame) -> int:
    """Return the number of labels that have room below a frame."""
    return max(2, int((frame.right - frame.left) / 62))


def x_axis(frame: Frame, values: Sequence[tuple[float, str]], x: Scale) -> str:
    """Return the x axis with ticks and labels at `values`."""
    parts = [line(frame.left, frame.bottom, frame.right, frame.bottom, "axis")]
    for value, words in values:
        at = x(value)
        half = text_width(words) / 2
        parts.append(line(at, frame.bottom, at, frame.bottom + 4, "axis"))
        if at + half <= frame.right + 12:
            parts.append(text(at, frame.bottom + 17, words, anchor="middle"))
    return "".join(parts)


def rows(frame: Frame, values: Sequence[tuple[float, str]], y: Scale) -> str:
    """Return horizontal grid lines at `values`, labelled at the left."""
    parts = []
    for value, words in values:
        at = y(value)
        parts.append(line(frame.left, at, frame.right, at, "grid"))
        parts.append(text(frame.left - 6, at + 4, words, anchor="end", limit=frame.left - 8))
    return "".join(parts)


def stairs(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return the corners of a step function through `points`, constant until the next point."""
    found = list(points[:1])
    for (_, y), (next_x, next_y) in itertools.pairwise(points):
        found += [(next_x, y), (next_x, next_y)]
    return found
