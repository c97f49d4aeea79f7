"""The export benchmark on a real answer: both sides train, and their ratio is what is written."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import autotune

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

from export_throughput import FEWEST_STEPS, MOST_STEPS, Round, steps_for, summary  # noqa: E402

pytestmark = pytest.mark.slow  # searches of its own


def test_the_ratio_is_that_of_exported_to_measured_throughput(answer, tmp_path):
    command = [answer, "--rounds", "1", "--seconds", "0.1", "--out", "ratio.json"]
    done = subprocess.run(
        [sys.executable, str(BENCHMARKS / "export_throughput.py"), *map(str, command)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=200,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(BENCHMARKS.parent), *sys.path]), "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    printed = json.loads(done.stdout.splitlines()[-1])
    assert printed == json.loads((tmp_path / "ratio.json").read_text())
    (only,) = printed["rounds"]
    assert printed["ratio"] == pytest.approx(only["exported"] / only["measured"])
    assert printed["ratio_interval"] is None  # one round says nothing about the next


@pytest.mark.timeout(900)
def test_each_exported_script_is_compared_with_the_trial(answer, tmp_path):
    scripts = ["python", "accelerate", "accelerate-loop"]
    command = [answer, "--scripts", *scripts, "--rounds", "1", "--seconds", "0.1", "--out", "ratios.json"]
    done = subprocess.run(
        [sys.executable, str(BENCHMARKS / "export_throughput.py"), *map(str, command)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=800,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(BENCHMARKS.parent), *sys.path]), "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "ratios.json").read_text())["scripts"]
    assert list(found) == scripts
    assert len({only["rounds"][0]["measured"] for only in found.values()}) == 1  # they share the round's one trial
    assert all(only["rounds"][0]["exported"] > 0 for only in found.values())


def test_rounds_that_disagree_give_a_wide_interval(answer):
    result = autotune.load(answer)
    agreeing = summary(result, [Round(1.0, 1.0), Round(1.01, 1.0), Round(0.99, 1.0)])
    disagreeing = summary(result, [Round(1.0, 1.0), Round(2.0, 1.0), Round(0.5, 1.0)])
    assert agreeing["ratio"] == pytest.approx(disagreeing["ratio"], rel=1e-3)
    assert agreeing["ratio_interval"][0] > 0.9
    assert disagreeing["ratio_interval"][0] < 0.5


def test_steps_fill_the_time_within_bounds(answer):
    result = autotune.load(answer)
    step_s = result.best.measurement.step_times_s
    mean_s = sum(step_s) / len(step_s)
    assert steps_for(result, 50 * mean_s) == 50
    assert steps_for(result, 0) == FEWEST_STEPS
    assert steps_for(result, 1e9) == MOST_STEPS
