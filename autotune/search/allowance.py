"""What a configuration changes of the user's training, and how deep each change goes.

Pure. The classes are those of :class:`autotune.config.Allowance`; where a knob is exact depends on the model.
"""

from __future__ import annotations

from typing import Any

from autotune.architecture import ModelFacts
from autotune.config import Allowance, Precision, TrainConfig
from autotune.result import Change

# The same update rule, differently scheduled on the device.
_SAME_OPTIMIZER = frozenset({"adamw_torch", "adamw_torch_fused"})

_EXACT_KNOBS = frozenset({"checkpointing", "attn_implementation", "dataloader_num_workers", "dataloader_pin_memory"})


def changes(config: TrainConfig, baseline: TrainConfig, facts: ModelFacts) -> tuple[Change, ...]:
    """Return what `config` changes against `baseline`, in the order of the fields."""
    found = []
    for knob in TrainConfig.model_fields:
        before, after = getattr(baseline, knob), getattr(config, knob)
        if before != after:
            allowance = _class_of(knob, before, after, facts)
            found.append(Change(knob=knob, before=_shown(before), after=_shown(after), allowance=allowance))
    return tuple(found)


def allowance_of(config: TrainConfig, baseline: TrainConfig, facts: ModelFacts) -> Allowance:
    """Return the class of the deepest change of `config` against `baseline`."""
    classes = [change.allowance for change in changes(config, baseline, facts)]
    return max(classes, key=lambda c: c.rank, default=Allowance.EXACT)


def _shown(value: Any) -> str:
    if value is None:
        return "none"
    if hasattr(value, "rank") and hasattr(value, "kind"):
        return f"{value.kind} rank {value.rank} on {value.target_modules}"
    return str(value)


def _class_of(knob: str, before: Any, after: Any, facts: ModelFacts) -> Allowance:
    if knob in _EXACT_KNOBS:
        return Allowance.EXACT
    if knob == "per_device_train_batch_size":
        return Allowance.NUMERICS if facts.batch_coupled else Allowance.EXACT
    if knob == "torch_compile_backend":  # compiled dropout draws other random numbers
        return Allowance.NUMERICS if facts.has_dropout else Allowance.EXACT
    if knob == "optim":
        return Allowance.EXACT if {before, after} <= _SAME_OPTIMIZER else Allowance.OPTIMIZER
    if knob == "adapter" or Precision.PURE_BF16 in (before, after):
        return Allowance.METHOD
    return Allowance.NUMERICS  # precision, tf32
