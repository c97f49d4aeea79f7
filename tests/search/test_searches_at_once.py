"""Whole searches with real trials at two places, stopped, killed and gone on with: `pytest -m slow`."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import autotune
from autotune.execution.processes import marked
from autotune.tuning_result import load

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores"),
]

OPTIONS = ("--device", "cpu", "--seq-len", "32", "--effort", "quick", "--max-trials", "4", "--workers", "2")


def results(run: Path) -> dict[int, dict]:
    return {int(p.parent.name): json.loads(p.read_text()) for p in sorted(run.glob("trials/*/result.json"))}


def left(run: Path) -> list[int]:
    marks = [json.loads(p.read_text())["mark"] for p in run.glob("processes*.json")]
    return [pid for mark in marks for pid in marked(mark)]


def test_trials_run_at_two_places_and_finals_at_one(tiny_llama, tmp_path):
    run = tmp_path / "run"
    result = autotune.find(
        str(tiny_llama), device="cpu", seq_len=32, effort="quick", max_trials=4, max_time="10m", workers=2, run_dir=run
    )
    trials = results(run).values()
    searched = {r["place"] for r in trials if r["request"]["purpose"] in ("baseline", "search")}
    finals = {r["place"] for r in trials if r["request"]["purpose"] == "final"}
    assert len(searched) == 2
    assert len(finals) == 1
    assert result.hardware.cores == len(os.sched_getaffinity(0)) // 2
    assert any("2 trials at a time" in note for note in result.notes)
    assert result.best.confirmed
    assert left(run) == []


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 130), (signal.SIGKILL, -signal.SIGKILL)])
def test_a_search_that_is_ended_leaves_nothing_running_and_goes_on(autotune, tiny_llama, tmp_path, number, code):
    run = tmp_path / "run"
    arguments = [sys.executable, "-m", "autotune", "find", "--model", str(tiny_llama), *OPTIONS, "--run-dir", str(run)]
    search = subprocess.Popen([*arguments, "--max-time", "10m"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    while not results(run) and search.poll() is None:
        time.sleep(0.2)
    search.send_signal(number)
    assert search.wait() == code
    while left(run):
        time.sleep(0.2)
    before = results(run)
    done = autotune("resume", run, timeout=600)
    assert done.returncode == 0, done.stderr
    after = results(run)
    assert {n: after[n] for n in before} == before
    assert load(run / "best-config.json").best.confirmed
