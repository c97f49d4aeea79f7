"""Colours of a light and a dark theme, and figures of matplotlib in them, as SVG that follows its page.

Series have the colours of Okabe and Ito (Color Universal Design, https://jfly.uni-koeln.de/color/), distinguishable
with the common kinds of colour blindness; each has a shape or a label of its own as well. Some are made darker or
lighter for a contrast to the background of at least 3:1 for marks and 4.5:1 for text (WCAG 2.2, 1.4.11 and 1.4.3).

Figures are drawn within `styled`, whatever the user's own settings of matplotlib are; a unit is a pixel. In SVG each
colour is a CSS variable of the page, and an artist's `gid` of the form "tip:..." becomes its attribute `data-tip`.
"""

from __future__ import annotations

import io
import math
import re
import textwrap
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

from markupsafe import Markup, escape

from autotune.units import visible

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


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
}

_COLOURS = {**PAPER, **SERIES}


def variables(theme: str) -> str:
    """Return the declarations of CSS variables for 'light' or 'dark'."""
    return " ".join(f"--{name}: {getattr(shade, theme)};" for name, shade in _COLOURS.items())


# Height of a row with a line of text and a bar below it; mean width of a character of 12 pixels.
ROW, _LETTER = 42.0, 7.2

# Names of the colours within figures: places in matplotlib's cycle of colours, which `styled` sets.
COLOURS = {name: f"C{place}" for place, name in enumerate(_COLOURS)}

# In place of colours in SVG, until they are replaced by variables.
_SENTINELS = {f"#fd{place:04x}": name for place, name in enumerate(_COLOURS)}

_PAINT = re.compile(rf"(fill|stroke): ({'|'.join(_SENTINELS)})")

_STYLE = {
    "font.family": "DejaVu Sans",
    "font.size": 12,
    "text.parse_math": False,
    "text.color": COLOURS["ink"],
    "figure.dpi": 72,
    "figure.facecolor": "none",
    "axes.facecolor": "none",
    "axes.edgecolor": COLOURS["muted"],
    "axes.labelcolor": COLOURS["muted"],
    "axes.titlecolor": COLOURS["muted"],
    "axes.titlelocation": "left",
    "axes.titlesize": 12,
    "axes.spines.left": False,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.axisbelow": True,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "grid.color": COLOURS["grid"],
    "xtick.color": COLOURS["muted"],
    "xtick.labelcolor": COLOURS["ink"],
    "ytick.labelcolor": COLOURS["ink"],
    "ytick.major.size": 0,
    "legend.frameon": False,
    "legend.labelcolor": COLOURS["muted"],
    "legend.borderpad": 0,
    "legend.handlelength": 1.5,
    "svg.fonttype": "none",
}


def _look(marker: str, size: float, face: str, edge: str = "card", width: float = 1.0) -> dict[str, Any]:
    return {
        "marker": marker, "markersize": size, "markerfacecolor": COLOURS[face], "markeredgecolor": COLOURS[edge],
        "markeredgewidth": width, "linestyle": "none", "clip_on": False,
    }  # fmt: skip


LOOKS = {
    "trial": _look("o", 8, "card", "trial", 1.6),
    "front": _look("o", 9, "front"),
    "baseline": _look("s", 10, "baseline"),
    "winner": _look("*", 17, "best"),
    "failed": _look("x", 8, "failed", "failed", 2.0),
    "trial again": _look("D", 7, "card", "trial", 1.6),
    "baseline again": _look("D", 7, "baseline"),
    "winner again": _look("D", 7, "best"),
}


@contextmanager
def styled(salt: str = "") -> Iterator[None]:
    """Let figures be drawn in the colours that `svg` replaces; `salt` makes ids."""
    import matplotlib.style
    from matplotlib.rcsetup import cycler

    chosen: dict[Any, Any] = {**_STYLE, "axes.prop_cycle": cycler(color=list(_SENTINELS)), "svg.hashsalt": salt}
    with warnings.catch_warnings(), matplotlib.style.context(["default", chosen]):
        warnings.filterwarnings("ignore", message="Glyph .* missing from")  # the browser has its own fonts
        yield


