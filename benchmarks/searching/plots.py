"""Regret over trials: how far the best that was measured is from the table's, by strategy, with its spread."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from searching.scores import Curve


def plot_regret(curves: Mapping[str, Sequence[Curve]], title: str, path: Path) -> None:
    """Write a plot: the median over the seeds as a line, the middle 80 % as a band.

    Args:
        curves: By strategy and seed, the share of the best that is reached after each trial.
        title: Above it.
        path: Ends in .svg or .png.

    Raises:
        ImportError: matplotlib isn't installed.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.add_subplot()
    for name, runs in curves.items():
        regret = 100 * (1 - np.array(runs))
        trials = np.arange(1, regret.shape[1] + 1)
        (line,) = axes.step(trials, np.median(regret, axis=0), where="post", label=name)
        low, high = np.percentile(regret, [10, 90], axis=0)
        axes.fill_between(trials, low, high, step="post", alpha=0.12, color=line.get_color())
    axes.set(xscale="log", xlabel="trials", ylabel="below the best of the table, %", title=title, ylim=(0, 60))
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small")
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
