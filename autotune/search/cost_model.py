"""The cost model of a search: which families are traced, by whom, and what earlier searches learned.

A child process traces, so that the search itself never loads torch. What can't be traced has no prediction and is
searched without.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from pydantic import ValidationError

from autotune.cost import child
from autotune.cost.calibrate import rates_by_table
from autotune.cost.child import TraceRequest, Traces
from autotune.cost.family import Family, family_of
from autotune.cost.model import CostModel
from autotune.errors import AutotuneError
from autotune.planning.plan import SearchPlan
from autotune.search.guide import configs_of
from autotune.storage.home import add_observations, rates_of, read_observations
from autotune.value import Value, read_value
from autotune.values.events import Note, Observer
from autotune.values.model import Task
from autotune.values.trial import TrialResult

# Tracing may take this share of a search, and a family a fraction of a second: what is left of it isn't predicted.
_SHARE = 0.06
_LIMIT_S = 60.0
_GRACE_S = 120.0


class Asker(Protocol):
    """What runs the tracing child: a LocalRunner."""

    def ask(self, name: str, entry: str, request: Value, *, timeout_s: float) -> Path:
        """Return the directory that holds the child's answer."""


def cost_model(plan: SearchPlan, runner: Asker, directory: Path, observer: Observer) -> CostModel | None:
    """Return the cost model of a search, traced now or by an earlier run of it; None if nothing can be predicted.

    Args:
        plan: The search.
        runner: Runs the tracing child.
        directory: Of the search.
        observer: Told what couldn't be traced.
    """
    code = plan.workload.own_code
    if plan.workload.task is Task.OWN or (code is not None and code.not_predicted is not None):
        return None
    traces = _read(directory / "trace" / "answer.json") or _trace(plan, runner)
    for failure in traces.failures:
        observer(Note(text=f"no prediction: {failure}"))
    try:
        rates = rates_of(plan.hardware)
    except AutotuneError as error:
        observer(Note(text=f"no prediction: {error}"))
        return None
    if not traces.profiles:
        return None
    observations = read_observations(plan.hardware, plan.workload.model.model_type)
    return CostModel.of(plan.workload, plan.hardware, rates, traces.profiles, observations)


def model_by_data_sheet(plan: SearchPlan) -> CostModel:
    """Return the cost model of a search whose device nothing was learned of, traced in this process by torch."""
    families = _families(plan)
    request = TraceRequest(workload=plan.workload, families=families, parameters=plan.facts.parameters, limit_s=600)
    rates = rates_by_table(plan.hardware)
    return CostModel.of(plan.workload, plan.hardware, rates, child.traces_of(request).profiles)


def learn(plan: SearchPlan, model: CostModel | None, results: Sequence[TrialResult]) -> None:
    """Keep what a finished search observed for the next one on this device with this type of model."""
    own = plan.workload.own_step or plan.workload.own_code
    if model is None or own is not None:  # whose steps are not those of our own trainings
        return
    # A check trains otherwise than a trial does: it evaluates and saves, or trains on without dropout.
    trained = [result for result in results if result.request.task is None]
    found = [observation for result in trained if (observation := model.observation(result)) is not None]
    if found:
        add_observations(plan.hardware, plan.workload.model.model_type, found)


def _trace(plan: SearchPlan, runner: Asker) -> Traces:
    families = _families(plan)
    limit_s = min(_LIMIT_S, _SHARE * plan.budget.max_time_s)
    request = TraceRequest(
        workload=plan.workload, families=families, parameters=plan.facts.parameters, limit_s=max(1.0, limit_s)
    )
    path = runner.ask("trace", child.ENTRY, request, timeout_s=limit_s + _GRACE_S) / "answer.json"
    return _read(path) or Traces(profiles=(), failures=("the model could not be traced: see trace/log.txt",))


def _families(plan: SearchPlan) -> tuple[Family, ...]:
    """Return the families of a search, the baseline's first and then in the order of its points."""
    configs = [plan.baseline, *configs_of(plan.search_space())]
    return tuple(dict.fromkeys(family_of(config, plan.hardware) for config in configs))


def _read(path: Path) -> Traces | None:
    try:
        return read_value(Traces, path)
    except (OSError, ValidationError):
        return None
