"""A scatter plot of predicted against measured memory, as SVG and without a library. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

_SIZE, _MARGIN = 560, 60
_COLOURS = ("#3060a8", "#c04830", "#508838", "#8858a0", "#b08820", "#408888", "#804848", "#606060")


def scatter(series: Mapping[str, Sequence[tuple[float, float]]], *, title: str) -> str:
    """Return an SVG with both axes logarithmic and the diagonal drawn.

    Args:
        series: Points of (measured, predicted) in GB by what they are called; neither may be 0.
        title: Shown above.
    """
    values = [value for points in series.values() for point in points for value in point]
    low, high = (math.log10(f(values)) for f in (min, max)) if values else (0.0, 1.0)
    low, high = low - 0.05, high + 0.05

    def place(value: float) -> float:
        return _MARGIN + (math.log10(value) - low) / (high - low) * (_SIZE - 2 * _MARGIN)

    def y(value: float) -> float:
        return _SIZE - place(value)

    first, last = 10**low, 10**high
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_SIZE + 190}" height="{_SIZE}" font-family="sans-serif" '
        'font-size="12">',
        '<rect width="100%" height="100%" fill="white"/>',
        f'<text x="{_MARGIN}" y="28" font-size="15">{title}</text>',
        f'<rect x="{_MARGIN}" y="{_MARGIN}" width="{_SIZE - 2 * _MARGIN}" height="{_SIZE - 2 * _MARGIN}" fill="none" '
        'stroke="#999"/>',
        _line(place(first), y(first), place(last), y(last)),
    ]
    for tick in _ticks(first, last):
        parts.append(f'<text x="{place(tick):.1f}" y="{_SIZE - _MARGIN + 18}" text-anchor="middle">{tick:g}</text>')
        parts.append(f'<text x="{_MARGIN - 8}" y="{y(tick) + 4:.1f}" text-anchor="end">{tick:g}</text>')
    parts.append(f'<text x="{_SIZE / 2}" y="{_SIZE - 14}" text-anchor="middle">measured, GB</text>')
    parts.append(f'<text transform="translate(18 {_SIZE / 2}) rotate(-90)" text-anchor="middle">predicted, GB</text>')
    for number, (name, points) in enumerate(series.items()):
        colour = _COLOURS[number % len(_COLOURS)]
        parts += [
            f'<circle cx="{place(m):.1f}" cy="{y(p):.1f}" r="3.5" fill="{colour}" fill-opacity="0.6"/>'
            for m, p in points
        ]
        top = _MARGIN + 10 + 20 * number
        parts.append(f'<circle cx="{_SIZE - _MARGIN + 14}" cy="{top}" r="4" fill="{colour}"/>')
        parts.append(f'<text x="{_SIZE - _MARGIN + 24}" y="{top + 4}">{name} ({len(points)})</text>')
    return "\n".join([*parts, "</svg>", ""])


def _line(x1: float, y1: float, x2: float, y2: float) -> str:
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="#bbb"/>'


def _ticks(first: float, last: float) -> list[float]:
    ticks = [digit * 10.0**power for power in range(-2, 5) for digit in (1, 2, 5)]
    return [tick for tick in ticks if first <= tick <= last]
