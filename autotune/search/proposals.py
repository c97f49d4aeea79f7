"""Proposes configurations without the cost model: one knob away from the leader, in the order of the space.

If a trial has completed, the proposals are the neighbours of the leader. Otherwise they need ever less memory, or, if
the trials fail for other reasons than memory, differ from the baseline in one knob. When all proposals are tried, TPE
takes over (see `sampler`).
"""

from __future__ import annotations

from collections.abc import Iterator

from autotune.space.history import LOADING, WORTHWHILE_DATA_WAIT, History
from autotune.space.points import Scalar
from autotune.space.space import MICRO_BATCH, Dimension, Point, SearchSpace
from autotune.values.trial import TrialResult, TrialStatus

# If this many configurations fail for the same reason, the configuration is not the reason, and no more are proposed.
SAME_FAILURES = 4

_LIGHT_OPTIMIZERS = ("adamw_bnb_8bit", "paged_adamw_8bit", "adafactor")


def proposals(space: SearchSpace, history: History) -> Iterator[Point]:
    """Yield points to try, the most promising first; tried and refused ones are among them."""
    leader = history.best()
    found = _first_steps(space, history) if leader is None else _neighbours(space, history, leader)
    return (space.complete(point) for point in found)


def _first_steps(space: SearchSpace, history: History) -> Iterator[Point]:
    """Yield points to try while no trial has completed, depending on why the trials failed."""
    others = [r.outcome for r in history.results if r.status is not TrialStatus.OUT_OF_MEMORY]
    if history.memory_bound or not others:
        yield from _lighter(space)
    causes = {outcome.cause for outcome in others if outcome.kind == "failure"}
    if others and (len(others) < SAME_FAILURES or len(causes) > 1):
        yield from _other_ways(space)


def _neighbours(space: SearchSpace, history: History, leader: TrialResult) -> Iterator[Point]:
    """Yield the points that differ from the leader in one parameter, in the order of the space."""
    origin = space.point(leader.request.config)
    for dimension in space.dimensions:
        if space.is_active(dimension, origin) and not _is_pointless(dimension, history, leader):
            yield from ({**origin, dimension.name: value} for value in _other_choices(dimension, origin))


def _other_choices(dimension: Dimension, origin: Point) -> list[Scalar]:
    """Return the other values of a dimension in the order of the space; of the micro-batch only the two next ones."""
    here = origin.get(dimension.name)
    if dimension.name != MICRO_BATCH:
        return [value for value in dimension.choices if value != here]
    sizes = _micro_batches(dimension)
    larger = [s for s in sizes if s > int(here or 0)]
    smaller = [s for s in sizes if s < int(here or 0)]
    return [*larger[:1], *smaller[-1:]]


def _micro_batches(dimension: Dimension) -> list[int]:
    return sorted(int(value) for value in dimension.choices if value is not None)


def _is_pointless(dimension: Dimension, history: History, leader: TrialResult) -> bool:
    """Return whether measurements show that another value of a dimension can't make the leader faster."""
    if dimension.name == "checkpointing":  # it only saves memory
        return leader.request.config.checkpointing == "none" and not history.memory_bound
    if dimension.name in LOADING:
        share = leader.measurement.data_wait_share if leader.measurement is not None else None
        return share is not None and share < WORTHWHILE_DATA_WAIT
    return False


def _other_ways(space: SearchSpace) -> Iterator[Point]:
    """Yield the baseline with one parameter at its first other value: a value of the baseline may not work here."""
    origin = space.point(space.baseline)
    for dimension in space.dimensions:
        if space.is_active(dimension, origin):
            yield from ({**origin, dimension.name: value} for value in _other_choices(dimension, origin)[:1])


def _lighter(space: SearchSpace) -> Iterator[Point]:
    """Yield points that need ever less memory, starting from the baseline.

    First come checkpointing, smaller micro-batches and lighter optimizers, which leave the method as it is; then 16-bit
    weights, adapters, and both together; at last adapters on quantized weights.
    """
    names = {d.name: d for d in space.dimensions}
    point = space.point(space.baseline)
    if "checkpointing" in names and "full" in names["checkpointing"].choices:
        point = {**point, "checkpointing": "full"}
        yield point
    smaller = (
        [s for s in _micro_batches(names[MICRO_BATCH]) if s < int(point[MICRO_BATCH] or 1)]
        if MICRO_BATCH in names
        else []
    )
    for size in dict.fromkeys([*smaller[len(smaller) // 2 :][:1], *smaller[:1]]):
        point = {**point, MICRO_BATCH: size}
        yield point
    optimizers: list[Scalar] = [o for o in _LIGHT_OPTIMIZERS if "optim" in names and o in names["optim"].choices]
    yield from ({**point, "optim": optimizer} for optimizer in optimizers)
    adapters = [a for a in (names["adapter"].choices if "adapter" in names else ()) if a is not None]
    ways: tuple[Point, ...] = (point,)
    if "precision" in names and "pure_bf16" in names["precision"].choices:
        pure: Point = {**point, "precision": "pure_bf16"}
        yield from ({**pure, "optim": optimizer} for optimizer in optimizers or [point["optim"]])
        ways = (point, pure)
    lightest: list[Point] = [{**at, "adapter": adapter} for at in ways for adapter in adapters]
    yield from lightest
    packed = [q for q in (names["quantization"].choices if "quantization" in names else ()) if q is not None]
    yield from ({**at, "quantization": quantization} for at in lightest for quantization in packed)
