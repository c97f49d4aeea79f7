"""Whether a long search grows: memory, open files, threads, processes, shared memory and temporary files.

    python benchmarks/steady.py                        # 500 trials that are read from a table, each in a forked process
    python benchmarks/steady.py --real --trials 100    # 100 trainings of a tiny model

Every point of the tables' space is run, as often as it takes (`--exhaustive --repeat`), so that no sampler ends the
search. What is watched are the search's own process and the launcher, which forks each trial.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import psutil
from provenance import ROOT, provenance, results_path

import autotune
from autotune.execution.outcome import outcome_file
from autotune.execution.runner import LocalRunner
from autotune.value import read_value, write_text, write_value
from autotune.values.events import Event, TrialEnded
from autotune.values.hardware import detect
from autotune.values.recorded_table import load_table
from autotune.values.trial import TrialRequest

TABLES = ROOT / "benchmarks" / "tables"
POINTS = 210  # of the tables' space

# Growth that counts, from the second fifth of the trials to the last: of resident memory, and of anything counted.
MOST_BYTES, MOST_COUNT = 8 << 20, 0.5


def replayed(directory: Path) -> None:
    """Run a trial: write what the table has of its configuration."""
    request = read_value(TrialRequest, directory / "request.json")
    points = {point.config: point.trials for point in load_table(TABLES / "llama-1m.jsonl").points}
    write_value(points[request.config][0].outcome, directory / outcome_file())


def look(scratch: Path) -> dict[str, float]:
    """Return what the search and its launcher hold now; of shared memory the files, which are the whole machine's."""
    own = psutil.Process()
    found: dict[str, float] = {
        "at_s": time.monotonic(),
        "shared_memory_files": sum(entry.is_file() for entry in Path("/dev/shm").iterdir()),
        "temporary_files": sum(1 for _ in (scratch / "tmp").iterdir()),
    }
    for name, process in [("search", own), *(("launcher", child) for child in own.children()[:1])]:
        with process.oneshot():
            found |= {
                f"{name}_resident_bytes": process.memory_info().rss,
                f"{name}_files": process.num_fds(),
                f"{name}_threads": process.num_threads(),
                f"{name}_processes": len(process.children(recursive=True)),
            }
    return found


def watched(trials: int, *, real: bool) -> Iterator[dict[str, float]]:
    """Run a search of so many trials; yield what was seen after each."""
    seen: list[dict[str, float]] = []
    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder)
        (scratch / "tmp").mkdir()
        os.environ |= {"AUTOTUNE_HOME": str(scratch / "home"), "TMPDIR": str(scratch / "tmp"), "AUTOTUNE_WAIT": "off"}

        def observe(event: Event) -> None:
            if isinstance(event, TrialEnded):
                seen.append({"trial": event.result.request.number, **look(scratch)})
                print(seen[-1], file=sys.stderr)

        entry = {} if real else {"entry": "steady:replayed"}
        with patch("autotune.search.run.LocalRunner", functools.partial(LocalRunner, **entry)):
            autotune.find(
                str(TABLES / "models" / "llama-1m"),
                device="cpu",
                seq_len=32,
                global_batch=16,
                memory="50MiB" if not real else None,
                space=TABLES / "space.yaml",
                effort="quick",
                exhaustive=True,
                repeat=-(-trials // POINTS),
                max_trials=trials,
                max_time="4h",
                run_dir=scratch / "run",
                observer=observe,
            )
    yield from seen


def growth(seen: list[dict[str, float]]) -> dict[str, float]:
    """Return by how much each figure grew from the second fifth of the trials to the last: means of both."""
    fifth = max(1, len(seen) // 5)
    early, late = seen[fifth : 2 * fifth], seen[-fifth:]
    return {
        name: statistics.fmean(s[name] for s in late) - statistics.fmean(s[name] for s in early)
        for name in seen[-1]
        if name not in ("trial", "at_s")
    }


def main() -> None:
    """Run the search and write the curve."""
    options = parse_options()
    document: dict[str, Any] = provenance(detect("cpu"))
    seen = list(watched(options.trials, real=options.real))
    grown = growth(seen)
    too_much = {name: by for name, by in grown.items() if by > (MOST_BYTES if name.endswith("bytes") else MOST_COUNT)}
    kind = "real" if options.real else "replayed"
    times = [after["at_s"] - before["at_s"] for before, after in itertools.pairwise(seen)]
    fifth = max(1, len(times) // 5)
    per_trial = [statistics.median(times[start : start + fifth]) for start in range(0, 5 * fifth, fifth)]
    document |= {"trials": len(seen), "kind": kind, "growth": grown, "grows": sorted(too_much)}
    document |= {"seconds_per_trial_by_fifth": per_trial, "curve": seen[::5]}
    output = options.out or results_path(f"steady-{kind}", detect("cpu")).with_suffix(".json")
    write_text(json.dumps(document, indent=1) + "\n", output)
    print(json.dumps({"trials": len(seen), "growth": grown, "grows": sorted(too_much)}))


def parse_options() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--trials", type=int, default=500, help="default: %(default)s")
    parser.add_argument("--real", action="store_true", help="train instead of reading a table")
    parser.add_argument("--out", type=Path, help="file of the result (default: in benchmarks/results)")
    return parser.parse_args()


if __name__ == "__main__":
    main()
