"""What two ranks make of one optimizer step: an entry (`module:function`) for the launcher.

For each case it writes the loss of the global batch and the gradients that the optimizer would be given.
"""

import json
from pathlib import Path

import torch
from optimizer_steps import SAMPLES, build, one_step
from torch import distributed

from autotune.execution.environment import meet, own_rank
from autotune.training.loss import normalize_loss

CASES_FILE, STEPS_FILE = "cases.json", "steps.pt"


def take_steps(directory: Path) -> None:
    meet("cpu", timeout_s=120)
    steps = {}
    for name, accumulation in json.loads((directory / CASES_FILE).read_text()):
        micro_batch = SAMPLES // own_rank().of // accumulation
        loss, gradients = one_step(normalize_loss(build(name)), name, directory, micro_batch, accumulation)
        total = torch.tensor(loss)
        distributed.all_reduce(total)
        steps[name, accumulation] = float(total) / own_rank().of, gradients
    if own_rank().number == 0:
        torch.save(steps, directory / STEPS_FILE)
