"""What to try next before any model of the cost: one step from the leader, in the order of expected effect.

Pure. While something completes, the next proposal is the leader's first untried neighbour. When nothing has completed
yet, the proposals get lighter until something fits; if it isn't memory that trials fail for, they change one knob of
the baseline at a time. What is left after that is TPE's (see `sampler`).
"""

from __future__ import annotations

from collections.abc import Iterator

from autotune.space.history import LOADING, WORTHWHILE_DATA_WAIT, History
from autotune.space.points import Scalar
from autotune.space.space import MICRO_BATCH, Dimension, Point, SearchSpace
from autotune.values.trial import TrialResult, TrialStatus

# So many different configurations that fail of one cause say that the configuration isn't the cause.
SAME_FAILURES = 4

_LIGHT_OPTIMIZERS = ("adamw_bnb_8bit", "paged_adamw_8bit", "adafactor")


def proposals(space: SearchSpace, history: History) -> Iterator[Point]:
    """Yield the points worth trying now, the most promising first; known and hopeless ones are among them."""
    leader = history.best()
    found = _first_steps(space, history) if leader is None else _neighbours(space, history, leader)
    return (space.complete(point) for point in found)


def _first_steps(space: SearchSpace, history: History) -> Iterator[Point]:
    """Yield what to try while nothing completes, by what the trials failed of."""
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
    """Return the other values: of the micro-batch the next larger, then the next smaller; else in the file's order."""
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
    """Return whether what was measured says that a dimension can't help the leader."""
    if dimension.name == "checkpointing":  # it saves memory and costs time
        return leader.request.config.checkpointing == "none" and not history.memory_bound
    if dimension.name in LOADING:
        share = leader.measurement.data_wait_share if leader.measurement is not None else None
        return share is not None and share < WORTHWHILE_DATA_WAIT
    return False


def _other_ways(space: SearchSpace) -> Iterator[Point]:
    """Yield the baseline with the first other choice of each parameter: one of the baseline's may not work here."""
    origin = space.point(space.baseline)
    for dimension in space.dimensions:
        if space.is_active(dimension, origin):
            yield from ({**origin, dimension.name: value} for value in _other_choices(dimension, origin)[:1])


def _lighter(space: SearchSpace) -> Iterator[Point]:
    """Yield ever lighter points, starting at the baseline.

    First what leaves the method alone: checkpointing, smaller micro-batches, lighter optimizers; then 16-bit weights
    and adapters, and both together; at last adapters on quantized weights.
    """
    names = {d.name: d for d in space.dimensions}
    point = space.point(space.baseline)
    if "checkpointing" in names and "full" in names["checkpointing"].choices:
        point = {**point, "checkpointing": "full"}
        yield point
    smaller = [s for s in _micro_batches(names[MICRO_BATCH]) if s < _size(point)] if MICRO_BATCH in names else []
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


def _size(point: Point) -> int:
    return int(point[MICRO_BATCH] or 1)
