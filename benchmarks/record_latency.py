"""How long recording takes as a search grows to 1,000 trials, on each database.

    python benchmarks/record_latency.py                                  # SQLite
    AUTOTUNE_RECORD=postgresql://user:password@host/autotune_test python benchmarks/record_latency.py

The lasting record gets trials of a recorded table one by one, as a search writes them, and is read as the next search
reads it. The server's database must be empty; what is made in it stays. The last line is the result as JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from provenance import ROOT, provenance, results_path
from searching.replay import ReplayClock, ReplayRunner

from autotune.errors import AutotuneError
from autotune.planning.plan import SearchPlan, request_of
from autotune.search.exhaustive import plan_of
from autotune.storage.database import VARIABLE
from autotune.storage.record import Record
from autotune.storage.recorded import RecordedTrial
from autotune.storage.sync import Identity, described
from autotune.value import write_text
from autotune.values.hardware import detect
from autotune.values.recorded_table import Table, load_table
from autotune.values.trial import Purpose, TrialResult

TABLE = ROOT / "benchmarks" / "tables" / "llama-1m.jsonl"

# Trials at the start and at the end of a search whose times are shown.
_SHOWN = 100


class Times(NamedTuple):
    """Seconds of each call, in order: by the clock, and of this process on a processor."""

    seconds: list[float]
    processor: list[float]

    def measure(self, call: Callable[[], Any]) -> Any:
        """Return what `call` returns, its time noted."""
        began, processor_began = time.perf_counter(), time.process_time()
        value = call()
        self.seconds.append(time.perf_counter() - began)
        self.processor.append(time.process_time() - processor_began)
        return value

    def figures(self) -> dict[str, float]:
        """Return milliseconds: the median of the first and of the last calls, and the longest of all."""
        first, last = self.seconds[:_SHOWN], self.seconds[-_SHOWN:]
        return {
            "calls": len(self.seconds),
            "median_of_first_ms": 1e3 * statistics.median(first),
            "median_of_last_ms": 1e3 * statistics.median(last),
            "p95_ms": 1e3 * sorted(self.seconds)[int(0.95 * len(self.seconds))],
            "longest_ms": 1e3 * max(self.seconds),
            "median_of_last_on_processor_ms": 1e3 * statistics.median(self.processor[-_SHOWN:]),
        }


def results_of(table: Table, plan: SearchPlan, count: int) -> list[TrialResult]:
    """Return so many trials of random points, the baseline first."""
    runner = ReplayRunner(table, ReplayClock(), seed=0)
    draw = random.Random(0)
    configs = [plan.baseline, *(draw.choice(table.points).config for _ in range(count - 1))]
    purposes = [Purpose.BASELINE, *[Purpose.SEARCH] * (count - 1)]
    return [
        runner.run(request_of(plan, config, purpose, number=number, timeout_s=1e6))
        for number, (config, purpose) in enumerate(zip(configs, purposes, strict=True))
    ]


def record_figures(plan: SearchPlan, results: Sequence[TrialResult], url: str) -> dict[str, Any]:
    """Write every trial to the lasting record by itself, then read them as the next search does."""
    database = Record(url)
    if database.searches(brief=True):
        sys.exit(f"record_latency: {database.where} is not empty")
    written, read = Times([], []), Times([], [])
    search = described(plan, Identity(id="latency", started="2026-01-01T00:00:00+00:00"), "/runs/latency")
    for result in results:
        trial = RecordedTrial.of(result, "2026-01-01T00:00:00+00:00")
        written.measure(lambda trial=trial: database.write(search, [trial]))
    for _ in range(5):
        found = read.measure(lambda: database.searches(key=search.key, latest=20))
        assert sum(len(kept.trials) for kept in found) == len(results)
    database.forget([search])
    return {"write": written.figures(), "read_all": read.figures()}


def cases(folder: Path) -> Iterator[tuple[str, str]]:
    """Yield what a database is called and its URL: SQLite in a folder, and the user's own."""
    yield "sqlite", f"sqlite:///{folder / 'record.db'}"
    url = os.environ.get(VARIABLE, "")
    if url and url != "off":
        yield url.partition(":")[0], url


def main() -> None:
    """Measure what the command line asks for."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--trials", type=int, default=1000, help="default: %(default)s")
    parser.add_argument("--out", type=Path, help="JSON file for the result (default: under benchmarks/results)")
    options = parser.parse_args()
    table = load_table(TABLE)
    plan = plan_of(table)
    results = results_of(table, plan, options.trials)
    figures: dict[str, Any] = {"record": {}}
    try:
        with tempfile.TemporaryDirectory() as scratch:
            for name, url in cases(Path(scratch)):
                figures["record"][name] = record_figures(plan, results, url)
                show("record", name, figures["record"][name])
    except AutotuneError as error:
        sys.exit(f"record_latency: {error}")
    hardware = detect("cpu")
    document = {**provenance(hardware), "trials": options.trials, "figures": figures}
    write_text(json.dumps(document, indent=1) + "\n", options.out or results_path("record-latency.json", hardware))
    print(json.dumps(figures))


def show(what: str, where: str, figures: dict[str, Any]) -> None:
    """Print a line for each call."""
    for call, row in figures.items():
        first, last, longest = (row[f"{name}_ms"] for name in ("median_of_first", "median_of_last", "longest"))
        times = f"{first:8.1f} ms at first, {last:8.1f} at last, {longest:8.1f} at most"
        print(f"{what:7} {where:12} {call:13} {times}", flush=True)


if __name__ == "__main__":
    main()
