"""`autotune find --dry-run`: the first trials of a search, its refusals and predictions, without a trial."""

from __future__ import annotations

from collections import Counter
from typing import Literal

from pydantic import Field

from autotune.cost.model import CostModel
from autotune.planning.plan import SearchPlan
from autotune.search.sampler import CostModelSampler
from autotune.space.knobs import changes, knobs
from autotune.space.points import Scalar
from autotune.space.space import SearchSpace
from autotune.units import show_memory
from autotune.value import Value
from autotune.values.budget import Budget
from autotune.values.config import TrainConfig
from autotune.values.problem import Change, Problem
from autotune.values.trial import Prediction

# Trials whose order is predicted; later ones depend on what these measure.
_FIRST_TRIALS = 6


class ExpectedTrial(Value):
    """One of the first trials, and what is predicted for it before anything is measured."""

    config: TrainConfig
    changes: tuple[Change, ...]
    predicted: Prediction | None = Field(description="None: nothing can be predicted")


class Preview(Problem):
    """A search before its first trial."""

    schema_version: Literal[1] = 1
    budget: Budget = Field(description="limits of the search and of each trial")
    configurations: int = Field(description="that may be tried, the baseline included")
    knobs: dict[str, tuple[str, ...]] = Field(
        description="knobs of which several values may be tried, with these, written as for --fix"
    )
    values_refused: dict[str, tuple[str, ...]] = Field(description="values that no configuration may have, by reason")
    refused: dict[str, int] = Field(description="numbers of configurations that may not be tried, by reason")
    first_trials: tuple[ExpectedTrial, ...] = Field(
        description="in their order if each gives what is predicted; none if every configuration is measured"
    )
    notes: tuple[str, ...]


def preview(plan: SearchPlan, model: CostModel | None) -> Preview:
    """Return what a search would do; `model`: None if nothing can be predicted."""
    sampler = CostModelSampler(plan, model)
    space, legal = sampler.space, sampler.space.legal
    refused: Counter[str] = Counter()
    for _, reason in space.judged:
        if reason is not None:
            refused[reason] += len(space.loadings)
    if too_large := sampler.beyond_memory:
        refused[f"predicted to need more than the budget of {show_memory(plan.memory_bytes)}"] = too_large
    options = {knob.parameter: knob.option for knob in knobs()}
    left_out: dict[str, tuple[str, ...]] = {}
    for (name, value), reason in space.left_out.items():
        left_out[reason] = (*left_out.get(reason, ()), f"{options[name]} {_written(value)}")
    first = sampler.foreseen(min(_FIRST_TRIALS, plan.budget.max_trials + 1))
    return Preview(
        **plan.problem_fields(),
        budget=plan.budget,
        configurations=len(legal) * len(space.loadings) + (plan.baseline not in legal) - too_large,
        knobs=_values(space, [plan.baseline, *legal]),
        values_refused=left_out,
        refused=dict(refused.most_common()),
        first_trials=tuple(
            ExpectedTrial(config=config, changes=changes(config, plan), predicted=sampler.prediction(config))
            for config in first
        ),
        notes=plan.notes,
    )


def _values(space: SearchSpace, configs: list[TrainConfig]) -> dict[str, tuple[str, ...]]:
    """Return the values of each knob that has several among the configurations, in the order of the space."""
    options = {knob.parameter: knob.option for knob in knobs()}
    found = {}
    for dimension in space.dimensions:
        field = dimension.name.partition(".")[0]
        having = {getattr(config, field): config for config in configs}.values()
        points = [*map(space.point, having), *space.loadings]
        there = {point[dimension.name] for point in points if dimension.name in point}
        if len(there) > 1:
            found[options[dimension.name]] = tuple(_written(choice) for choice in dimension.choices if choice in there)
    return found


def _written(value: Scalar) -> str:
    return str(value).lower() if value in (None, True, False) else str(value)
