"""What `.ci/fake-cuda` does where it can't make its environment, and what its driver says of processes."""

import os
import re
import subprocess
from pathlib import Path

import pytest
from running import process, python

# They take seconds, and run with what they guard.
pytestmark = pytest.mark.cuda

SCRIPT = Path(__file__).parents[2] / ".ci" / "fake-cuda"
NOTHING_TO_HAVE = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": "", "PIP_CONFIG_FILE": os.devnull}


def run(**environment: str) -> subprocess.CompletedProcess[str]:
    own = {name: value for name, value in os.environ.items() if name != "AUTOTUNE_FAKE_CUDA"}
    return subprocess.run(
        ["bash", SCRIPT], env={**own, **NOTHING_TO_HAVE, **environment}, capture_output=True, text=True, timeout=200
    )


@pytest.mark.skipif(not SCRIPT.exists(), reason="not in an sdist")
def test_without_a_cuda_build_of_torch_it_is_passed_over(tmp_path):
    done = run(TMPDIR=str(tmp_path))
    assert done.returncode == 0, done.stderr
    (line,) = done.stdout.splitlines()
    assert line.startswith(".ci/fake-cuda: passed over")
    assert "No matching distribution found for torch" in line
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(not SCRIPT.exists(), reason="not in an sdist")
def test_any_other_failure_is_one(tmp_path):
    (tmp_path / "environment").write_text("in the way")
    assert run(AUTOTUNE_FAKE_CUDA=str(tmp_path / "environment")).returncode != 0


def test_torch_names_the_processes_that_hold_memory():
    hold = process("-c", "import torch; held = torch.zeros(1 << 20, device='cuda'); print(flush=True); input()")
    with subprocess.Popen(**hold, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        other.stdout.readline()
        said = python(
            "-c", "import torch; torch.zeros(1 << 20, device='cuda'); torch.zeros(1 << 44, device='cuda')"
        ).stderr
        other.communicate("\n")
    assert str(other.pid) in (named := re.findall(r"Process (\d+) has", said)), said
    assert all(Path(f"/proc/{pid}").exists() or pid == str(other.pid) for pid in named), said
