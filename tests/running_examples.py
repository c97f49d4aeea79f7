"""Runs an example as a user would: in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def run_example(name: str, *arguments: object, cwd: Path) -> list[str]:
    """Return the lines that an example prints; a warning or an error of its own would fail it."""
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples" / name), *map(str, arguments)],
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=450,
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path]),
            "OMP_NUM_THREADS": "1",
            "HF_DATASETS_CACHE": str(cwd / "datasets"),
            "HF_HUB_OFFLINE": "1",
        },
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()
