"""A loss that is no number is seen, whatever the Trainer's filter makes of it in what it logs."""

import math

import pytest
import torch
from torch import nn
from transformers import Trainer, TrainingArguments

from autotune.execution.trial import watch_losses


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


def test_losses_that_are_numbers_are_added_up(tmp_path):
    told, total = trained([2.0, 4.0], tmp_path)
    assert (told, total) == (3.0, 6.0)
