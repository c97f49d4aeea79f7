"""Carries out a check in a trial's process: a soak (evaluating and saving beside training) or a loss run.

A soak stays under the trial's memory budget throughout, and evaluates with the largest batch that fits. A Trainer with
`compute_metrics` keeps the predictions of its whole data set, on the device until `eval_accumulation_steps` moves them
to the host. The soak keeps as many: the Trainer's own loop reads every sample, but the model computes the first two
batches alone, those with the longest samples; for the others the predictions of the first sample stand in, which go
through `preprocess_logits_for_metrics` and `compute_metrics` as always.
"""

import contextlib
import math
import shutil
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from accelerate.utils import recursively_apply
from accelerate.utils.memory import clear_device_cache
from torch.utils._pytree import tree_leaves
from transformers import TrainerCallback
from transformers.trainer_pt_utils import find_batch_size

from autotune.execution.environment import agree, own_rank, wait_for_all
from autotune.execution.gradients import randomness_off
from autotune.execution.guard import MemoryGuard
from autotune.execution.outcome import first_line, is_out_of_memory
from autotune.execution.peak_parts import PeakRecorder
from autotune.execution.user_code import own_values
from autotune.stand_in import host_values
from autotune.stand_in.device import is_rehearsal
from autotune.units import show_memory
from autotune.values.budget import CheckTask, LossCurve, LossTask, Soaked, SoakTask
from autotune.values.trial import Memory, PeakParts

_COMPUTED = 2  # batches of an evaluation that the model computes: one is still there when the next comes
_LONGEST_S = 30.0  # of reading a data set, which must not use up the time of the whole check


class CheckError(Exception):
    """Something failed in a check; the message says in what part of it, the cause is chained."""


class Reading(NamedTuple):
    """How a trial reads its samples."""

    longest: Any = None  # gives so many samples to evaluate on, the longest first; None: there are none
    kept: int | None = None  # samples of the largest data set, as predictions are kept until its end; None: they aren't
    not_saved: str | None = None  # why a soak saves no checkpoint
    not_evaluated: str | None = None  # why there is nothing to evaluate on, if the user can't know


def arguments_of(task: CheckTask | None) -> dict[str, Any]:
    """Return the arguments that a check adds to the Trainer's: a loss run logs each step."""
    if not isinstance(task, LossTask):
        return {}
    return {"max_steps": task.steps, "seed": task.seed, "logging_strategy": "steps", "logging_steps": 1}


@contextlib.contextmanager
def around_training(task: CheckTask | None, trainer: Any, reading: Reading) -> Iterator[None]:
    """Train inside this: a loss run without randomness; a soak ends with a checkpoint, or raises CheckError."""
    if isinstance(task, LossTask):
        with randomness_off(trainer.model):
            yield
    elif isinstance(task, SoakTask):
        saver = CheckpointSaver(trainer, not_saved=reading.not_saved)
        trainer.add_callback(saver)
        try:
            yield
        except Exception as error:
            if not saver.is_saving:
                raise
            raise CheckError(f"while saving a checkpoint: {first_line(error)}") from error
    else:
        yield


def findings(
    task: CheckTask | None, trainer: Any, reading: Reading, guard: MemoryGuard, recorder: PeakRecorder | None = None
) -> dict[str, Any]:
    """Return the fields that a check adds to the measurement once training has ended; CheckError: evaluation failed."""
    if isinstance(task, LossTask):  # the Trainer logs a step's loss as the mean over its accumulation
        losses = tuple(float(entry["loss"]) for entry in trainer.state.log_history if "loss" in entry)
        if len(losses) != task.steps:
            raise CheckError(f"{len(losses)} losses were logged in {task.steps} steps")
        return {"curve": LossCurve(losses=losses, dropout_spread=_dropout_spread(task, trainer))}
    if isinstance(task, SoakTask):
        saver = trainer.pop_callback(CheckpointSaver)
        if recorder is not None and saver.bytes is not None:
            recorder.phase_ended("saving")
        host_values.check()
        found: dict[str, Any] = {"eval_batch_size": None, "not_evaluated": reading.not_evaluated}

        def peak() -> tuple[Memory, PeakParts | None]:
            parts = None if recorder is None else recorder.parts()
            return guard.peak() if parts is None else Memory.worst_of(list(parts.phases.values())), parts

        memory, parts = peak()
        if reading.longest is not None:
            try:
                with host_values.reading("copies"):  # predictions, for metrics
                    found |= evaluated(task.eval_batch_sizes, trainer, reading, guard)
                host_values.check()
            except (CheckError, host_values.UnknownValueError):
                if (reason := host_values.unknown()) is None:
                    raise
                found = {"eval_batch_size": None, "not_evaluated": f"evaluating can't be told: {reason}"}
            else:
                if recorder is not None:
                    recorder.phase_ended("evaluating")
                memory, parts = peak()
        found["peak_bytes"] = memory.peak_bytes if memory.is_known else None
        soaked = Soaked(**found, checkpoint_bytes=saver.bytes, not_saved=saver.not_saved)
        return {"soaked": soaked, "memory": memory, "parts": parts}
    return {}


