"""The frame of a chart of marks: its axes with round values, and lines drawn in steps. Pure."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple

from autotune.output.svg import Scale, line, number, text, text_width, ticks


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


def most_labels(frame: Frame) -> int:
    """Return how many labels have room below a frame."""
    return max(2, int((frame.right - frame.left) / 62))


def x_axis(frame: Frame, values: Sequence[tuple[float, str]], x: Scale) -> str:
    """Return the axis below, with a label at each of `values`."""
    parts = [line(frame.left, frame.bottom, frame.right, frame.bottom, "axis")]
    for value, words in values:
        at = x(value)
        half = text_width(words) / 2
        parts.append(line(at, frame.bottom, at, frame.bottom + 4, "axis"))
        if at + half <= frame.right + 12:
            parts.append(text(at, frame.bottom + 17, words, anchor="middle"))
    return "".join(parts)


def y_axis(frame: Frame, low: float, high: float, y: Scale) -> str:
    """Return the axis at the left, with lines across the frame."""
    return rows(frame, [(v, number(v)) for v in ticks(low, high, 6)], y)


def rows(frame: Frame, values: Sequence[tuple[float, str]], y: Scale) -> str:
    """Return a line across the frame at each of `values`, labelled at the left."""
    parts = []
    for value, words in values:
        at = y(value)
        parts.append(line(frame.left, at, frame.right, at, "grid"))
        parts.append(text(frame.left - 6, at + 4, words, anchor="end", limit=frame.left - 8))
    return "".join(parts)


def stairs(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return the corners of a staircase through `points`, level until the next."""
    found = list(points[:1])
    for (_, y), (next_x, next_y) in itertools.pairwise(points):
        found += [(next_x, y), (next_x, next_y)]
    return found
