"""The plan of a search, which is settled before the first trial and stored as `search.json`; requests of trials."""

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

SCHEMA_VERSION: Literal[2] = 2  # of `search.json`; files of the first version have no such field

# Most micro-batches per step of a search trial. Two show the memory of gradients that are held during a backward pass;
# the time of a step with more is inferred.
SEARCH_ACCUMULATION = 2

# Purposes whose trials run all micro-batches of a step.
_WHOLE_STEPS = (Purpose.FINAL, Purpose.LOSS_CHECK, Purpose.EXPLAIN)

# Purposes whose trials are compared closely, and so measured more exactly than those of the search.
_AGAIN = (Purpose.FINAL, Purpose.EXPLAIN)

# Limits that never end a check, which runs the number of steps that it asks for.
_NEVER_SURE, _NO_TIME_LIMIT_S = 1e-12, 1e9


class SearchPlan(Problem):
    """The problem of a search and all that is settled about how it is solved, as stored in `search.json`."""

    schema_version: Literal[2] = SCHEMA_VERSION
    budget: Budget
    space: SpaceFile
    exhaustive: bool = Field(default=False, description="every legal point is measured; nothing is searched")
    repeats: PositiveInt = Field(default=1, description="trials of each point of an exhaustive plan")
    objective: Objective = Objective()
    soak: bool = Field(default=False, description="the winner must evaluate and save a checkpoint within the budget")
    skewed_routing: bool = Field(default=False, description="a winner with experts is measured with uneven routing too")
    loss_steps: NonNegativeInt = Field(default=0, description="optimizer steps over which losses are compared; 0: none")
    loss_insisted: bool = Field(
        default=False, description="losses are compared however long it takes, as the user asked"
    )
    record: bool = Field(default=False, description="the lasting record is read and written")
    report_to: tuple[str, ...] = Field(default=(), description="trackers that receive each trial")
    fleet: Fleet = Field(default=Fleet(), description="where the trials run")
    is_shared: bool = Field(default=False, description="concurrent trials slow each other down")
    options: SearchOptions | None = Field(
        default=None, description="the user's options; None: the plan can't be made from options"
    )
    output: str | None = Field(default=None, description="file that the answer is written to as well")
    reopened_at: NonNegativeInt = Field(
        default=0, description="number of the next trial when the limits last changed; finals before it don't count"
    )
    notes: tuple[str, ...]

    def every_config(self) -> list[TrainConfig]:
        """Return the baseline and then every other legal configuration of the space."""
        space = self.search_space()
        return list(dict.fromkeys([self.baseline, *map(space.config, space.points())]))

    @property
    def world_sizes(self) -> frozenset[int]:
        """The numbers of devices over which trainings are spread: that of the baseline, and those of the space."""
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
    in_turn_with: tuple[int, ...] = (),
) -> TrialRequest:
    """Return the request for a trial of `config`.

    Args:
        plan: The plan of the search.
        config: The configuration to run.
        purpose: What the trial is for.
        number: Number of the trial.
        timeout_s: Seconds after which the trial is ended.
        task: What a check does beside timing steps; None for other trials.
        prediction: The prediction of the cost model, if there is one.
        cold_compile: Whether compiled code is compiled anew, as in a user's first run.
        to_beat: Samples/s below which the trial may measure less exactly; None: it always measures exactly.
        in_turn_with: Numbers of the trials that compute in turn with it, itself included; empty: it runs alone.
    """
    full = plan.workload.accumulation_steps(config)
    # The micro-batches of a user's own step can't be timed, so a longer step can't be inferred from a shorter one.
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
                **(plan.budget.when_in_turn if in_turn_with else {}),
            }
        ),
        task=task,
        cold_compile=cold_compile,
        in_turn_with=in_turn_with,
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
    # In a soak, the first step creates the optimizer states, and two more run with them.
    steps = task.steps if isinstance(task, LossTask) else 2
    fixed = {"measure_time_s": _NO_TIME_LIMIT_S, "relative_interval": _NEVER_SURE}
    return limits.model_copy(update={"discarded_steps": 1, "discarded_s": 0.0, "measure_steps": max(2, steps), **fixed})
