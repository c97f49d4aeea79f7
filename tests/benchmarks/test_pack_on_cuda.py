"""Parts of the GPU pack on a CUDA device, or the stand-in for one: every check that can be judged there passes."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"

pytestmark = [pytest.mark.cuda, pytest.mark.timeout(900)]

PARTS = "visible,checkpointing,savers,adapters,vision,sharing,losses,calibrate"


def test_parts_pass_what_can_be_judged(tmp_path):
    out = tmp_path / "out"
    command = [BENCHMARKS / "gpu_pack.py", "--parts", PARTS, "--deadline", "1800", "--out", out]
    done = subprocess.run(
        [sys.executable, *map(str, command)],
        capture_output=True,
        text=True,
        timeout=850,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(BENCHMARKS.parent), *sys.path])},
    )
    summary = json.loads((out / "summary.json").read_text())
    assert [c for c in summary["checks"] if c["judged"] and not c["passed"]] == [], done.stderr
    assert done.returncode == 0
    assert list(summary["parts"]) == PARTS.split(",")
