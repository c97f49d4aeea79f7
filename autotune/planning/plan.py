"""The plan of a search: all that was settled before its first trial, as `search.json` has it; and trials' requests."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, NonNegativeInt, PositiveInt

from autotune.planning.options import SearchOptions
from autotune.space.file import SpaceFile
from autotune.space.space import SearchSpace
from autotune.values.budget import Budget
from autotune.values.checks import CheckTask, LossTask, RoutingTask
from autotune.values.config import TrainConfig
from autotune.values.placement import Fleet
from autotune.values.problem import Objective, Problem
from autotune.values.trial import Limits, Prediction, Purpose, TrialRequest

SCHEMA_VERSION: Literal[2] = 2  # of `search.json`; it had none in its first version

# Micro-steps of a search trial: the gradients of one are kept during the next, and the rest is inferred.
SEARCH_ACCUMULATION = 2

# Purposes whose trials run the workload's true accumulation.
_WHOLE_STEPS = (Purpose.FINAL, Purpose.LOSS_CHECK, Purpose.EXPLAIN)

# Purposes whose trials are compared with each other, and so measured more finely than those of the search.
_AGAIN = (Purpose.FINAL, Purpose.EXPLAIN)

# A check is over after the steps it asks for, however long they take and however much they differ.
_NEVER_SURE, _NO_TIME_LIMIT_S = 1e-12, 1e9


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


def request_of(
    plan: SearchPlan,
    config: TrainConfig,
    purpose: Purpose,
    *,
    number: int,
    timeout_s: float,
    task: CheckTask | None = None,
    prediction: Prediction | None = None,
    cold_compile: bool = False,
    to_beat: float | None = None,
) -> TrialRequest:
    """Return the request for a trial of `config`.

    Args:
        plan: The search.
        config: What is run.
        purpose: Why.
        number: Of the trial.
        timeout_s: When it is ended.
        task: Of a check.
        prediction: What the cost model expects.
        cold_compile: Whether what is compiled is compiled anew, as in a user's first run.
        to_beat: Samples/s below which the exact rate doesn't matter; None: it always does.
    """
    full = plan.workload.accumulation_steps(config)
    # What is inside a step of the user's own can't be seen, and so not be inferred.
    whole = purpose in _WHOLE_STEPS or plan.workload.own_step is not None
    return TrialRequest(
        number=number,
        purpose=purpose,
        config=config,
        workload=plan.workload,
        device=plan.hardware.device,
        accumulation_steps=full if whole else min(full, SEARCH_ACCUMULATION),
        prediction=prediction,
        limits=_limits(plan, task, timeout_s).model_copy(
            update={
                "beaten_step_s": plan.workload.samples_per_step(config) / to_beat if to_beat else None,
                **(plan.budget.when_measured_again if purpose in _AGAIN else {}),
            }
        ),
        task=task,
        cold_compile=cold_compile,
    )


def _limits(plan: SearchPlan, task: CheckTask | None, timeout_s: float) -> Limits:
    budget = plan.budget
    limits = Limits(
        memory_bytes=plan.memory_bytes,
        timeout_s=timeout_s,
        discarded_steps=budget.discarded_steps,
        discarded_s=budget.discarded_s,
        measure_steps=budget.measure_steps,
        measure_time_s=budget.measure_time_s,
        relative_interval=budget.relative_interval,
    )
    if task is None or isinstance(task, RoutingTask):
        return limits
    # Of a soak, the first step makes the optimizer's states and the next two meet them.
    steps = task.steps if isinstance(task, LossTask) else 2
    fixed = {"measure_time_s": _NO_TIME_LIMIT_S, "relative_interval": _NEVER_SURE}
    return limits.model_copy(update={"discarded_steps": 1, "discarded_s": 0.0, "measure_steps": max(2, steps), **fixed})
