"""Says where the seconds of a search go, and holds them against two targets.

    python benchmarks/overhead.py -- --model distilbert-base-uncased --seq-len 64 --effort quick

Runs a real search and reads what it recorded: start-up of the command line, planning, importing the libraries (once,
in the launcher), describing and tracing the model; of each trial its process, model, data, Trainer, first step,
warm-up, measured steps and end; and what lies between trials. The targets: a trial after the first takes at most 1 s
beside its steps (models under 100M parameters), and at most 15 % of a search lie outside of steps and checks.

The last line is the result as JSON.
"""

from __future__ import annotations

import argparse
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from measured_searches import find
from provenance import keep

from autotune.storage.run_directory import RunDirectory
from autotune.tuning_result import TuningResult
from autotune.values.trial import TrialResult

MOST_TRIAL_S = 1.0
MOST_SHARE = 0.15
SMALL_PARAMETERS = 100_000_000


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("arguments", nargs="*", help="of `autotune find`")
    arguments = parser.parse_args().arguments or ["--model", "distilbert-base-uncased", "--effort", "quick"]
    with tempfile.TemporaryDirectory() as scratch:
        told, result = find(arguments, Path(scratch))
        if result is None:
            sys.exit(told["error"])
        trials = RunDirectory.existing(Path(scratch, "run")).results()
    name, parameters = result.workload.model.name, result.facts.parameters
    found = {"model": name, "parameters": parameters, "command_line": command_line(), **summary(trials, result)}
    keep(f"overhead-{name}", result.hardware, found)


def command_line() -> dict[str, float]:
    """Return the seconds, wall and processor, until the command line has shown its help; the best of three."""
    found = []
    for _ in range(3):
        before, started = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
        subprocess.run([sys.executable, "-m", "autotune", "--help"], check=True, stdout=subprocess.DEVNULL)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        found.append((time.monotonic() - started, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime))
    return {"wall_s": min(wall for wall, _ in found), "processor_s": min(processor for _, processor in found)}


def summary(trials: list[TrialResult], result: TuningResult) -> dict[str, Any]:
    """Return where the time went, by trial and in all, and how the targets were met."""
    later = [trial.overhead_s for trial in trials[1:] if trial.overhead_s is not None]
    spent, typical_s = result.spent, statistics.median(later) if later else None
    shares, is_small = spent.shares() if spent else {}, result.facts.parameters <= SMALL_PARAMETERS
    outside = sum(shares.get(part, 0.0) for part in ("setting trials up", "starting the search", "between trials"))
    kept: Any = {"duration_s": True, "overhead_s": True, "request": {"number", "purpose"}, "outcome": {"phases"}}
    return {
        "spent": spent.model_dump() if spent else None,
        "shares": shares or None,
        "outside_share": outside if spent else None,
        "trial_overhead_s": typical_s,
        "targets": {
            "trial": typical_s <= MOST_TRIAL_S if typical_s is not None and is_small else None,
            "search": None if spent is None else outside <= MOST_SHARE,
        },
        "search_time_s": result.search_time_s,
        "disturbances": result.disturbances,
        "trials": [trial.model_dump(include=kept) for trial in trials],
    }


if __name__ == "__main__":
    main()
