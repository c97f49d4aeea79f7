"""When a trial ends measuring; a loss that is no number is seen, whatever the Trainer's filter makes of it."""

import json
import math
import os
import time
from types import SimpleNamespace

import pytest
import torch
from factories import make_limits, make_request
from torch import nn
from transformers import Trainer, TrainingArguments

from autotune.execution.job import PROCESS_FILE
from autotune.execution.trial import Trial, watch_losses
from autotune.values.budget import LossTask
from autotune.values.time_spent import Stopwatch

GUARD = SimpleNamespace(relax=None, step_ended=None, retries=None)


class Scripted(nn.Module):
    """Each forward pass gives the next of `losses`."""

    def __init__(self, losses: list[float]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))
        self._losses = iter(losses)

    def forward(self, x):
        return {"loss": self.weight * 0 + next(self._losses)}


def trained(losses, tmp_path):
    arguments = TrainingArguments(
        str(tmp_path),
        use_cpu=True,
        max_steps=len(losses),
        per_device_train_batch_size=1,
        report_to="none",
        save_strategy="no",
        disable_tqdm=True,
        dataloader_pin_memory=False,
    )
    trainer = Trainer(Scripted(losses), arguments, train_dataset=[{"x": torch.zeros(1)}] * len(losses))
    total = watch_losses(trainer)
    return trainer.train().training_loss, total()


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_single_loss_that_is_no_number_is_seen_though_the_trainer_hides_it(bad, tmp_path):
    told, total = trained([2.0, bad, 2.0], tmp_path)
    assert math.isfinite(told)
    assert not math.isfinite(total)


@pytest.mark.parametrize("importing_s", [None, 0.0, 20.0])
def test_measuring_ends_before_the_process_is_killed_however_long_it_has_imported(importing_s, tmp_path):
    stopwatch = Stopwatch("prepare_s")
    if importing_s is not None:
        (tmp_path / PROCESS_FILE).write_text(json.dumps({"at": time.monotonic() - importing_s}))
        os.utime(tmp_path / PROCESS_FILE, (0, 0))  # the clock of files was set meanwhile
    trial = Trial.begun(
        make_request(accumulation_steps=2, limits=make_limits(timeout_s=60.0)), tmp_path, stopwatch, GUARD
    )
    assert trial.timer.ends_at == pytest.approx(stopwatch.started_at + 58.0 - (importing_s or 0.0), abs=1.0)


def test_a_check_runs_all_its_steps_or_fails(tmp_path):
    request = make_request(accumulation_steps=2, task=LossTask(steps=20, pass_steps=4, seed=0))
    assert Trial.begun(request, tmp_path, Stopwatch("prepare_s"), GUARD).timer.ends_at == math.inf
