"""Every program that measures autotune starts, and the predictor predicts a published row."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
PROGRAMS = sorted(path.name for path in BENCHMARKS.glob("*.py") if "__main__" in path.read_text())
ENVIRONMENT = {**os.environ, "PYTHONPATH": os.pathsep.join([str(BENCHMARKS.parent), *sys.path])}


def run(*words: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *map(str, words)]
    return subprocess.run(command, cwd=BENCHMARKS.parent, capture_output=True, text=True, timeout=300, env=ENVIRONMENT)


def test_every_program_starts():
    code = f"import runpy, sys\nfor name in {PROGRAMS}:\n    runpy.run_path(f'{BENCHMARKS}/{{name}}', run_name=name)"
    done = run("-c", f"import sys; sys.path.insert(0, {str(BENCHMARKS)!r})\n{code}")
    assert done.returncode == 0, done.stderr


def test_the_optimizer_of_every_published_row_is_modelled():
    code = """
from autotune.cost.optimizers import OPTIMIZERS
from predictor import ROWS
from published.rows import load_rows
from published.setups import _optimizer
found = {_optimizer(row, version) for row in load_rows(ROWS) for version in ((1, 7), (2, 4))}
assert len(found) >= 5 and found <= OPTIMIZERS.keys(), found
"""
    done = run("-c", f"import sys; sys.path.insert(0, {str(BENCHMARKS)!r})\n{code}")
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_a_published_peak_is_predicted(tmp_path):
    row = next(r for r in (BENCHMARKS / "ground_truth.jsonl").read_text().splitlines() if "fms_acceleration-035" in r)
    (tmp_path / "rows.jsonl").write_text(row + "\n")
    done = run(BENCHMARKS / "predictor.py", "--rows", tmp_path / "rows.jsonl", "--no-save")
    assert done.returncode == 0, done.stderr
    assert '"predicted": 1' in done.stdout.splitlines()[-1]
