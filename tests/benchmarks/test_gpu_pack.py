"""The GPU pack as a whole, on the CPU with tiny models: the parts that a CPU can run, files and checks."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import autotune

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]  # searches of its own

TIMEOUT_S = 850
CPU = ("--device", "cpu", "--models", "tiny", "--deadline", "2400")


def pack_command(*arguments):
    return [sys.executable, str(BENCHMARKS / "gpu_pack.py"), *map(str, arguments)]


def environment():
    path = os.pathsep.join([str(BENCHMARKS.parent), *sys.path])
    return {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}


def run_pack(*arguments):
    command = pack_command(*arguments)
    return subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, env=environment())


def lines_of(directory):
    return [json.loads(line) for line in (directory / "pack.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def pack(tmp_path_factory):
    """One whole pack: its exit code and its directory."""
    out = tmp_path_factory.mktemp("pack") / "out"
    done = run_pack(*CPU, "--out", out)
    return done, out, json.loads((out / "summary.json").read_text())


def test_a_pack_passes_its_checks(pack):
    done, _, summary = pack
    assert [c for c in summary["checks"] if c["judged"] and not c["passed"]] == [], done.stdout
    assert done.returncode == 0
    assert summary["finished"]


def test_a_pack_makes_trials_run_out_of_memory(pack):
    _, _, summary = pack
    assert any("out of memory" in line for line in summary["parts"]["tiny-170mib"]["trials"])


def test_each_search_of_a_pack_leaves_an_answer(pack):
    _, out, summary = pack
    for name in ("tiny", "tiny-170mib"):
        assert autotune.load(out / f"{name}.json").verdict == summary["parts"][name]["verdict"]


def test_each_trial_of_a_pack_is_a_line_and_a_record(pack):
    _, out, summary = pack
    full = [line for line in lines_of(out) if "trial" in line]
    for name, part in summary["parts"].items():
        assert len([line for line in full if line["part"] == name]) == len(part.get("trials", ())), name
    assert len(full) > 20


def test_a_pack_says_where_it_ran_and_how(pack):
    _, out, summary = pack
    assert summary["hardware"]["versions"]["torch"]
    assert summary["made_on"] == lines_of(out)[0]["made_on"] == "a CPU"
    assert summary["parts"]["launcher"]["launcher"]["forkable"] is True
    assert summary["parts"]["export"]["rounds"][0]["exported"] > 0


def test_what_needs_a_gpu_is_passed_over_on_a_cpu_and_said(pack):
    _, _, summary = pack
    passed_over = {name: part["passed_over"] for name, part in summary["parts"].items() if "passed_over" in part}
    assert set(passed_over) == {"visible", "overflow", "liger", "compile", "tf32", "sharing", "calibrate"}
    assert passed_over["compile"] == "needs a CUDA device"


def test_one_part_stands_alone(tmp_path):
    done = run_pack(*CPU, "--parts", "vision,losses", "--out", tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert list(summary["parts"]) == ["vision", "losses"]


def test_an_export_alone_searches_for_its_answer(tmp_path):
    done = run_pack(*CPU, "--parts", "export", "--out", tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "tiny.json").exists()


def test_a_killed_pack_has_lost_nothing_but_its_last_trial(tmp_path):
    command = pack_command(*CPU, "--parts", "launcher,optimizers", "--out", tmp_path)
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment())
    assert process.stdout is not None
    told = ""
    while "optimizers: adamw_torch: completed" not in told:
        told = process.stdout.readline()
        assert told, "the pack ended before it was killed"
    process.send_signal(signal.SIGKILL)
    process.communicate()
    checks = [line["check"] for line in lines_of(tmp_path) if "check" in line]
    assert [c["name"] for c in checks[:2]] == ["trials are forked from one process", "optimizers: adamw_torch"]
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["finished"] is False
    assert summary["parts"]["optimizers"]["trials"]


def test_an_interrupted_pack_says_so(tmp_path):
    command = pack_command(*CPU, "--parts", "optimizers", "--out", tmp_path)
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment())
    assert process.stdout is not None
    while "optimizers" not in process.stdout.readline():
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 130
    checks = json.loads((tmp_path / "summary.json").read_text())["checks"]
    assert checks[-1]["detail"].startswith("interrupted")
