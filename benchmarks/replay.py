"""Replays searches on recorded tables: how many trials until the best was as good as found, over many seeds.

    python benchmarks/replay.py                                     # the tables in benchmarks/tables
    python benchmarks/replay.py table.jsonl --seeds 50 --strategy search --strategy random

No model is built and no time passes, see `autotune.execution.replay`. Found means: a configuration was measured whose
recorded mean is within 5 % of the table's best. A strategy is a function in `STRATEGIES`; "random" runs the points in
any order and is the measure of the others. The last line is all figures as JSON.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import math
import random
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from provenance import ROOT

from autotune.config import Effort, TrainConfig
from autotune.cost.calibrate import rates_by_table
from autotune.cost.child import TraceRequest, Traces, traces_of
from autotune.cost.family import family_of
from autotune.cost.model import CostModel
from autotune.errors import AutotuneError, InputError, NothingFitsError
from autotune.events import Event, TrialEnded
from autotune.execution.replay import ReplayClock, ReplayRunner
from autotune.exhaustive import plan_of
from autotune.planning import SearchPlan
from autotune.recording import RecordedPoint, Table, load_table
from autotune.rundir import RunDirectory
from autotune.trial import Purpose, TrialStatus
from autotune.tuner import Tuner

TABLES = ROOT / "benchmarks" / "tables"
NEAR = 0.95

# By table: a trace is the same for every seed.
_TRACES: dict[tuple[object, ...], Traces] = {}


class Replayed(NamedTuple):
    """A trial that was replayed."""

    config: TrainConfig
    status: TrialStatus
    ended_at_s: float


# From a table and the plan of a search on it to the trials before the finals, in their order.
Strategy = Callable[[Table, SearchPlan], list[Replayed]]


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
        if isinstance(event, TrialEnded) and event.result.request.purpose is not Purpose.FINAL:
            trials.append(Replayed(event.result.request.config, event.result.status, clock.now()))

    with tempfile.TemporaryDirectory() as scratch, contextlib.suppress(NothingFitsError):
        Tuner(plan, RunDirectory(Path(scratch)), ReplayRunner(table, clock), listen, clock=clock.now, model=model).run()
    return trials


def in_any_order(table: Table, plan: SearchPlan) -> list[Replayed]:
    """Run every point, in an order drawn from the seed."""
    points = random.Random(plan.workload.seed).sample(table.points, len(table.points))
    firsts = [point.trials[0] for point in points]
    ended_at_s = itertools.accumulate(trial.duration_s for trial in firsts)
    return [Replayed(p.config, t.status, s) for p, t, s in zip(points, firsts, ended_at_s, strict=True)]


# Another way to search is one more line here.
STRATEGIES: dict[str, Strategy] = {"search": search, "unguided": search_unguided, "random": in_any_order}


def main() -> None:
    """Replay what the command line asks for."""
    options = parse_options()
    figures = []
    try:
        for path in options.tables or sorted(TABLES.glob("*.jsonl")):
            table = load_table(path)
            print(describe(path.name, table))
            for name in options.strategy or list(STRATEGIES):
                found = replay(table, STRATEGIES[name], options)
                print(f"  {name:<12} {sentence(found)}", flush=True)
                figures.append({"table": path.name, "strategy": name, **found})
    except AutotuneError as error:
        sys.exit(f"replay: {error}")
    print(json.dumps({"seeds": options.seeds, "effort": options.effort, "near": NEAR, "figures": figures}))


def replay(table: Table, strategy: Strategy, options: argparse.Namespace) -> dict[str, Any]:
    """Return what `strategy` needs on `table`, over the seeds."""
    near = frozenset(p.config for p in near_best(table))
    needed, needed_s, failed, failed_in_all, ran = [], [], [], [], []
    for seed in range(options.seeds):
        plan = plan_of(table, effort=Effort(options.effort), seed=seed, max_trials=options.max_trials)
        trials = strategy(table, plan)
        hits = (n for n, t in enumerate(trials, start=1) if t.status is TrialStatus.COMPLETED and t.config in near)
        found = next(hits, None)
        needed.append(found)
        needed_s.append(trials[found - 1].ended_at_s if found else None)
        failed.append(sum(t.status is TrialStatus.OUT_OF_MEMORY for t in trials[:found]))
        failed_in_all.append(sum(t.status is TrialStatus.OUT_OF_MEMORY for t in trials))
        ran.append(len(trials))
    return {
        "trials": spread(needed),
        "seconds": spread(needed_s),
        "never": needed.count(None),
        "out_of_memory": spread(failed),
        "trials_in_all": spread(ran),
        "out_of_memory_in_all": spread(failed_in_all),
    }


def near_best(table: Table) -> Iterator[RecordedPoint]:
    """Yield the points within 5 % of the best.

    Raises:
        InputError: Nothing in the table completed.
    """
    best = table.best()
    if best is None or best.samples_per_second is None:
        raise InputError("no point of the table has completed a trial")
    yield from (p for p in table.points if (p.samples_per_second or 0.0) >= NEAR * best.samples_per_second)


def spread(values: list[Any]) -> dict[str, int | float | None]:
    """Return median, lowest and highest, None standing for never."""
    numbers = [math.inf if v is None else v for v in values]
    found = {"median": statistics.median_low(numbers), "lowest": min(numbers), "highest": max(numbers)}
    return {name: value if math.isfinite(value) else None for name, value in found.items()}


def describe(name: str, table: Table) -> str:
    """Return a table's name, its size and how far its own repeats lie apart."""
    header, points = table.header, table.points
    failed = sum(p.trials[0].status is TrialStatus.OUT_OF_MEMORY for p in points)
    apart = [max(p.rates) / min(p.rates) - 1 for p in points if len(p.rates) > 1]
    noise = f", repeats {statistics.median(apart):.1%} apart" if apart else ""
    near = sum(1 for _ in near_best(table))
    return (
        f"{name}: {header.workload.model.name} on {header.hardware.name}, {len(points)} points, "
        f"{failed} out of memory, {near} within {1 - NEAR:.0%} of the best{noise}"
    )


def sentence(found: dict[str, Any]) -> str:
    """Return the figures of one strategy on one table as a line."""

    def shown(name: str) -> str:
        texts = {k: "never" if v is None else f"{v:.0f}" for k, v in found[name].items()}
        return f"{texts['median']} ({texts['lowest']} to {texts['highest']})"

    never = f", never with {found['never']} seeds" if found["never"] else ""
    return (
        f"{shown('trials')} trials to within {1 - NEAR:.0%}{never}, {shown('out_of_memory')} of them out of memory; "
        f"{shown('seconds')} s; in all {shown('trials_in_all')} trials, {shown('out_of_memory_in_all')} out of memory"
    )


def parse_options() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("tables", type=Path, nargs="*", help="table.jsonl files (default: benchmarks/tables)")
    parser.add_argument("--seeds", type=int, default=20, help="searches per table (default: %(default)s)")
    parser.add_argument("--effort", choices=list(map(str, Effort)), default="standard", help="default: %(default)s")
    parser.add_argument("--max-trials", type=int, help="of each search")
    parser.add_argument("--strategy", choices=list(STRATEGIES), action="append", help="default: all")
    return parser.parse_args()


if __name__ == "__main__":
    main()