class CheckpointSaver(TrainerCallback):  # type: ignore[misc]  # transformers is untyped
    """Has the Trainer save a checkpoint after the last step, if the disk has room for it."""

    def __init__(self, trainer: Any, *, not_saved: str | None = None) -> None:
        self._trainer, self.not_saved, self.is_saving = trainer, not_saved, False
        self.bytes: int | None = None

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if not control.should_training_stop or self.is_saving or self.not_saved is not None:
            return
        model, optimizer = self._trainer.model, self._trainer.optimizer
        states = getattr(getattr(optimizer, "optimizer", optimizer), "state", {})
        # peft saves the adapter's weights alone
        weights = (p for p in model.parameters() if p.requires_grad) if hasattr(model, "peft_config") else None
        tensors = tree_leaves([dict(states), list(weights) if weights is not None else dict(model.state_dict())])
        needed = sum(t.numel() * t.element_size() for t in tensors if isinstance(t, torch.Tensor))
        free = shutil.disk_usage(Path(args.output_dir).parent).free
        if not agree(free >= needed + (512 << 20)):  # the rest of the search writes some
            self.not_saved = (
                f"no checkpoint was saved: it takes {show_memory(needed)}, and {show_memory(free)} of disk are free"
            )
            return
        self.is_saving = control.should_save = True

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        wait_for_all(torch.zeros(1))  # each rank writes a part of it
        self.is_saving = False
        if own_rank().number == 0:
            folder = Path(args.output_dir) / f"checkpoint-{state.global_step}"
            self.bytes = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
            shutil.rmtree(folder, ignore_errors=True)


def _dropout_spread(task: LossTask, trainer: Any) -> float | None:
    """Return how far dropout of eight seeds spreads the loss of the first step's samples; None: unknown."""
    args, loader = trainer.args, trainer.callback_handler.train_dataloader
    if hasattr(trainer.model_wrapped, "_orig_mod"):  # it would be compiled again
        return None
    with randomness_off(trainer.model) as is_random:
        if not is_random:
            return 0.0
    trainer.model.train()
    size = args.per_device_train_batch_size
    starts = range(0, size * args.gradient_accumulation_steps * own_rank().of, size)
    try:
        made = [loader.collate_fn([loader.dataset[i] for i in range(start, start + size)]) for start in starts]
    except Exception:  # those of a stream are gone, and a loader of the user's own may make them otherwise
        return None
    batches = [trainer._prepare_inputs(batch) for batch in made]
    draws: list[float] = []
    for draw in range(8):
        torch.manual_seed(task.seed * 8 + draw)
        with torch.no_grad(), trainer.compute_loss_context_manager():
            losses = (trainer.compute_loss(trainer.model_wrapped, dict(batch)) for batch in batches)
            draws.append(statistics.fmean(map(float, losses)))
    return statistics.stdev(draws)


def keeps_predictions(trainer: Any) -> bool:
    args = trainer.args
    return trainer.compute_metrics is not None and not args.prediction_loss_only and not args.batch_eval_metrics


