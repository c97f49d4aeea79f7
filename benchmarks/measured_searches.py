"""Searches whose answers benchmarks look at: their options, the search itself, and what is kept of an answer."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

import autotune
from autotune.tuning_result import TuningResult

# Options of a search that the command line takes, each an argument of `autotune.find`.
OPTIONS: dict[str, dict[str, Any]] = {
    "model": {},
    "effort": {"default": "quick", "help": "default: %(default)s"},
    "device": {"default": "auto", "help": "default: %(default)s"},
    "devices": {"type": int},
    "seq-len": {"type": int},
    "global-batch": {"type": int},
    "allow": {"default": "optimizer", "help": "default: %(default)s"},
    "max-time": {},
    "max-trials": {"type": int},
}


def parser_of(description: str | None, *, usual: dict[str, str]) -> argparse.ArgumentParser:
    """Return a parser with the options of a search, whose defaults are in `usual`, and --out."""
    parser = argparse.ArgumentParser(description=(description or "").splitlines()[0])
    for name, option in OPTIONS.items():
        given = {"default": usual[name], "help": "default: %(default)s"} if name in usual else {}
        parser.add_argument(f"--{name}", **{**option, **given})
    parser.add_argument("--out", type=Path, help="file of the result (default: in benchmarks/results)")
    return parser


def find(options: argparse.Namespace, scratch: Path, **more: Any) -> TuningResult:
    """Return the answer of a search that knows nothing beforehand; `more` are further arguments of `autotune.find`."""
    os.environ["AUTOTUNE_HOME"] = str(scratch / "home")
    given = {name.replace("-", "_"): getattr(options, name.replace("-", "_")) for name in OPTIONS}
    return autotune.find(given.pop("model"), run_dir=scratch / "run", **given, **more)


def told(result: TuningResult) -> dict[str, Any]:
    return {
        "verdict": result.verdict,
        "changes": {change.knob: change.after for change in result.best.changes},
        "speedup": result.speedup.model_dump() if result.speedup else None,
        "trials": sum(trial.number is not None for trial in result.trials),
        "search_time_s": result.search_time_s,
        "disturbances": result.disturbances,
    }
