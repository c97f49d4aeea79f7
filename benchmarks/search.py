"""Replays searches on recorded tables: how many trials until the best was as good as found, over many seeds.

    python benchmarks/search.py                                     # the tables in benchmarks/tables
    python benchmarks/search.py table.jsonl --seeds 20 --strategy autotune --strategy random

No model is trained and no time passes, see `searching/replay.py`; a seed draws which of a point's recorded trials
counts. Found means: a configuration was measured whose recorded mean is within 5 % (and 1 %) of the table's best,
differences within the table's noise left out. A strategy is a line in `STRATEGIES`; all are samplers of one loop (see
`searching/replay.py`). The last line is all figures as JSON, which is kept in `--out`.
"""

from __future__ import annotations

import argparse
import json
import sys
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import optuna
from optuna.samplers import BaseSampler, GPSampler, TPESampler
from provenance import ROOT, provenance
from searching.replay import Replayed, in_any_order, searched, tightened
from searching.scores import figures, near_best, noise_of, performance_score
from searching.tables import Table, load_table, plan_of

from autotune.cost.model import CostModel
from autotune.errors import AutotuneError
from autotune.planning.plan import SearchPlan
from autotune.search.cost_model import model_by_data_sheet
from autotune.search.sampler import CostModelSampler
from autotune.value import write_text
from autotune.values.budget import Effort
from autotune.values.hardware import detect
from autotune.values.trial import TrialStatus

TABLES = ROOT / "benchmarks" / "tables"

# Each table is searched twice: with the memory it was recorded with, and with enough for this share of its points.
TIGHT = 1 / 3

# By table: what is traced is the same for every seed.
_MODELS: dict[tuple[str, str], CostModel] = {}


def guided(table: Table, plan: SearchPlan) -> BaseSampler:
    """Return the sampler of `autotune find`, on a device that nothing has been learned of but its data sheet."""
    key = (table.header.date, table.header.workload.model.name)
    if key not in _MODELS:
        _MODELS[key] = model_by_data_sheet(plan)
    return CostModelSampler(plan, replace(_MODELS[key], workload=plan.workload))


class Way(NamedTuple):
    """A way to search: what makes its sampler, how many seeds are worth their time, and how many trials it may run.

    Without a sampler it tries every point, in any order. `has_budget`: autotune's own budget of trials is part of its
    way. `from_baseline`: the sampler doesn't know of it.
    """

    sampler: Callable[[Table, SearchPlan], BaseSampler] | None
    most_seeds: int = 100
    most_trials: int = 10_000
    has_budget: bool = False
    from_baseline: bool = False

    def search(self, table: Table, plan: SearchPlan) -> list[Replayed]:
        if self.sampler is None:
            return in_any_order(table, plan)
        return searched(self.sampler(table, plan), table, plan, from_baseline=self.from_baseline)


# Another way to search is one more line here: what makes an Optuna sampler for a table and a plan.
STRATEGIES: dict[str, Way] = {
    "autotune": Way(guided, has_budget=True),
    "unguided": Way(lambda table, plan: CostModelSampler(plan), most_seeds=20, has_budget=True),
    "random": Way(None),
    "tpe": Way(
        lambda table, plan: TPESampler(seed=plan.workload.seed, multivariate=True, group=True),
        most_trials=100,
        from_baseline=True,
    ),
    "gp": Way(  # needs scipy
        lambda table, plan: GPSampler(seed=plan.workload.seed, deterministic_objective=False),
        most_seeds=10,
        most_trials=40,
        from_baseline=True,
    ),
}


def main() -> None:
    options = parse_options()
    warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
    found: list[dict[str, Any]] = []
    document = {"seeds": options.seeds, "effort": options.effort, "figures": found}
    try:
        for path in options.tables or sorted(TABLES.glob("*.jsonl")):
            recorded = load_table(path)
            for name, table in ((path.stem, recorded), (f"{path.stem}-tight", tightened(recorded, TIGHT))):
                print(describe(name, table), flush=True)
                found += on_table(name, table, options)
                if options.out is not None:
                    text = json.dumps({**provenance(detect("cpu")), **document}, indent=1) + "\n"
                    write_text(text, options.out / "search.json")
    except AutotuneError as error:
        sys.exit(f"search: {error}")
    print(json.dumps(document))


def on_table(name: str, table: Table, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Return the figures of every strategy on a table; print a line for each."""
    by_chance = replay(table, STRATEGIES["random"], options)
    found = []
    for strategy in options.strategy or list(STRATEGIES):
        runs = by_chance if strategy == "random" else replay(table, STRATEGIES[strategy], options)
        row = {**figures(runs, table), "score": performance_score(runs, by_chance, table)}
        print(f"  {strategy:<19}{sentence(row)}", flush=True)
        found.append({"table": name, "strategy": strategy, "seeds": len(runs), **row})
    return found


def replay(table: Table, way: Way, options: argparse.Namespace) -> list[list[Replayed]]:
    plan = partial(plan_of, table, effort=Effort(options.effort))
    limit = options.max_trials or min(way.most_trials, len(table.points))
    limits = {} if way.has_budget and not options.max_trials else {"max_trials": limit}
    return [way.search(table, plan(seed=seed, **limits)) for seed in range(min(options.seeds, way.most_seeds))]


def describe(name: str, table: Table) -> str:
    points = table.points
    failed = sum(any(t.status is TrialStatus.OUT_OF_MEMORY for t in p.trials) for p in points)
    near = " and ".join(f"{len(near_best(table, share))} within {share:.0%}" for share in (0.05, 0.01))
    return (
        f"{name}: {len(points)} points, {failed} out of memory, {near} of the best; "
        f"a trial's noise is {noise_of(table):.1%}"
    )


def sentence(row: dict[str, Any]) -> str:
    def shown(name: str, names: Sequence[str] = ("median", "p90")) -> str:
        texts = ["never" if row[name][k] is None else f"{row[name][k]:.0f}" for k in names]
        return f"{texts[0]} (p90 {texts[1]})"

    return (
        f"{shown('trials_to_5%')} trials to 5%, {shown('trials_to_1%')} to 1%; {shown('seconds_to_5%')} s to 5%; "
        f"in all {shown('trials_in_all')}, {row['out_of_memory_share']:.0%} out of memory "
        f"({row['out_of_memory_share_of_chosen']:.0%} without the baseline); score {row['score']:.2f}"
    )


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("tables", type=Path, nargs="*", help="table.jsonl files (default: benchmarks/tables)")
    parser.add_argument("--seeds", type=int, default=100, help="searches per table at the most (default: %(default)s)")
    parser.add_argument("--effort", choices=list(map(str, Effort)), default="standard", help="default: %(default)s")
    parser.add_argument("--max-trials", type=int, help="of each search")
    parser.add_argument("--strategy", choices=list(STRATEGIES), action="append", help="default: all")
    parser.add_argument("--out", type=Path, help="folder for the figures")
    options = parser.parse_args()
    if options.out is not None:
        options.out.mkdir(parents=True, exist_ok=True)
    if "gp" in (options.strategy or STRATEGIES) and find_spec("scipy") is None:
        parser.error("pip install scipy: the strategy gp needs it")
    return options


if __name__ == "__main__":
    main()
