"""The charts of a report, each with its name and title, for the HTML page and notebooks; and all as a picture."""

from __future__ import annotations

import io
import textwrap
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from autotune.output import report_facts as facts
from autotune.output.drawing import COLOURS, ROW, bar, blank, cut, pixels, row_axes, row_text, styled
from autotune.output.explanation import waterfall
from autotune.output.memory import icicle, memory_bars
from autotune.output.scatter import best_over_time, predicted_against_measured, throughput_against_memory
from autotune.units import show_time, visible
from autotune.values.result import RunReport
from autotune.values.time_spent import Spent

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from numpy.typing import NDArray

# Width of a column of the picture, and pixels of the picture per pixel of a chart.
_COLUMN, _SCALE = 620.0, 1.5


class Panel(NamedTuple):
    """A chart: `draw` returns it at a width in pixels, within `styled`, or None if there is nothing to draw."""

    name: str
    title: str
    draw: Callable[[float], Figure | None]


def panels(report: RunReport) -> list[Panel]:
    """Return the charts in the order of the page."""
    agreement, predicted = predicted_against_measured, "Predicted against measured"
    alive = report.breakdowns[-1].alive if report.breakdowns else ()
    return [
        Panel("waterfall", "What each knob brought", lambda width: waterfall(report.explanation, width)),
        Panel("pareto", "Throughput against memory", lambda width: throughput_against_memory(report, width)),
        Panel("progress", "Best so far", lambda width: best_over_time(report, width)),
        Panel("predicted_rate", f"{predicted} throughput", lambda width: agreement(report, "rate", width)),
        Panel("predicted_memory", f"{predicted} memory", lambda width: agreement(report, "memory", width)),
        Panel("memory", "Where the memory goes", lambda width: memory_bars(report, width)),
        Panel("alive", "What is alive at the peak", lambda width: icicle(alive, width)),
        Panel("time", "Where the time went", lambda width: time_bars(report.spent, width)),
    ]


def png_report(report: RunReport) -> bytes:
    """Return the picture: the answer, and all charts with their titles in two columns."""
    import numpy as np
    from matplotlib.image import imsave

    edge, column = round(24 * _SCALE), round((_COLUMN + 24) * _SCALE)
    answer = textwrap.wrap(visible(facts.answer(report)), 90)
    with styled("light"):
        placed = [(edge, edge, _words("\n".join(answer), 2 * _COLUMN, size=20, weight="bold"))]
        subject = _words(cut(facts.subject(report), 2 * _COLUMN), 2 * _COLUMN, color=COLOURS["muted"])
        placed.append((edge + len(placed[0][2]), edge, subject))
        bottoms = [placed[-1][0] + 2 * edge] * 2
        for panel in panels(report):
            if (figure := panel.draw(_COLUMN)) is not None:
                side = bottoms.index(min(bottoms))  # the shorter one
                for drawn in (_words(panel.title, _COLUMN, weight="bold"), pixels(figure, _SCALE)):
                    placed.append((bottoms[side], edge + side * column, drawn))
                    bottoms[side] += len(drawn)
                bottoms[side] += edge
    page = np.full((max(bottoms), edge + 2 * column, 4), 255, np.uint8)
    for top, left, drawn in placed:
        page[top : top + drawn.shape[0], left : left + drawn.shape[1]] = drawn
    file = io.BytesIO()
    imsave(file, page, format="png")
    return file.getvalue()


def _words(words: str, width: float, size: float = 12, **style: Any) -> NDArray[Any]:
    figure = blank(width, size * 1.4 * (1 + words.count("\n")) + 6, "")
    figure.text(0, 1, words, va="top", size=size, **style)
    return pixels(figure, _SCALE)


def time_bars(spent: Spent, width: float) -> Figure | None:
    """Return a bar for each kind of work in a search's time, in descending order."""
    shares = spent.shares() if spent.total_s else {}
    if not shares:
        return None
    figure = blank(width, len(shares) * ROW, f"Where the {show_time(spent.total_s)} of the search went{spent.waited}")
    axes = row_axes(figure, len(shares))
    axes.axis("off")
    axes.set_xlim(0, max(shares.values()))
    for row, (what, share) in enumerate(shares.items()):
        said = f"{show_time(share * spent.total_s)} ({share:.0%})"
        row_text(axes, row, what, said, width)
        bar(axes, row, 0, share, COLOURS["best"], f"{what}: {said}")
    return figure