def evaluated(sizes: tuple[int, ...], trainer: Any, reading: Reading, guard: MemoryGuard) -> dict[str, Any]:
    """Evaluate with the first of these batch sizes that fits; return the fields of `Soaked` that say which one it is.

    If the predictions fit with none, evaluation is tried without them, and the result says why. Of several ranks none
    goes on to the next size. CheckError: evaluation failed, or fits with no size.
    """
    args, ranks, trained = trainer.args, own_rank().of, guard.peak()
    args.dataloader_persistent_workers = False  # the Trainer would keep the first size's loader
    args.dataloader_drop_last = own_values(args).get("dataloader_drop_last", False)  # a trial's is True
    own: int | None = getattr(args, "eval_accumulation_steps", None)
    # With all predictions, moved to the host after each batch if need be; then without them.
    steps = list(dict.fromkeys((own, 1))) if reading.kept and args.device.type != "cpu" else [own]
    attempts: list[tuple[int, int | None, int | None]] = [(size, own, None) for size in sizes]
    attempts[:0] = [(size, step, reading.kept) for size in sizes if reading.kept for step in steps]
    if is_rehearsal():  # of the code's own evaluation, and of none that takes less
        del attempts[1:]
    failure: str | None = None
    while True:
        size, accumulation, kept = attempts.pop(0)
        args.per_device_eval_batch_size, args.eval_accumulation_steps = size, accumulation
        found: dict[str, Any] = {"eval_batch_size": size}
        try:  # an `evaluate` of the code's own may take no data
            trainer.eval_dataset = reading.longest(_COMPUTED * size * ranks if kept is None else kept)
            if kept is None:
                with patch.object(trainer, "compute_metrics", None) if reading.kept else contextlib.nullcontext():
                    trainer.evaluate()
            else:
                with _stood_in(trainer) as seen:
                    trainer.evaluate()
                found |= {} if accumulation is None else {"eval_accumulation_steps": accumulation}
                found |= {"predicted_samples": kept, **seen}
            guard.check()
        except Exception as error:
            is_short = is_out_of_memory(error)
            if not attempts or ranks > 1 or not (is_short or kept):
                raise CheckError(f"while evaluating with a batch of {size}: {first_line(error)}") from error
            if kept:
                failure = f"{'out of memory' if is_short else type(error).__name__}: {first_line(error)}"
                attempts = attempts if is_short else [attempt for attempt in attempts if not attempt[2]]
        else:
            return found if kept else {**found, "metrics_failed": failure}
        # Out here the exception, whose frames hold the failed batch, is gone.
        clear_device_cache(garbage_collection=True)
        guard.begin_anew(trained)


@contextlib.contextmanager
def _stood_in(trainer: Any) -> Iterator[dict[str, Any]]:
    """Let the model compute the first batches alone; yield the predictions' size, and why metrics failed if they do."""
    step, loop, metrics = trainer.prediction_step, trainer.evaluation_loop, trainer.compute_metrics
    seen: dict[str, Any] = {}
    first, batches, samples = None, 0, 0
    ends_at = math.inf if is_rehearsal() else time.monotonic() + _LONGEST_S

    def prediction_step(model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal first, batches, samples
        if batches >= _COMPUTED and time.monotonic() > ends_at:
            raise TimeoutError(f"reading all samples takes too long; the predictions of the first {samples:,} fitted")
        rows = find_batch_size(inputs)
        batches, samples = batches + 1, samples + rows
        if batches > _COMPUTED:
            return recursively_apply(lambda t: t.expand(rows, *t.shape[1:]).clone() if t.ndim else t.clone(), first)
        found = step(model, inputs, *args, **kwargs)
        if batches == 1:
            first = recursively_apply(lambda t: t[:1].clone() if t.ndim else t.clone(), found)
        return found

    def evaluation_loop(*args: Any, **kwargs: Any) -> Any:
        nonlocal first, batches, samples
        first, batches, samples = None, 0, 0  # of each data set
        output = loop(*args, **kwargs)
        size = sum(getattr(array, "nbytes", 0) for array in tree_leaves(output.predictions))
        seen["predictions_bytes"] = max(size, seen.get("predictions_bytes", 0))
        return output

    def compute_metrics(*args: Any, **kwargs: Any) -> Any:
        try:
            return metrics(*args, **kwargs)
        except Exception as error:
            if is_out_of_memory(error):
                raise
            seen["metrics_failed"] = f"{type(error).__name__}: {first_line(error)}"
            return {}

    with patch.multiple(
        trainer, prediction_step=prediction_step, evaluation_loop=evaluation_loop, compute_metrics=compute_metrics
    ):
        yield seen
