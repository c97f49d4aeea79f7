"""Carries out a check in a trial's process: a soak (evaluation and saving beside training) or a loss run.

A soak stays under the trial's memory budget throughout; what it writes lies in the trial's directory, and the runner
removes it.
"""

from __future__ import annotations

import shutil
import statistics
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.utils.data import IterableDataset
from transformers import TrainerCallback

from autotune.execution.evaluating import CheckError, EvaluationData, evaluated
from autotune.execution.failures import first_line
from autotune.execution.gradients import is_random, randomness_off
from autotune.execution.guard import MemoryGuard
from autotune.execution.ranks import agree, own_rank, wait_for_all
from autotune.units import show_memory
from autotune.values.budget import CheckTask, LossCurve, LossTask, Soaked, SoakTask
from autotune.values.config import TrainConfig
from autotune.values.trial import TrialRequest

# Draws of dropout whose spread is looked at.
_DRAWS = 8

# Disk that a checkpoint must leave free: the rest of the search writes some, and a full disk ends more than a trial.
_SPARE_DISK_BYTES = 512 << 20


class Reading(NamedTuple):
    """How a trial reads its samples."""

    evaluation: EvaluationData | None  # None: there is nothing to evaluate on
    padding_share: Callable[[int], float | None] = lambda steps: None  # of so many steps; None: unknown
    not_saved: str | None = None  # why a soak saves no checkpoint
    not_evaluated: str | None = None  # why there is nothing to evaluate on, if the user can't know


def arguments_of(task: CheckTask | None) -> dict[str, Any]:
    """Return what a check adds to the Trainer's arguments: a loss run logs each step."""
    if not isinstance(task, LossTask):
        return {}
    return {"max_steps": task.steps, "seed": task.seed, "logging_strategy": "steps", "logging_steps": 1}


def distinct_samples(request: TrialRequest, samples: int) -> tuple[int, TrainConfig]:
    """Return how many of a trial's `samples` are different ones, and the configuration that says their order.

    A loss run reads the same few again and again, in the same order whatever sampler is tried.
    """
    if not isinstance(request.task, LossTask):
        return samples, request.config
    own = request.task.pass_steps * request.workload.samples_per_step(request.config)
    return min(samples, own), request.config.model_copy(update={"train_sampling_strategy": "random"})


@contextmanager
def around_training(task: CheckTask | None, trainer: Any, *, not_saved: str | None = None) -> Iterator[dict[str, Any]]:
    """Train inside this: without randomness for a loss run, with a checkpoint at the end for a soak.

    Yields what is added to the measurement, complete when training has ended. `not_saved` says why a soak saves none.

    Raises:
        CheckError: Saving failed.
    """
    found: dict[str, Any] = {}
    if isinstance(task, LossTask):
        with randomness_off(trainer.model):
            yield found
    elif isinstance(task, SoakTask):
        saver = CheckpointSaver(trainer, not_saved=not_saved)
        trainer.add_callback(saver)
        try:
            yield found
        except Exception as error:
            if not saver.is_saving:
                raise
            raise CheckError(f"while saving a checkpoint: {first_line(error)}") from error
    else:
        yield found


def findings(task: CheckTask | None, trainer: Any, reading: Reading, guard: MemoryGuard) -> dict[str, Any]:
    """Return what a check adds to the measurement of the training that has ended.

    Args:
        task: The check.
        trainer: After `train`.
        reading: Says what there is to evaluate on.
        guard: Reads the peak of memory, and holds it against the budget.

    Raises:
        CheckError: Evaluation failed.
    """
    if isinstance(task, LossTask):
        return {"curve": _curve(task, trainer)}
    if isinstance(task, SoakTask):
        saver = trainer.pop_callback(CheckpointSaver)
        found: dict[str, Any] = {"eval_batch_size": None, "not_evaluated": reading.not_evaluated}
        if reading.evaluation is not None:
            found = evaluated(task.eval_batch_sizes, trainer, reading.evaluation, guard)
        memory = guard.peak()
        peak = memory.peak_bytes if memory.is_known else None
        soaked = Soaked(**found, checkpoint_bytes=saver.bytes, not_saved=saver.not_saved, peak_bytes=peak)
        return {"soaked": soaked, "memory": memory}
    return {}


