"""A whole search that is given more: real trials on the CPU, from the command line."""

import json

import pytest

from autotune.tuning_result import load

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

SPACE = """
description: micro-batches and two kernels
parameters:
  per_device_train_batch_size: {choices: lattice}
  attn_implementation: {choices: [sdpa, eager]}
"""


def test_a_search_that_was_over_goes_on_within_limits_that_it_keeps(autotune, tiny_llama, tmp_path):
    (tmp_path / "space.yaml").write_text(SPACE)
    run, answer = tmp_path / "run", tmp_path / "answer.json"
    options = ("--effort", "quick", "--device", "cpu", "--seq-len", 32, "--global-batch", 4, "--space", "space.yaml")
    first = autotune("find", "--model", tiny_llama, *options, "--max-trials", 1, "--run-dir", run, "-o", answer)
    assert first.returncode == 0
    trials = len(load(answer).trials)
    answer.unlink()
    more = autotune("resume", run, "--max-trials", 3, "--max-time", "15m")
    assert more.returncode == 0
    assert "the limits are 15 min and 3 trials now; " in more.stderr
    assert "1 trial are spent" in more.stderr
    assert f"written: {answer}" in more.stdout
    plan = json.loads((run / "search.json").read_text())
    assert (plan["budget"]["max_trials"], plan["budget"]["max_time_s"]) == (3, 900)
    assert len(load(answer).trials) > trials
    assert sum(trial.purpose == "search" for trial in load(answer).trials) <= 3
    again = autotune("resume", run)
    assert "no trial was run: the search is over" in again.stderr
