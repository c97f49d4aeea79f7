"""An answer for two devices trains under torchrun what was measured: `pytest -m slow`."""

import pytest
from export_throughput import compare

import autotune
from autotune.values.config import Parallelism
from autotune.values.hardware import detect

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def test_the_command_of_the_answer_trains_what_was_measured(tiny_llama, tmp_path):
    limits = {"space": "cpu", "seq_len": 64, "effort": "quick", "max_trials": 2}
    result = autotune.find(str(tiny_llama), devices=2, device="cpu", run_dir=tmp_path / "run", **limits)
    path = tmp_path / "run" / "best-config.json"
    assert result.best.config.parallelism == result.baseline.config.parallelism == Parallelism(world_size=2)
    (only,) = compare(path, detect("cpu"), count=1, seconds=2)
    print(only)
    # Two launchers of the same processes, on a machine that may be busy: the order of magnitude, and no copy idle.
    assert 0.3 < only.ratio < 3