def blank(width: float, height: float, label: str) -> Figure:
    """Return an empty figure of that size in pixels; `label` describes it for screen readers."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width / 72, height / 72), label=label)


def trial_axes(width: float, label: str, below: str, above: str) -> tuple[Figure, Axes]:
    """Return a figure and its axes, with words below them and above at the left."""
    figure = blank(width, 300.0, label)
    axes = figure.add_subplot(xlabel=below, title=above)
    return figure, axes


def row_text(axes: Axes, row: int, words: str, value: str, width: float, weight: str = "normal") -> None:
    """Write the line of text of a row: words at the left, a value at the right."""
    place: dict[str, Any] = {"transform": axes.get_yaxis_transform(), "va": "center"}
    axes.text(0, row + 0.25, cut(words, width - (len(value) + 3) * _LETTER), weight=weight, **place)
    axes.text(1, row + 0.25, value, ha="right", weight="bold", **place)


def limited(axes: Axes, way: str, low: float, high: float, width: float, *, logs: bool = False) -> None:
    """Set the range of the axis 'x' or 'y', with few and round ticks: of many values 1, 2 and 5 of each decade."""
    from matplotlib import ticker

    axis = axes.xaxis if way == "x" else axes.yaxis
    axes.set(**{f"{way}lim": (low, high), f"{way}scale": "log" if logs else "linear"})
    few = max(3, int(width / 60)) if way == "x" else 6
    wide = logs and high / low > 10
    axis.set_major_locator(
        ticker.LogLocator(subs=(1, 2, 5), numticks=few) if wide else ticker.MaxNLocator(few, steps=[1, 2, 5, 10])
    )
    axis.set_minor_locator(ticker.NullLocator())
    axis.set_major_formatter(lambda value, _: f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}")


def with_legend(
    figure: Figure, width: float, *, left: float = 46, right: float = 12, top: float = 24, bottom: float = 42
) -> Figure:
    """Add the legend below a figure, which gets higher by it, and leave margins in pixels around its axes."""
    handles, labels = figure.axes[0].get_legend_handles_labels()
    found = dict(zip(labels, handles, strict=True))  # of equal labels the last
    columns = 2 if width > 500 else 1
    words = [textwrap.fill(label, int((width / columns - 44) / _LETTER)) for label in found]
    half = math.ceil(len(words) / columns)
    more = 8 + max(sum(4 + 15 * len(w.split("\n")) for w in part) for part in (words[:half], words[half:]))
    height = figure.get_figheight() * 72 + more
    figure.set_figheight(height / 72)
    figure.subplots_adjust(left / width, (bottom + more) / height, 1 - right / width, 1 - top / height)
    place = (0, more / height)
    figure.legend(list(found.values()), words, loc="upper left", bbox_to_anchor=place, ncols=columns, borderaxespad=0)
    return figure


def mark(axes: Axes, kind: str, x: float, y: float, tip: str, words: str, **place: Any) -> None:
    """Draw a mark that looks as `LOOKS` says, with a tip and an entry of the legend."""
    axes.plot(x, y, gid=tip_of(tip), label=words, **LOOKS[kind], **place)


def tip_of(tip: str) -> str:
    """Return a tip as the `gid` of an artist."""
    return "tip:" + "\n".join(map(visible, tip.split("\n")))


def padded(values: Sequence[float], share: float) -> tuple[float, float]:
    """Return the range of `values`, widened at both ends, but not below 0."""
    low, high = min(values), max(values)
    room = (high - low) * share or abs(high) * share or 1.0
    return max(0.0, low - room), high + room


def cut(words: str, room: float) -> str:
    """Return `words` as they can be printed, cut to about that many pixels."""
    letters, shown = max(1, int(room / _LETTER)), visible(words)
    return shown if len(shown) <= letters else f"{shown[: letters - 1].rstrip(' ,')}…"


def svg(draw: Callable[[float], Figure | None], width: float, name: str, kind: str = "") -> Markup:
    """Return what `draw` draws at a width as an SVG element of the class `kind`; empty: nothing.

    Its ids differ from those of other names and widths on the page.
    """
    file = io.StringIO()
    with styled(f"{name} {width}"):
        figure = draw(width)
        if figure is None:
            return Markup()
        figure.savefig(file, format="svg", metadata=dict.fromkeys(("Creator", "Date", "Format", "Type")))
    _, _, body = file.getvalue().partition("</style>\n </defs>")
    body = _PAINT.sub(lambda found: f"{found[1]}: var(--{_SENTINELS[found[2]]})", body)
    body = re.sub(r"<g id=([\"'])tip:", r"<g data-tip=\1", body).replace("xlink:href", "href")
    body = re.sub(r'<g id="[^"]*"(/?)>', r"<g\1>", body)
    size = f"0 0 {width:g} {figure.get_figheight() * 72:g}"
    label = escape(visible(str(figure.get_label())))
    return Markup(f'<svg viewBox="{size}" role="img" aria-label="{label}" class="{kind}">{body.strip()}')
