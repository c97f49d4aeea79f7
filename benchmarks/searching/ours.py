"""autotune's own search on a recorded table: with the cost model, which knows nothing of the device, and without."""

from __future__ import annotations

import contextlib
import tempfile
from pathlib import Path

from searching.oracle import Replayed

from autotune.cost.calibrate import rates_by_table
from autotune.cost.child import TraceRequest, Traces, traces_of
from autotune.cost.family import family_of
from autotune.cost.model import CostModel
from autotune.errors import NothingFitsError
from autotune.execution.replay import ReplayClock, ReplayRunner
from autotune.planning.plan import SearchPlan
from autotune.search.tuner import Tuner
from autotune.storage.run_directory import RunDirectory
from autotune.values.events import Event, TrialEnded
from autotune.values.recorded_table import Table

# By table: a trace is the same for every seed.
_TRACES: dict[tuple[object, ...], Traces] = {}


class _Searching(Tuner):
    """A search without its finals, which find nothing."""

    def _measure_again(self) -> None:
        pass


def search(table: Table, plan: SearchPlan) -> list[Replayed]:
    """Search as `autotune find` does, on a device that nothing has been learned of."""
    return _search(table, plan, model_of(table, plan))


def search_unguided(table: Table, plan: SearchPlan) -> list[Replayed]:
    """Search without the cost model."""
    return _search(table, plan, None)


def model_of(table: Table, plan: SearchPlan) -> CostModel:
    """Return the cost model of a table, with the rates that a data sheet gives its device."""
    key = (table.header.date, table.header.workload.model.name)
    if key not in _TRACES:
        families = dict.fromkeys(family_of(point.config, plan.hardware) for point in table.points)
        request = TraceRequest(
            workload=plan.workload, families=tuple(families), parameters=plan.facts.parameters, limit_s=600
        )
        _TRACES[key] = traces_of(request)
    return CostModel.of(plan.workload, plan.hardware, rates_by_table(plan.hardware), _TRACES[key].profiles)


def _search(table: Table, plan: SearchPlan, model: CostModel | None) -> list[Replayed]:
    clock = ReplayClock()
    trials: list[Replayed] = []

    def listen(event: Event) -> None:
        if isinstance(event, TrialEnded) and event.result.request.purpose.explores:
            trials.append(Replayed(event.result.request.config, event.result.status, clock.now()))

    runner = ReplayRunner(table, clock, seed=plan.workload.seed)
    with tempfile.TemporaryDirectory() as scratch, contextlib.suppress(NothingFitsError):
        _Searching(plan, RunDirectory(Path(scratch)), runner, listen, clock=clock.now, model=model).run()
    return trials
