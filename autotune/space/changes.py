"""What a configuration changes of the user's training, and how deep each change goes.

Pure. The classes are those of :class:`autotune.values.config.Allowance`; how deep each knob goes stands on its field.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from autotune.training.arguments import effective_tf32
from autotune.values.adapters import Adapter
from autotune.values.config import KNOBS, Allowance, TrainConfig, knob_values
from autotune.values.knob import Difference
from autotune.values.problem import Change, Problem
from autotune.values.trial_row import TrialRow


def changes(config: TrainConfig, problem: Problem) -> tuple[Change, ...]:
    """Return what `config` changes against the baseline, in the order of the fields."""
    return tuple(
        Change(knob=knob, before=_shown(before), after=_shown(after), allowance=allowance)
        for knob, before, after, allowance in _differences(config, problem)
    )


def with_changes(rows: Iterable[TrialRow], problem: Problem) -> tuple[TrialRow, ...]:
    """Return lines of trials with what each configuration changes."""
    return tuple(row.model_copy(update={"changes": changes(row.config, problem)}) for row in rows)


def allowance_of(config: TrainConfig, problem: Problem) -> Allowance:
    """Return the class of the deepest change of `config` against the baseline."""
    classes = (allowance for *_, allowance in _differences(config, problem))
    return max(classes, key=lambda c: c.rank, default=Allowance.EXACT)


def _differences(config: TrainConfig, problem: Problem) -> Iterator[tuple[str, Any, Any, Allowance]]:
    """Yield the knobs that differ: name, the baseline's value, the configuration's, and the class of the change."""
    baseline, hardware = problem.baseline, problem.hardware
    rounds = effective_tf32(config, hardware) != effective_tf32(baseline, hardware)  # a compiler switches it on
    values = zip(KNOBS.items(), knob_values(baseline), knob_values(config), strict=True)
    for (name, (knob, _)), before, after in values:
        if before != after:
            change = Difference(before, after, problem.facts, config.precision, rounds)
            yield name, before, after, Allowance(knob.depth_of(change))


def _shown(value: Any) -> str:
    if value is None:
        return "none"
    if isinstance(value, Adapter):
        return value.shown
    return str(value)
