"""The contributions of a winner's knobs as a table for the terminal, and in words that reports use too."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.text import Text

from autotune.output.table import show_ratio
from autotune.output.terminal import table_of
from autotune.space.knobs import SHORT_NAMES
from autotune.units import show_rate
from autotune.values.problem import Change
from autotune.values.result import Contribution, Explanation

HEADINGS = ("factor", "how it is known")

_BASIS = {
    "in turn": "measured in turn with the winner",
    "once": "told by one trial of the search each",
    "elsewhere": "told by two other trials of the search that differ in it alone",
    "fails": "the winner does not run without it",
    "slow": "without it no trial ends within its time limit",
    "unknown": "not told by the trials at hand",
}


def explanation_table(found: Explanation) -> RenderableType:
    """Return the table of contributions, in descending order, and of their interaction."""
    lines = ["a factor is the winner's throughput over that of the winner with the baseline's value in this knob"]
    if not found.is_settled:
        lines.append("not all of it was measured in turn with the winner; `autotune explain` goes on")
    headings = ("knob of the winner", *HEADINGS)
    table = table_of(headings, contribution_rows(found), title=_title(found), title_style="bold")
    return Group(table, *map(Text, lines))


def _title(found: Explanation) -> str:
    rate = found.winner_samples_per_second
    words = "the winner" if rate is None else f"the winner: {show_rate(rate)} samples/s"
    if found.total is None:
        return words
    return f"{words}; x baseline: {show_ratio(found.total, found.total_interval)}"


def contribution_rows(found: Explanation) -> list[tuple[str, str, str]]:
    """Return change, factor and evidence of each knob, and in the last row the interaction."""
    rows = [(change_words(part.changes), ratio_words(part), how_known(part)) for part in found.contributions]
    if found.together is not None:
        rows.append(("together", together_words(found), "the total beyond the product of the parts"))
    return rows


def change_words(changed: Sequence[Change]) -> str:
    """Return changes in words: 'precision fp32 → bf16'."""
    return ", ".join(f"{SHORT_NAMES.get(c.knob, c.knob)} {c.before} → {c.after}" for c in changed)


def ratio_words(contribution: Contribution) -> str:
    """Return the factor of a knob in words: '1.43 (1.40 to 1.46)'."""
    if contribution.ratio is None:
        return {"fails": "needed", "slow": "too slow"}.get(contribution.basis, "not told")
    return show_ratio(contribution.ratio, contribution.interval)


def how_known(contribution: Contribution) -> str:
    """Return how a knob's factor is known, or why it isn't."""
    if contribution.cause is not None:
        return contribution.cause
    numbers = [label.removeprefix("explain ") for label in contribution.trials]
    of_explain = any(label.startswith("explain ") for label in contribution.trials)
    trials = f" ({'explain ' if of_explain else ''}trials {', '.join(sorted(numbers, key=int))})" if numbers else ""
    return f"{_BASIS[contribution.basis]}{trials}"


def together_words(explanation: Explanation) -> str:
    """Return the factor of the interaction in words; empty: unknown."""
    together = explanation.together
    return "" if together is None else show_ratio(together, explanation.together_interval)
