"""One optimizer step gives the same loss and gradients whether one process takes it or two ranks share it.

Their samples differ in length, so that the ranks' shares of the labels do: a mean of the ranks' means would be wrong.
"""

from __future__ import annotations

import json

import pytest
import torch
from optimizer_steps import MODELS, assert_same_step, build, reference
from rank_losses import CASES_FILE, STEPS_FILE

from autotune.execution.job import Job

pytestmark = pytest.mark.slow

CASES = [(name, accumulation) for name in MODELS for accumulation in (1, 4)]


@pytest.fixture(scope="module")
def steps(bench):
    """Loss and gradients of two ranks, by model and accumulation."""
    directory = bench.run_directory / "losses"
    directory.mkdir()
    (directory / CASES_FILE).write_text(json.dumps(CASES))
    launcher = bench.runner.start()
    launcher.send(Job(place=0, directories=(directory,), entry="rank_losses:take_steps", timeout_s=200, ranks=2))
    assert launcher.reply(300)["returncodes"] == [0, 0], (directory / "log.txt").read_text()
    return torch.load(directory / STEPS_FILE)


@pytest.mark.parametrize(("name", "accumulation"), CASES)
def test_two_ranks_take_the_step_of_one_process(steps, name, accumulation):
    assert_same_step(steps[name, accumulation], reference(build(name), name))
