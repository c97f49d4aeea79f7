"""Sees a loss that became NaN or infinite, which the Trainer's filter leaves out of what it logs.

Nothing waits for the device before training is over. Called by the worker.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def watch_losses(trainer: Any) -> Callable[[], float]:
    """Add up what `trainer.training_step` returns from now on; return what reads the sum, NaN or Inf if one loss was.

    The sum stays on the device, in fp32, which the losses of no trial leave.
    """
    original, total = trainer.training_step, [0.0]

    def training_step(*args: Any, **kwargs: Any) -> Any:
        loss = original(*args, **kwargs)
        total[0] += loss.float()
        return loss

    trainer.training_step = training_step
    return lambda: float(total[0])
