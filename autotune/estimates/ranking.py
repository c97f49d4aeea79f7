"""What a ranking of predictions leaves out, and why: what isn't allowed or possible, and what only came out behind.

Pure; called by `autotune.estimates.estimate`.
"""

from __future__ import annotations

from collections.abc import Sequence

from autotune.space.knobs import knobs, shown
from autotune.space.points import Scalar, make_point
from autotune.space.space import SearchSpace
from autotune.values.config import TrainConfig

RANKED = (
    "ranked: precision (bf16 stands for fp16 where the device has both), tf32, micro-batch, optimizer, checkpointing; "
    "with --allow method pure bf16 and LoRA too; what else there is (--attention, --compile, --adapter-rank) is "
    "estimated when it is given"
)

# Of what is ranked, the parameters whose values a reader may miss.
_PARAMETERS = ("precision", "tf32", "optim", "checkpointing", "adapter")

# As a space writes values that aren't words.
_WRITTEN: dict[str, Scalar] = {"True": True, "False": False, "None": None}


def ranking_notes(space: SearchSpace, best: Sequence[TrainConfig]) -> tuple[str, ...]:
    """Return lines on the values that no configuration of a ranking has.

    Args:
        space: What was ranked.
        best: What is shown of it.
    """
    return (*_refused(space), *_behind(space, best))


def _refused(space: SearchSpace) -> list[str]:
    """Return a line for each reason why values weren't predicted at all."""
    reasons: dict[str, list[str]] = {}
    for written, reason in space.left_out.items():
        name, _, value = written.partition("=")
        if name in _PARAMETERS:
            reasons.setdefault(reason, []).append(_option(name, _WRITTEN.get(value, value)))
    return [f"not ranked: {', '.join(options)}: {reason}" for reason, options in reasons.items()]


def _behind(space: SearchSpace, best: Sequence[TrainConfig]) -> list[str]:
    """Return a line on the values that were predicted, and came out behind those that are shown."""
    points = [make_point(config) for config in best]
    missing = [
        _option(dimension.name, value)
        for dimension in space.dimensions
        if dimension.name in _PARAMETERS
        for value in dimension.choices
        # Of each kind the better of with and without tf32 is shown.
        if value is not False and all(point.get(dimension.name) != value for point in points)
    ]
    return [f"predicted too, and behind these or too large: {', '.join(missing)}"] if missing else []


def _option(parameter: str, value: Scalar) -> str:
    option = next((knob.option for knob in knobs() if knob.parameter == parameter), parameter)
    return shown(option, value)
