"""What to try next before any model of the cost: one step from the leader, in the order of expected effect.

Pure. While something completes, the next proposal is the leader's first untried neighbour; when nothing has completed
yet, the proposals get lighter until something fits. What is left after that is the sampler's.
"""

from __future__ import annotations

from collections.abc import Iterator

from autotune.search.history import History
from autotune.search.space import MICRO_BATCH, Dimension, Point, SearchSpace
from autotune.search.space_file import Scalar
from autotune.trial import TrialResult

# Workers can only win back time that a step spends waiting for data.
WORTHWHILE_DATA_WAIT = 0.02

_LIGHT_OPTIMIZERS = ("adamw_bnb_8bit", "paged_adamw_8bit", "adafactor")


def proposals(space: SearchSpace, history: History) -> Iterator[Point]:
    """Yield the points worth trying now, the most promising first."""
    leader = history.best()
    yield from _lighter(space) if leader is None else _neighbours(space, history, leader)


def _neighbours(space: SearchSpace, history: History, leader: TrialResult) -> Iterator[Point]:
    """Yield the points that differ from the leader in one parameter, in the order of the space."""
    origin = space.point(leader.request.config)
    for dimension in space.dimensions:
        if not space.is_active(dimension, origin) or _is_pointless(dimension, history, leader):
            continue
        for value in _other_choices(dimension, origin):
            yield {**origin, dimension.name: value}


def _other_choices(dimension: Dimension, origin: Point) -> list[Scalar]:
    """Return the other values: of the micro-batch the next larger, then the next smaller; else in the file's order."""
    here = origin.get(dimension.name)
    if dimension.name != MICRO_BATCH:
        return [value for value in dimension.choices if value != here]
    sizes = sorted(int(v) for v in dimension.choices if v is not None)
    larger = [s for s in sizes if s > int(here or 0)]
    smaller = [s for s in sizes if s < int(here or 0)]
    return [*larger[:1], *smaller[-1:]]


def _is_pointless(dimension: Dimension, history: History, leader: TrialResult) -> bool:
    """Return whether what was measured says that a dimension can't help the leader."""
    if dimension.name == "checkpointing":  # it saves memory and costs time
        return not history.memory_bound
    if dimension.name == "dataloader_num_workers":
        return leader.measurement is not None and leader.measurement.data_wait_share < WORTHWHILE_DATA_WAIT
    return False


def _lighter(space: SearchSpace) -> Iterator[Point]:
    """Yield ever lighter points, starting at the baseline: checkpointing, smaller micro-batches, lighter optimizers."""
    names = {d.name: d for d in space.dimensions}
    point = space.point(space.baseline)
    if "checkpointing" in names and "full" in names["checkpointing"].choices:
        point = {**point, "checkpointing": "full"}
        yield point
    sizes = sorted(int(v) for v in names[MICRO_BATCH].choices if v is not None) if MICRO_BATCH in names else []
    here = int(point[MICRO_BATCH] or 1)
    smaller = [s for s in sizes if s < here]
    for size in dict.fromkeys([*smaller[len(smaller) // 2 :][:1], *smaller[:1]]):
        point = {**point, MICRO_BATCH: size}
        yield point
    optimizers = names["optim"].choices if "optim" in names else ()
    for optimizer in _LIGHT_OPTIMIZERS:
        if optimizer in optimizers:
            yield {**point, "optim": optimizer}
            if "precision" in names and "pure_bf16" in names["precision"].choices:
                yield {**point, "optim": optimizer, "precision": "pure_bf16"}
    if "adapter" in names:
        yield from ({**point, "adapter": v} for v in names["adapter"].choices if v is not None)
