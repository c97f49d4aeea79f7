"""Exhaustive searches: every legal point of a space is measured and written to a table, which searches can replay.

A recording infers nothing: a point that runs out of memory rules out no other, each trial has its usual time limit, and
there are no finals. `plan_of` makes the plan of a search that replays a table (`benchmarks/searching/replay.py`). That
needs neither the model nor the machine of the recording.
"""

from __future__ import annotations

import datetime
import random
import statistics
from collections import Counter
from collections.abc import Sequence

from pydantic import ValidationError

from autotune.errors import InputError, located
from autotune.planning.plan import SearchPlan
from autotune.space.file import SpaceFile
from autotune.units import show_memory, show_time
from autotune.values.budget import Budget, Effort
from autotune.values.config import TrainConfig
from autotune.values.recorded_table import RecordedPoint, Table, TableHeader, TableTrial
from autotune.values.trial import TrialResult
from autotune.values.workload import Workload
from autotune.version import __version__

# Trials after which their median duration predicts the time that is left; fewer may all have ended out of memory.
TELLING_TRIALS = 5


def waiting(plan: SearchPlan, results: Sequence[TrialResult]) -> list[TrainConfig]:
    """Return the configurations that are still to run, round by round; each round has every configuration once.

    A round begins with the baseline. The order of the others is drawn from the seed anew for each round, so that a
    drift of the machine's speed is not mistaken for the effect of a knob.
    """
    done = Counter(r.request.config for r in results)
    baseline, *others = plan.every_config()
    draw = random.Random(plan.workload.seed)
    found: list[TrainConfig] = []
    for round_number in range(plan.repeats):
        draw.shuffle(others)
        found += (config for config in (baseline, *others) if done[config] <= round_number)
    return found


def how_long(left: int, results: Sequence[TrialResult]) -> str:
    """Return words on how long the trials that are left will take, by the median duration of those so far."""
    typical_s = statistics.median(r.duration_s for r in results)
    return f"{left} trials to go: some {show_time(left * typical_s)} at the {typical_s:.1f} s of those so far"


def table_of(plan: SearchPlan, results: Sequence[TrialResult]) -> Table:
    """Return the trials of a search as a table, the points in the order of their first trial.

    Finals and checks are left out: they do more than the trials that a replay asks for.
    """
    trials: dict[TrainConfig, list[TableTrial]] = {}
    for result in sorted(results, key=lambda r: r.request.number):
        if result.request.purpose.explores:
            trials.setdefault(result.request.config, []).append(TableTrial.of(result))
    header = TableHeader(
        autotune_version=__version__,
        date=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        **{**plan.problem_fields(), "workload": _anywhere(plan.workload)},
        budget=plan.budget,
        space=plan.space.model_dump(mode="json"),
        repeats=plan.repeats,
    )
    points = (RecordedPoint(config=config, trials=tuple(found)) for config, found in trials.items())
    return Table(header=header, points=tuple(points))


def plan_of(
    table: Table,
    *,
    effort: Effort = Effort.STANDARD,
    seed: int | None = None,
    memory_bytes: int | None = None,
    max_trials: int | None = None,
    max_time_s: float | None = None,
) -> SearchPlan:
    """Return the plan of a search of `table`; its space is the recorded one at every effort.

    Args:
        table: The recorded table.
        effort: Effort of the search, which sets its budget.
        seed: Seed of the search; by default that of the recorded workload.
        memory_bytes: Memory budget, at most the recorded one, which is the default.
        max_trials: Trials of the search.
        max_time_s: Time of the search in recorded seconds.

    Raises:
        InputError: The table's space can't be read, or was recorded with less memory than `memory_bytes`.
    """
    header = table.header
    if memory_bytes is not None and memory_bytes > header.memory_bytes:
        raise InputError(
            f"--memory {show_memory(memory_bytes)}: the table was recorded within {show_memory(header.memory_bytes)}; "
            "what needs more is not known"
        )
    plan = SearchPlan(
        **header.problem_fields(),
        budget=Budget.of(effort).limited(max_trials=max_trials, max_time_s=max_time_s),
        space=_recorded_space(header),
        notes=(),
    )
    workload = header.workload.model_copy(update={} if seed is None else {"seed": seed})
    return plan.model_copy(update={"workload": workload, "memory_bytes": memory_bytes or header.memory_bytes})


def _anywhere(workload: Workload) -> Workload:
    """Return `workload` without paths of this machine."""
    spec = workload.model
    if spec.source == "directory":
        spec = spec.model_copy(update={"reference": spec.name})
    dataset = workload.dataset and workload.dataset.rpartition("/")[2]
    return workload.model_copy(update={"model": spec.model_copy(update={"path": None}), "dataset": dataset})


def _recorded_space(header: TableHeader) -> SpaceFile:
    """Return the space of a table, with just the parameters that the effort of the recording varied."""
    try:
        written = SpaceFile.model_validate(header.space)
    except ValidationError as error:
        raise InputError(f"the table's space can't be read: {located(error)}") from None
    efforts = list(Effort)
    recorded = efforts.index(header.budget.effort)
    parameters = {
        name: parameter.model_copy(update={"from_effort": Effort.QUICK})
        for name, parameter in written.parameters.items()
        if efforts.index(parameter.from_effort) <= recorded
    }
    return written.model_copy(update={"parameters": parameters})
