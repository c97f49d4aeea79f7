"""How near a search over many workers comes to the ideal: 1,000 trials, replayed, at 1 to 50 simulated workers.

    python benchmarks/fanout.py
    python benchmarks/fanout.py --workers 50 --slower 10        # trials that take ten times as long
    python benchmarks/fanout.py --guided --seeds 10             # the usual search with its cost model, on the table

Workers are simulated and the driver is real. A trial takes the time it took when it was recorded, which passes by
setting the clock forward; while the driver proposes, learns and writes, the same clock runs, and workers wait for it.
On a machine that is busy with other things, `--processor` counts the driver's processor time instead of real time,
which leaves out what it waits for the disk (some ten flushes a trial). The ideal is the sum of the trials' times over
the number of workers: no worker ever idle, a driver that takes no time. Finals are not counted: they run one at a time
by design.

A table of 210 points holds no 1,000 trials, so the space is made larger: each recorded point stands for 21 (three
precisions, six adapters and none) that take the recorded time and have the recorded rate times a factor. The cost
model is left out: with it a search ends after some ten trials, whatever the number of workers, which `--guided` shows.
The last line is the result as JSON.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from provenance import ROOT, provenance, results_path
from searching.replay import ReplayClock, ReplayPool, ReplayRunner

from autotune.planning.plan import SearchPlan
from autotune.search.exhaustive import plan_of
from autotune.search.tuner import Tuner
from autotune.storage.run_directory import RunDirectory
from autotune.value import write_text
from autotune.values.adapters import LoraAdapter
from autotune.values.budget import Effort
from autotune.values.config import Precision
from autotune.values.events import Event, TrialEnded
from autotune.values.hardware import detect
from autotune.values.knob import Allowance
from autotune.values.recorded_table import RecordedPoint, Table, TableTrial, load_table
from autotune.values.trial import TrialResult

WORKERS = (1, 2, 4, 8, 16, 32, 50)
GUIDED_WORKERS = (1, 2, 4, 8)

# What the points that were never recorded are taken to gain or lose; any numbers would do.
PRECISIONS = {Precision.FP32: 1.0, Precision.BF16: 0.93, Precision.PURE_BF16: 0.97}
RANKS = {8: 1.06, 16: 1.05, 64: 1.02}
TARGETS = {"all-linear": 1.0, "attention": 1.03}


class WorkingClock(ReplayClock):
    """The driver's time, which trials set forward by what they take."""

    def __init__(self, timer: Callable[[], float]) -> None:
        super().__init__()
        self._timer = timer
        self._started = timer()

    def now(self) -> float:
        """Return the seconds that have passed, by the driver's work and by trials."""
        return super().now() + self._timer() - self._started


def main() -> None:
    """Measure, print and write what the command line asks for."""
    options = parse_options()
    table = load_table(options.table)
    rows = [row for workers in options.workers for row in measured(table, workers, options)]
    document = {
        **provenance(detect("cpu")),
        "table": options.table.name,
        "slower": options.slower,
        "driver_time": "processor" if options.processor else "real",
        "guided": options.guided,
        "rows": rows,
    }
    name = "fanout-guided" if options.guided else f"fanout-x{options.slower:g}"
    output = options.out or results_path(name, detect("cpu")).with_suffix(".json")
    output.parent.mkdir(parents=True, exist_ok=True)
    write_text(json.dumps(document, indent=1) + "\n", output)
    if not options.guided:
        plot(rows, options.slower, output.with_suffix(".svg"))
    print(json.dumps(document))


