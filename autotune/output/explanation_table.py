"""Draws what each knob of a winner brought as a table for the terminal."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from autotune.output.bars import change_words, how_known, ratio_words, together_words
from autotune.output.fitted import Fitted
from autotune.units import show_rate
from autotune.values.explanation import Explanation


def explanation_table(found: Explanation) -> RenderableType:
    """Return the knobs, the largest first, and what they bring together."""
    table = Table(title=_title(found), title_justify="left", title_style="bold")
    for heading in ("knob of the winner", "factor", "how it is known"):
        table.add_column(heading, overflow="fold")
    for part in found.contributions:
        table.add_row(change_words(part.changes), ratio_words(part), how_known(part))
    if found.together is not None:
        table.add_row("together", together_words(found), "the total beyond the product of the parts")
    lines = ["a factor is the winner's throughput over that of the winner with the baseline's value in this knob"]
    if not found.is_settled:
        lines.append("not all of it was measured in turn with the winner; `autotune explain` goes on")
    return Group(Fitted(table), *map(Text, lines))


def _title(found: Explanation) -> str:
    rate = found.winner_samples_per_second
    words = "the winner" if rate is None else f"the winner: {show_rate(rate)} samples/s"
    return words if found.total is None else f"{words}, ×{found.total:.2f} the baseline"
