"""Says where figures come from (date, machine, versions, command), keeps them, and sums errors up."""

from __future__ import annotations

import datetime
import json
import os
import re
import shlex
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from autotune import __version__
from autotune.value import write_text
from autotune.values.hardware import Hardware

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"


def provenance(hardware: Hardware) -> dict[str, Any]:
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": shlex.join(["python", f"benchmarks/{Path(sys.argv[0]).name}", *sys.argv[1:]]),
        "commit": _commit(),
        "autotune": __version__,
        "hardware": hardware.model_dump(mode="json"),
    }


def results_path(name: str, hardware: Hardware) -> Path:
    """Return the place of today's results of `name` on this machine: ``results/<date>-<machine>-<name>``."""
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    return RESULTS / "-".join(part for part in (today, slug(hardware.name), slug(name)) if part)


def keep(name: str, hardware: Hardware, found: dict[str, Any], path: Path | None = None) -> None:
    """Write figures and where they come from as JSON, by default into `results/`, and print them as the last line."""
    document = {**provenance(hardware), "load_average": os.getloadavg(), **found}
    path = path or results_path(f"{name}.json", hardware)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(json.dumps(document, indent=2) + "\n", path)
    print(json.dumps(document))


def error_figures(errors: Sequence[float], digits: int) -> dict[str, float]:
    """Return the signed median, median and 90th percentile of the absolute errors, and the worst."""
    ranked = sorted(errors, key=abs)
    figures = {
        "signed median": statistics.median(errors),
        "median": statistics.median(map(abs, errors)),
        "90th percentile": abs(ranked[max(0, -(-9 * len(ranked) // 10) - 1)]),
        "worst": ranked[-1],
    }
    return {name: round(figure, digits) for name, figure in figures.items()}


def slug(text: str) -> str:
    """Return `text` as part of a file's name: 'NVIDIA H200' becomes 'nvidia-h200'."""
    return re.sub(r"[^a-z0-9.]+", "-", re.sub(r"\((r|tm)\)", "", text.lower())).strip("-.")


def _commit() -> str | None:
    """Return the commit of the checkout, with a plus sign if files differ; None outside a repository."""
    command = ["git", "describe", "--always", "--dirty=+", "--abbrev=12"]
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None
