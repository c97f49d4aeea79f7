"""Programs that measure autotune: each starts, the predictor predicts a published row, and the GPU pack runs whole.

The pack runs on the CPU with tiny models, and in parts on a CUDA device or the stand-in for one.
"""

import json
import signal
import subprocess
from pathlib import Path

import pytest
from running import process, python

import autotune

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
PROGRAMS = sorted(path.name for path in BENCHMARKS.glob("*.py") if "__main__" in path.read_text())
ON_CPU = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}


def test_every_program_starts_and_the_optimizer_of_every_published_row_is_modelled():
    code = f"""
import runpy, sys
sys.path.insert(0, {str(BENCHMARKS)!r})
for name in {PROGRAMS}:
    runpy.run_path(f"{BENCHMARKS}/{{name}}", run_name=name)
from autotune.cost.optimizers import OPTIMIZERS
from predictor import ROWS
from published.rows import load_rows
from published.setups import _optimizer
found = {{_optimizer(row, version) for row in load_rows(ROWS) for version in ((1, 7), (2, 4))}}
assert len(found) >= 5 and found <= OPTIMIZERS.keys(), found
"""
    done = python("-c", code)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_a_published_peak_is_predicted(tmp_path):
    row = next(r for r in (BENCHMARKS / "ground_truth.jsonl").read_text().splitlines() if "fms_acceleration-035" in r)
    (tmp_path / "rows.jsonl").write_text(row + "\n")
    done = python(BENCHMARKS / "predictor.py", "--rows", tmp_path / "rows.jsonl", "--no-save")
    assert done.returncode == 0, done.stderr
    assert '"predicted": 1' in done.stdout.splitlines()[-1]


def pack(*arguments: object) -> list[object]:
    return [BENCHMARKS / "gpu_pack.py", *arguments]


CPU = ("--device", "cpu", "--models", "tiny", "--deadline", "2400")


def lines_of(directory: Path) -> list[dict]:
    return [json.loads(line) for line in (directory / "pack.jsonl").read_text().splitlines()]


def passed(done: subprocess.CompletedProcess[str], out: Path) -> dict:
    """Return the summary of a pack that has passed all that could be judged."""
    summary = json.loads((out / "summary.json").read_text())
    assert [c for c in summary["checks"] if c["judged"] and not c["passed"]] == [], done.stdout + done.stderr
    assert done.returncode == 0
    return summary


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_pack_passes_its_checks_and_keeps_all_that_it_found(tmp_path):
    out = tmp_path / "out"
    summary = passed(python(*pack(*CPU, "--out", out), timeout=850, **ON_CPU), out)
    assert (summary["finished"], summary["made_on"]) == (True, "a CPU")
    assert any("out of memory" in line for line in summary["parts"]["tiny-170mib"]["trials"])
    for name in ("tiny", "tiny-170mib"):
        assert autotune.load(out / f"{name}.json").verdict == summary["parts"][name]["verdict"]
    full = [line for line in lines_of(out) if "trial" in line]
    for name, part in summary["parts"].items():
        assert len([line for line in full if line["part"] == name]) == len(part.get("trials", ())), name
    assert summary["parts"]["export"]["rounds"][0]["exported"] > 0
    passed_over = {name: part["passed_over"] for name, part in summary["parts"].items() if "passed_over" in part}
    assert set(passed_over) == {"visible", "overflow", "liger", "compile", "tf32", "sharing"}
    assert passed_over["compile"] == "needs a CUDA device"


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_killed_pack_has_lost_nothing_but_its_last_trial(tmp_path):
    command = pack(*CPU, "--parts", "launcher,optimizers", "--out", tmp_path)
    begun = subprocess.Popen(**process(*command, **ON_CPU), stdout=subprocess.PIPE)
    while "optimizers: adamw_torch: completed" not in (told := begun.stdout.readline()):
        assert told, "the pack ended before it was killed"
    begun.send_signal(signal.SIGKILL)
    begun.communicate()
    checks = [line["check"] for line in lines_of(tmp_path) if "check" in line]
    assert [c["name"] for c in checks[:2]] == ["trials are forked from one process", "optimizers: adamw_torch"]
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["finished"] is False
    assert summary["parts"]["optimizers"]["trials"]


@pytest.mark.cuda
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "parts", ["visible,vision,sharing", pytest.param("checkpointing,savers,adapters,losses", marks=pytest.mark.slow)]
)
def test_parts_of_a_pack_pass_on_a_cuda_device(tmp_path, parts):
    done = python(*pack("--parts", parts, "--deadline", "1800", "--out", tmp_path / "out"), timeout=850)
    assert list(passed(done, tmp_path / "out")["parts"]) == parts.split(",")
