"""The GPU pack as a whole, on the CPU with tiny models: the parts that a CPU can run, files and checks."""

import json
import os
import signal
import subprocess
import sys
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


def test_a_pack_passes_its_checks_and_keeps_all_that_it_found(pack):
    done, out, summary = pack
    assert [c for c in summary["checks"] if c["judged"] and not c["passed"]] == [], done.stdout
    assert (done.returncode, summary["finished"], summary["made_on"]) == (0, True, "a CPU")
    assert any("out of memory" in line for line in summary["parts"]["tiny-170mib"]["trials"])
    for name in ("tiny", "tiny-170mib"):
        assert autotune.load(out / f"{name}.json").verdict == summary["parts"][name]["verdict"]
    full = [line for line in lines_of(out) if "trial" in line]
    for name, part in summary["parts"].items():
        assert len([line for line in full if line["part"] == name]) == len(part.get("trials", ())), name
    assert summary["parts"]["export"]["rounds"][0]["exported"] > 0
    passed_over = {name: part["passed_over"] for name, part in summary["parts"].items() if "passed_over" in part}
    assert set(passed_over) == {"visible", "overflow", "liger", "compile", "tf32", "sharing", "calibrate"}
    assert passed_over["compile"] == "needs a CUDA device"


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
