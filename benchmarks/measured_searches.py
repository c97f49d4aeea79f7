"""Searches by the command line whose answers benchmarks look at, and what they keep of an answer."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from autotune.tuning_result import TuningResult, load


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