class CheckpointSaver(TrainerCallback):  # type: ignore[misc]  # transformers is untyped
    """Has the Trainer save a checkpoint after the last step, if the disk has room for it."""

    def __init__(self, trainer: Any, *, not_saved: str | None = None) -> None:
        self._trainer = trainer
        self.is_saving = False
        self.bytes: int | None = None
        self.not_saved = not_saved

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Ask for a checkpoint when training is about to stop."""
        if not control.should_training_stop or self.is_saving or self.not_saved is not None:
            return
        needed = _checkpoint_bytes(self._trainer)
        free = shutil.disk_usage(Path(args.output_dir).parent).free
        if not agree(free >= needed + _SPARE_DISK_BYTES):
            self.not_saved = (
                f"no checkpoint was saved: it takes {show_memory(needed)}, and {show_memory(free)} of disk are free"
            )
            return
        self.is_saving = control.should_save = True

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Look at what was written, when all ranks have written their part."""
        wait_for_all()
        self.is_saving = False
        if own_rank().is_first:
            folder = Path(args.output_dir) / f"checkpoint-{state.global_step}"
            self.bytes = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
            shutil.rmtree(folder, ignore_errors=True)


def _checkpoint_bytes(trainer: Any) -> int:
    """Return what weights and optimizer states take; peft saves the adapter's weights alone."""
    optimizer = getattr(trainer.optimizer, "optimizer", trainer.optimizer)
    states = [value for state in getattr(optimizer, "state", {}).values() for value in _values(state)]
    trained = [p for p in trainer.model.parameters() if p.requires_grad]
    weights = trained if hasattr(trainer.model, "peft_config") else _values(trainer.model.state_dict())
    tensors = (t for t in (*weights, *states) if isinstance(t, torch.Tensor))
    return sum(t.numel() * t.element_size() for t in tensors)


def _values(mapping: Any) -> list[Any]:
    return list(mapping.values()) if isinstance(mapping, dict) else []


def _curve(task: LossTask, trainer: Any) -> LossCurve:
    """Return the loss of each step, which the Trainer logs as the mean over the step's accumulation."""
    losses = tuple(float(entry["loss"]) for entry in trainer.state.log_history if "loss" in entry)
    if len(losses) != task.steps:
        raise CheckError(f"{len(losses)} losses were logged in {task.steps} steps")
    return LossCurve(losses=losses, dropout_spread=_dropout_spread(task, trainer))


def _dropout_spread(task: LossTask, trainer: Any) -> float | None:
    """Return how far dropout spreads the loss of the first step's samples; None if compiled, which would start again.

    Drawn with one seed after the other; the samples are the same whatever the micro-batch, and for every rank.
    """
    if hasattr(trainer.model_wrapped, "_orig_mod"):
        return None
    if not is_random(trainer.model):
        return 0.0
    if isinstance(trainer.train_dataset, IterableDataset):  # whose first samples are gone
        return None
    trainer.model.train()
    batches = _first_step(trainer)
    draws = []
    for draw in range(_DRAWS):
        torch.manual_seed(task.seed * _DRAWS + draw)
        with torch.no_grad(), trainer.compute_loss_context_manager():
            losses = (trainer.compute_loss(trainer.model_wrapped, dict(batch)) for batch in batches)
            draws.append(statistics.fmean(map(float, losses)))
    return statistics.stdev(draws)


def _first_step(trainer: Any) -> list[dict[str, Any]]:
    """Return the micro-batches of the first step on the device, those of all ranks."""
    args, data = trainer.args, trainer.train_dataset
    size = args.per_device_train_batch_size
    starts = range(0, size * args.gradient_accumulation_steps * own_rank().of, size)
    collate = trainer._get_collator_with_removed_columns(trainer.data_collator)
    made = (collate([data[i] for i in range(start, start + size)]) for start in starts)
    return [trainer._prepare_inputs(batch) for batch in made]
