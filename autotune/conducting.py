"""Conducts a search that is planned, to its end: with who keeps its trials, who is told, and what predicts.

Called by `autotune.api`, for a search that begins and for one that goes on.
"""

from __future__ import annotations

from autotune import tracking
from autotune.crew import Crew
from autotune.delivery import deliver
from autotune.events import Note, Observer, Phase, PhaseBegan
from autotune.exhaustive import Recorder
from autotune.keeping import Keeper, keeper_of
from autotune.predicting import cost_model, learn
from autotune.recall import Recall
from autotune.result import TuningResult
from autotune.rundir import RunDirectory
from autotune.search_plan import SearchPlan
from autotune.stopwatch import Stopwatch
from autotune.tuner import SearchInterrupted


def conduct(
    plan: SearchPlan, directory: RunDirectory, crew: Crew, observer: Observer, stopwatch: Stopwatch
) -> TuningResult:
    """Run a search or a recording to its end; what was observed is kept for the next one, however it ends.

    Raises:
        NothingFitsError, InfrastructureError, SearchInterrupted: As the conductor.
        InputError: The answer can't be written where it is wanted beside the run directory.
    """
    with tracking.trackers_of(plan, directory, observer) as trackers, keeper_of(plan, directory, trackers) as keeper:
        try:
            if plan.exhaustive:
                result = Recorder(plan, directory, crew.runner, keeper).run()
            else:
                result = _search(plan, directory, crew, keeper, stopwatch)
        except SearchInterrupted as interrupted:
            deliver(interrupted.result, plan.output)
            raise
        result = trackers.end(keeper.end(result))
    deliver(result, plan.output)
    return result


def _search(
    plan: SearchPlan, directory: RunDirectory, crew: Crew, keeper: Keeper, stopwatch: Stopwatch
) -> TuningResult:
    stopwatch.enter("tracing")
    keeper(PhaseBegan(phase=Phase.PREDICTING))
    model = cost_model(plan, crew.asker, directory.path, keeper)
    stopwatch.enter("planning")
    if model is None and plan.probes is not None:
        keeper(Note(text="shallow probes are left out: without a prediction there is nothing they could correct"))
    recall = Recall(plan, keeper.earlier())
    if recall.foreword is not None and not directory.results():
        keeper(Note(text=recall.foreword))
    starting = stopwatch.laps()
    try:
        return crew.conductor(plan, directory, crew.runner, keeper, model=model, recall=recall, starting=starting).run()
    finally:
        if not plan.is_shared:  # what was disturbed would mislead the next search
            learn(plan, model, directory.results())
