"""Searches of benchmarks: by the command line, with what is kept of an answer, or as a plan whose trials they run."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from autotune.api import planned, subject_of
from autotune.planning.options import SearchOptions, options_of
from autotune.planning.plan import SearchPlan
from autotune.search.run import Backend, backend_of
from autotune.storage.run_directory import RunDirectory
from autotune.tuning_result import TuningResult, load
from autotune.values.problem import Observer
from autotune.values.time_spent import Stopwatch


@contextlib.contextmanager
def planned_search(
    options: Mapping[str, Any], observer: Observer, script: Sequence[str] | None = None
) -> Iterator[tuple[SearchPlan, Backend, Path, Stopwatch]]:
    """Yield the plan of a search by these options, what runs its trials, its folder, and the watch of its time."""
    subject, watch = subject_of(options_of(SearchOptions, options), script=script), Stopwatch("planning")
    with (
        tempfile.TemporaryDirectory() as scratch,
        RunDirectory.create(Path(scratch) / "run") as directory,
        backend_of(subject.options.fleet, directory.path, device=subject.options.device) as backend,
    ):
        yield planned(subject, directory, backend, observer, watch), backend, directory.path, watch


def find(
    arguments: Sequence[str], scratch: Path, environment: Mapping[str, str] = os.environ
) -> tuple[dict[str, Any], TuningResult | None]:
    """Run `autotune find` in a process of its own, in `scratch/run` and with an empty record.

    Returns what it told, and its answer; None: it ended with an error.
    """
    run, own = scratch / "run", {**environment, "AUTOTUNE_HOME": str(scratch / "home")}
    command = [sys.executable, "-m", "autotune", "find", *arguments, "--run-dir", str(run)]
    done = subprocess.run(command, env=own, capture_output=True, text=True)
    if done.returncode:
        return {"exit_code": done.returncode, "error": done.stderr[-500:]}, None
    result = load(run / "best-config.json")
    told = {
        "verdict": result.verdict,
        "changes": {change.knob: change.after for change in result.best.changes},
        "speedup": result.speedup.model_dump() if result.speedup else None,
        "trials": sum(trial.number is not None for trial in result.trials),
        "search_time_s": result.search_time_s,
        "spent": result.spent.parts if result.spent else {},
        "disturbances": result.disturbances,
        "progress": done.stderr.splitlines(),
    }
    return told, result
