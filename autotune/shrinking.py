"""Which shallow versions of a model tell what its full depth takes: two depths, or the reason why none do.

Only what repeats exactly is inferred: layers of equal size and kind (or groups of them), in one stack or in two that
grow alike. Numbers of parameters are checked on the meta device. Called by the child that describes a workload.
"""

from __future__ import annotations

from typing import Any

from autotune.architecture import ModelSpec, ProbeDepths, Task
from autotune.depth import Stack, shallower, stacks
from autotune.errors import InputError, one_line
from autotune.models import build_config, build_model

# With fewer layers two probes cost more than they save: what doesn't depend on depth comes twice.
LEAST_LAYERS = 12

# Layers of both probes together, as a share of all.
MOST_SHARE = 0.25


def probe_depths(spec: ModelSpec, task: Task, parameters: int) -> ProbeDepths | str:
    """Return the depths at which a model is probed, or why it can't be.

    Args:
        spec: The model.
        task: The head.
        parameters: Of the model at full depth.
    """
    config = build_config(spec, task)
    found = stacks(config)
    if not found:
        return "its config names no stack of equal layers"
    depths = _depths(found)
    if isinstance(depths, str):
        return depths
    try:
        low, high = (_parameters(spec, task, shallower(config, d)) for d in (depths.low, depths.high))
    except InputError as error:
        return f"it can't be built with fewer layers: {one_line(error)}"
    if high + (high - low) * depths.beyond != parameters:
        return "its layers differ in size"
    return depths


def _depths(found: tuple[Stack, ...]) -> ProbeDepths | str:
    """Return two depths: of one period and the leading layers, and the deepest that is cheap enough."""
    least = min(stack.depth for stack in found)
    if least < LEAST_LAYERS:
        return f"{least} layers are too few: two probes pay from {LEAST_LAYERS} on"
    if len({stack.more for stack in found}) > 1:
        return f"its stacks of layers differ in depth ({' and '.join(str(s.depth) for s in found)})"
    low = {s.field: s.base - s.period for s in found}
    full = {s.field: s.depth for s in found}
    periods = int(found[0].more) + 1
    for step in range(periods, 0, -1):
        high = {s.field: low[s.field] + step * s.period for s in found}
        if sum(low.values()) + sum(high.values()) <= MOST_SHARE * sum(full.values()):
            return ProbeDepths(low=low, high=high, full=full)
    return f"its layers repeat only after {max(s.period for s in found)}: two probes would cost most of a trial"


def _parameters(spec: ModelSpec, task: Task, config: Any) -> int:
    model = build_model(spec, task, dtype="float32", device="meta", config=config)
    return sum(parameter.numel() for parameter in model.parameters())
