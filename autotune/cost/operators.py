"""Measured seconds of models' operators and optimizers on a device, for the prediction of time.

A trace writes down how each operator is called (`calls`). Sizes that differ between its two micro-batches are lines in
the micro-batch, `<constant:per sample>` in the text of the call, so that the call at any micro-batch is known. Calls
are measured at a few micro-batches; between these, time is a line. An operator that wasn't measured has the rate of the
nearest that was: of its kind the one that should take most nearly as long. Without torch.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from pydantic import Field

from autotune.cost.profile import ParameterGroup, Profile, Vector
from autotune.value import Value
from autotune.values.estimate import Timings

ENTRY = "autotune.cost.measuring:run_measure"

# Micro-batches at which operators are measured.
SIZES = (1, 4, 16, 64, 256)

# Measured of parameters as if they were optimizers: clipping, and adding one gradient to another.
CLIPPING, ADDING = "clipping", "adding"

_NUMBER = re.compile(r"\d+")
_LINE = re.compile(r"<(-?\d+):(-?\d+)>")


class OperatorRequest(Value):
    """The operators and optimizers to measure."""

    device: str
    calls: tuple[str, ...] = Field(description="as `calls` writes them, those that matter most first")
    parameters: tuple[ParameterGroup, ...] = Field(default=(), description="of the models")
    optimizers: tuple[str, ...] = Field(default=(), description="by transformers' names, to step over these")
    limit_s: float = Field(gt=0, description="nothing is begun after this")
    most_bytes: float = Field(description="of the tensors that are there at a time")
    known: Timings | None = Field(default=None, description="what no model decides is taken from it")


def as_line(low: str, high: str, samples: tuple[int, int]) -> str:
    """Return one text for a call at two micro-batches; empty where they differ in more than sizes that are lines."""
    if low == high:
        return low
    if _NUMBER.sub("", low) != _NUMBER.sub("", high):
        return ""
    between = samples[1] - samples[0]
    larger = iter(_NUMBER.findall(high))

    def line(match: re.Match[str]) -> str:
        one, other = int(match[0]), int(next(larger))
        if one == other:
            return match[0]
        slope = (other - one) // between
        return f"<{one - slope * samples[0]}:{slope}>"

    text = _NUMBER.sub(line, low)
    return text if at(text, samples[1]) == high else ""


def attends(low: str, high: str) -> bool:
    """Return whether calls at two micro-batches attend, or work on the scores of attention.

    Scores are (batch, heads, length, length), in products (batch x heads, length, length).
    """
    if not low:
        return False
    name, args, _ = json.loads(low)
    if "attention" in name:
        return True
    one, two = _sizes(args), _sizes(json.loads(high)[1])
    if "bmm" in name:
        (rows, width), columns = one[-2][-2:], one[-1][-1]
        return len({rows, width, columns}) < 3 and all(a[0] != b[0] for a, b in zip(one, two, strict=True))
    return "conv" not in name and any(len(n) == 4 and n[-1] == n[-2] > 1 for n in one)


def _sizes(args: Any) -> list[list[int]]:
    """Return the sizes of the tensors that a call is given, lists of tensors included."""
    flat = [inner for value in args for inner in (value if isinstance(value, list) else [value])]
    return [value["n"] for value in flat if isinstance(value, dict) and "n" in value]


def at(call: str, samples: int) -> str:
    """Return a call for a micro-batch of `samples`."""
    return _LINE.sub(lambda m: str(int(m[1]) + int(m[2]) * samples), call)


@functools.lru_cache(maxsize=256)
def _calls_at(calls: tuple[str, ...], samples: int) -> tuple[str, ...]:
    return tuple(at(call, samples) for call in calls)


def measured(profile: Profile, timings: Timings, samples: int) -> Vector:
    """Return the measured seconds of each row of a profile's work at one micro-batch; NaN where there are none."""
    calls = _calls_at(tuple(w.call for w in profile.work), samples)
    return np.array([timings.operators.get(call, np.nan) for call in calls])


def filled(seconds: Vector, expected: Vector, kinds: Vector) -> Vector:
    """Return measured seconds, and where there are none the expected ones at the rate of the nearest measured.

    Args:
        seconds: (operators, sizes), NaN where nothing was measured.
        expected: The same by a roofline.
        kinds: Of the operators.
    """
    found = seconds.copy()
    with np.errstate(divide="ignore"):
        logs = np.log(expected)
    for kind in np.unique(kinds):
        rows = np.flatnonzero(kinds == kind)
        known = ~np.isnan(seconds[rows]) & (expected[rows] > 0)
        lacking = np.argwhere(np.isnan(seconds[rows]))
        if not len(lacking):
            continue
        ratios, places = seconds[rows][known] / expected[rows][known], logs[rows][known]
        for row, size in lacking:
            here = rows[row], size
            nearest = np.argmin(np.abs(places - logs[here])) if len(places) and expected[here] > 0 else None
            found[here] = expected[here] * (1.0 if nearest is None else ratios[nearest])
    return found


def along(samples: Vector, sizes: Sequence[int], seconds: Vector) -> Vector:
    """Return seconds between sizes by lines, beyond the last two by theirs, and before the first two, never below 0."""
    before, after = (max(0.0, (seconds[i + 1] - seconds[i]) / (sizes[i + 1] - sizes[i])) for i in (0, -2))
    before = min(before, seconds[0] / sizes[0])
    lacking, beyond = np.minimum(samples - sizes[0], 0.0), np.maximum(samples - sizes[-1], 0.0)
    found: Vector = np.interp(samples, sizes, seconds) + lacking * before + beyond * after
    return found


def parameter_key(optim: str, group: ParameterGroup) -> str:
    """Return the key of the time of an optimizer's step over one parameter."""
    dtype = {4.0: "float32", 2.0: "bfloat16"}.get(group.element_bytes, "")
    return f"{optim} {dtype} {'x'.join(map(str, group.shape))}{' embedding' * group.embedding}"


def stepping(
    groups: Iterable[ParameterGroup],
    optim: str,
    timings: Timings | None,
    *,
    launch_s: float = 0.0,
    bandwidth: float = 1.0,
) -> float | None:
    """Return the seconds of a step over trained parameters; None if none of this optimizer was measured.

    A shape that wasn't measured takes the time of the one with the most nearly equal number of elements, times the
    ratio of what a launch and moving the bytes take of each: a small shape's time is that of the launch.
    """
    if timings is None:
        return None
    known: dict[int, tuple[float, float]] = {}  # by elements: the seconds, and what was expected
    total, missing = 0.0, []

    def expected(group: ParameterGroup) -> float:
        return launch_s + 3 * group.elements * group.element_bytes / bandwidth

    for group in groups:
        seconds = timings.optimizers.get(parameter_key(optim, group)) if group.trained else 0.0
        if seconds is None:
            missing.append(group)
            continue
        total += group.count * seconds
        if group.trained:
            known[group.elements] = seconds, expected(group)
    if missing and not known:
        return None
    for group in missing:
        nearest = min(known, key=lambda elements: abs(np.log((elements + 1) / (group.elements + 1))))
        seconds, usual = known[nearest]
        total += group.count * seconds * max(1.0, expected(group) / usual)
    return total
