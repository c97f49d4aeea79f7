"""What a search is about, as values: all that was settled before its first trial, as `search.json` keeps it.

Made by `planning`; read by everything that conducts, resumes or reports a search.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field, NonNegativeInt, PositiveInt

from autotune.planning.options import SearchOptions
from autotune.space.file import SpaceFile
from autotune.space.space import SearchSpace
from autotune.value import Value
from autotune.values.budget import Budget
from autotune.values.config import TrainConfig, Workload
from autotune.values.hardware import Hardware
from autotune.values.placement import Fleet
from autotune.values.problem import Objective, Problem

SCHEMA_VERSION: Literal[2] = 2  # of `search.json`; it had none in its first version


class Outline(Value):
    """What is settled before the model's classes have been looked at."""

    options: SearchOptions
    hardware: Hardware
    workload: Workload
    memory_bytes: int
    budget: Budget
    space: SpaceFile
    searched_arguments: dict[str, object] | None
    notes: tuple[str, ...]
    is_shared: bool = False


class SearchPlan(Problem):
    """A problem with all that is settled of the search for its answer, as it stands in `search.json`."""

    schema_version: Literal[2] = SCHEMA_VERSION
    budget: Budget
    space: SpaceFile
    exhaustive: bool = Field(default=False, description="every legal point is measured; nothing is searched")
    repeats: PositiveInt = Field(default=1, description="trials of each point of an exhaustive plan")
    objective: Objective = Objective()
    soak: bool = Field(default=False, description="the winner must evaluate and save a checkpoint within the budget")
    skewed_routing: bool = Field(default=False, description="a winner with experts is measured with uneven routing too")
    loss_steps: NonNegativeInt = Field(default=0, description="optimizer steps over which losses are compared; 0: not")
    loss_insisted: bool = Field(default=False, description="compared whatever it takes: the user has asked for it")
    record: bool = Field(default=False, description="the lasting record is read and written")
    report_to: tuple[str, ...] = Field(default=(), description="trackers that are told of each trial")
    fleet: Fleet = Field(default=Fleet(), description="where the trials run")
    is_shared: bool = Field(default=False, description="trials at the same time disturb each other")
    options: SearchOptions | None = Field(default=None, description="what the user asked for; None: made otherwise")
    output: str | None = Field(default=None, description="file that the answer is written to as well")
    reopened_at: NonNegativeInt = Field(
        default=0, description="number of the next trial when limits were last changed: earlier finals don't end it"
    )
    notes: tuple[str, ...]

    def every_config(self) -> list[TrainConfig]:
        """Return the baseline and then every other legal configuration of the space."""
        space = self.search_space()
        return list(dict.fromkeys([self.baseline, *map(space.config, space.points())]))

    @property
    def world_sizes(self) -> frozenset[int]:
        """Over how many devices its trainings are spread: as the baseline, or as the space names."""
        named = self.space.parameters.get("parallelism.world_size")
        choices = named.choices if named is not None and named.choices != "lattice" else ()
        return frozenset({self.baseline.parallelism.world_size, *(c for c in choices if isinstance(c, int))})

    def search_space(self) -> SearchSpace:
        """Return the space bound to this plan."""
        return SearchSpace(self.space, self, effort=self.budget.effort)