def measured(table: Table, workers: int, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Return a row for each seed, and print it."""
    rows = []
    for seed in range(options.seeds):
        if options.guided:
            row = guided(table, workers, seed)
        else:
            timer = time.process_time if options.processor else time.perf_counter
            row = fanned_out(larger(table, slower=options.slower), workers, options.trials, seed, timer)
        rows.append({"workers": workers, "seed": seed, **row})
        print(", ".join(f"{name} {value:.4g}" for name, value in rows[-1].items()), file=sys.stderr, flush=True)
    return rows


def fanned_out(table: Table, workers: int, trials: int, seed: int, timer: Callable[[], float]) -> dict[str, float]:
    """Return the figures of a search of so many trials without the cost model."""
    plan = plan_of(table, effort=Effort.THOROUGH, seed=seed, max_trials=trials, max_time_s=1e9)
    ended, driver_s = search(table, plan, workers, WorkingClock(timer), timer)
    explored = [(result, at) for result, at in ended if result.request.purpose.explores]
    busy_s = sum(result.duration_s for result, _ in explored)
    wall_s = max(at for _, at in explored)
    ideal_s = busy_s / workers
    return {
        "trials": len(explored),
        "wall_s": wall_s,
        "ideal_s": ideal_s,
        "efficiency": ideal_s / wall_s,
        "driver_s_per_trial": driver_s / len(ended),
        "mean_trial_s": busy_s / len(explored),
    }


def guided(table: Table, workers: int, seed: int) -> dict[str, float]:
    """Return the figures of the usual search, with its finals, and how good its winner is."""
    from searching.samplers import model_of
    from searching.scores import rates_of

    plan = plan_of(table, seed=seed)
    clock = ReplayClock()
    ended, _ = search(table, plan, workers, clock, time.perf_counter, model=model_of(table, plan))
    rates = rates_of(table)
    explored = [result for result, _ in ended if result.request.purpose.explores]
    best = max((rates.get(r.request.config, 0.0) for r in explored if r.measurement), default=0.0)
    return {
        "trials": len(explored),
        "wall_s": clock.now(),
        "search_s": max(at for result, at in ended if result.request.purpose.explores),
        "of_the_best": best / max(rates.values()),
    }


def search(
    table: Table, plan: SearchPlan, workers: int, clock: ReplayClock, timer: Callable[[], float], **options: Any
) -> tuple[list[tuple[TrialResult, float]], float]:
    """Return the trials of a search, with the moments when they were taken in, and the seconds that the driver took."""
    ended: list[tuple[TrialResult, float]] = []

    def listen(event: Event) -> None:
        if isinstance(event, TrialEnded):
            ended.append((event.result, clock.now()))

    pool = ReplayPool(ReplayRunner(table, clock, seed=plan.workload.seed), clock, workers)
    began = timer()
    with tempfile.TemporaryDirectory() as scratch:
        Tuner(plan, RunDirectory(Path(scratch)), pool, listen, clock=clock.now, **options).run()
    return ended, timer() - began


def larger(table: Table, *, slower: float) -> Table:
    """Return a table of 21 times as many points, each with the trials of the recorded one that it stems from."""
    variants: list[tuple[dict[str, Any], float]] = [({}, 1.0)]
    for rank, targets in itertools.product(RANKS, TARGETS):
        adapter = LoraAdapter(rank=rank, target_modules=targets)
        variants.append(({"adapter": adapter}, RANKS[rank] * TARGETS[targets]))
    points = [
        RecordedPoint(
            config=point.config.model_copy(update={**changes, "precision": precision}),
            trials=tuple(scaled(trial, factor * PRECISIONS[precision], slower) for trial in point.trials),
        )
        for point in table.points
        for changes, factor in variants
        for precision in PRECISIONS
    ]
    space = dict(table.header.space)
    space["parameters"] = {
        **space["parameters"],
        "precision": {"choices": [str(p) for p in PRECISIONS]},
        "adapter": {"choices": [None, "lora"]},
        "adapter.rank": {"choices": list(RANKS), "when": {"adapter": ["lora"]}},
        "adapter.target_modules": {"choices": list(TARGETS), "when": {"adapter": ["lora"]}},
    }
    header = table.header.model_copy(update={"space": space, "allowance": Allowance.METHOD})
    return Table(header=header, points=tuple(points))


def scaled(trial: TableTrial, factor: float, slower: float) -> TableTrial:
    """Return a trial at `factor` times the rate, that takes `slower` times as long."""
    measured = trial.measurement
    if measured is not None:
        measured = measured.model_copy(update={"samples_per_second": measured.samples_per_second * factor})
    return trial.model_copy(update={"measurement": measured, "duration_s": trial.duration_s * slower})


def plot(rows: Sequence[dict[str, Any]], slower: float, path: Path) -> None:
    """Draw wall time against the ideal."""
    from matplotlib.figure import Figure

    workers = sorted({row["workers"] for row in rows})
    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.add_subplot()
    for name, label in (("wall_s", "search"), ("ideal_s", "ideal: trials' time / workers")):
        values = [statistics.median(row[name] for row in rows if row["workers"] == n) for n in workers]
        axes.plot(workers, values, marker="o", label=label)
    mean_s = statistics.fmean(row["mean_trial_s"] for row in rows)
    axes.set(
        xscale="log", yscale="log", xlabel="simulated workers", ylabel="wall time, s",
        title=f"{max(row['trials'] for row in rows)} replayed trials of {mean_s:.1f} s on average",
    )  # fmt: skip
    axes.set_xticks(workers, [str(n) for n in workers])
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small")
    figure.savefig(path, metadata={"Date": None})


def parse_options() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    default = ROOT / "benchmarks" / "tables" / "llama-1m.jsonl"
    parser.add_argument("--table", type=Path, default=default, help="table.jsonl (default: %(default)s)")
    parser.add_argument("--workers", type=int, action="append", help="how many at a time (default: 1 to 50)")
    parser.add_argument("--trials", type=int, default=1000, help="of each search (default: %(default)s)")
    parser.add_argument("--slower", type=float, default=1.0, help="factor of the trials' time (default: %(default)s)")
    parser.add_argument(
        "--seeds", type=int, default=1, help="searches at each number of workers (default: %(default)s)"
    )
    parser.add_argument("--guided", action="store_true", help="the usual search with the cost model, on the table")
    parser.add_argument("--processor", action="store_true", help="count the driver's processor time")
    parser.add_argument("--out", type=Path, help="file of the result (default: in benchmarks/results)")
    options = parser.parse_args()
    options.workers = options.workers or list(GUIDED_WORKERS if options.guided else WORKERS)
    return options


if __name__ == "__main__":
    main()
