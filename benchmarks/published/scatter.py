"""A scatter plot of predicted against measured memory, drawn by matplotlib."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from matplotlib.figure import Figure


def scatter(series: Mapping[str, Sequence[tuple[float, float]]], path: Path, *, title: str) -> Figure:
    """Write and return a figure with both axes logarithmic and the diagonal drawn.

    Args:
        series: Points of (measured, predicted) in GB by what they are called; neither may be 0.
        path: File of the picture, of any format of matplotlib's.
        title: Shown above.
    """
    figure = Figure(figsize=(9, 6), layout="constrained")
    axes = figure.add_subplot(
        title=title, xlabel="measured, GB", ylabel="predicted, GB", xscale="log", yscale="log", aspect="equal"
    )
    axes.axline((1, 1), (10, 10), color="0.7", zorder=0)
    for name, points in series.items():
        axes.scatter(*zip(*points, strict=True), s=12, alpha=0.6, label=f"{name} ({len(points)})")
    figure.legend(loc="outside right upper", fontsize="small")
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
    return figure
