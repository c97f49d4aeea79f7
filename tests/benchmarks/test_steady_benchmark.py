"""The benchmark of long searches: what counts as growth, and a short search that is watched."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
from steady import growth


def test_growth_is_that_from_the_second_fifth_to_the_last():
    seen = [{"trial": n, "search_files": 5 + n // 40, "search_resident_bytes": 100} for n in range(50)]
    assert growth(seen) == {"search_files": 1.0, "search_resident_bytes": 0.0}


@pytest.mark.slow
def test_a_search_is_watched(tmp_path):
    out = tmp_path / "steady.json"
    done = subprocess.run(
        [sys.executable, "benchmarks/steady.py", "--trials", "3", "--out", str(out)],
        capture_output=True,
        text=True,
        timeout=200,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(out.read_text())
    assert (found["trials"], found["kind"]) == (3, "replayed")
    assert {"search_files", "launcher_files", "launcher_resident_bytes", "temporary_files"} <= set(found["growth"])
