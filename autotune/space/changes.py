"""What a configuration changes of the user's training, and how deep each change goes.

Pure. The classes are those of :class:`autotune.values.config.Allowance`; how deep each knob goes stands on its field.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from autotune.training.arguments import effective_tf32
from autotune.values.adapters import Adapter
from autotune.values.config import KNOBS, Allowance, TrainConfig, knob_values
from autotune.values.hardware import Hardware
from autotune.values.knob import Difference
from autotune.values.model import ModelFacts
from autotune.values.result import Change


def changes(config: TrainConfig, baseline: TrainConfig, facts: ModelFacts, hardware: Hardware) -> tuple[Change, ...]:
    """Return what `config` changes against `baseline`, in the order of the fields."""
    return tuple(
        Change(knob=knob, before=_shown(before), after=_shown(after), allowance=allowance)
        for knob, before, after, allowance in _differences(config, baseline, facts, hardware)
    )


def allowance_of(config: TrainConfig, baseline: TrainConfig, facts: ModelFacts, hardware: Hardware) -> Allowance:
    """Return the class of the deepest change of `config` against `baseline`."""
    classes = (allowance for *_, allowance in _differences(config, baseline, facts, hardware))
    return max(classes, key=lambda c: c.rank, default=Allowance.EXACT)


def _differences(
    config: TrainConfig, baseline: TrainConfig, facts: ModelFacts, hardware: Hardware
) -> Iterator[tuple[str, Any, Any, Allowance]]:
    """Yield the knobs that differ: name, the baseline's value, the configuration's, and the class of the change."""
    rounds = effective_tf32(config, hardware) != effective_tf32(baseline, hardware)  # a compiler switches it on
    values = zip(KNOBS.items(), knob_values(baseline), knob_values(config), strict=True)
    for (name, (knob, _)), before, after in values:
        if before != after:
            change = Difference(before, after, facts, config.precision, rounds)
            yield name, before, after, Allowance(knob.depth_of(change))


def _shown(value: Any) -> str:
    if value is None:
        return "none"
    if isinstance(value, Adapter):
        return value.shown
    return str(value)
