"""Evaluates in a soak, under the trial's memory budget, with the largest batch that fits.

Where a Trainer has `compute_metrics`, its evaluation keeps the predictions of the whole data set, on the device until
`eval_accumulation_steps` moves them to the host. The soak keeps as many: the Trainer's own loop reads every sample, but
the model computes the first two batches alone, those with the longest samples; for the others the predictions of the
very first sample stand in. They go through `preprocess_logits_for_metrics` and `compute_metrics` as always.
"""

from __future__ import annotations

import contextlib
import gc
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from accelerate.utils import recursively_apply
from torch.utils._pytree import tree_leaves
from transformers.trainer_pt_utils import find_batch_size

from autotune.execution.failures import first_line, is_out_of_memory
from autotune.execution.guard import MemoryGuard
from autotune.execution.ranks import own_rank
from autotune.execution.user_overlay import theirs

# Batches that the model computes: two, so that one is there while the next comes.
_COMPUTED = 2

# Reading a large data set must not use up the time of the whole check.
_LONGEST_S = 30.0


class CheckError(Exception):
    """Something failed in a check; the message says in what part of it, the cause is chained."""


class EvaluationData(NamedTuple):
    """What there is to evaluate on."""

    longest: Callable[[int], Any]  # gives so many samples, the longest first
    kept: int | None = None  # samples whose predictions an evaluation keeps, all there are; None: it keeps none


class _Attempt(NamedTuple):
    batch_size: int
    accumulation_steps: int | None
    kept: int | None


def keeps_predictions(trainer: Any) -> bool:
    """Return whether the Trainer's evaluation keeps the predictions of all samples until its end."""
    args = trainer.args
    return trainer.compute_metrics is not None and not args.prediction_loss_only and not args.batch_eval_metrics


def evaluated(sizes: tuple[int, ...], trainer: Any, data: EvaluationData, guard: MemoryGuard) -> dict[str, Any]:
    """Return the fields of `Soaked` that say with what evaluation fits: the first batch size that does.

    Predictions that fit with no batch size are left out at last, and the result says why. A rank that fails leaves the
    others amid their evaluation, which only their end gets them out of: of several ranks none goes on to the next size.

    Raises:
        CheckError: Evaluation failed, or fits with no size.
    """
    trainer.args.dataloader_persistent_workers = False  # the Trainer would keep the first size's loader
    trainer.args.dataloader_drop_last = theirs(trainer.args).get("dataloader_drop_last", False)  # a trial's is True
    ranks, trained = own_rank().of, guard.peak()
    attempts = _attempts(sizes, trainer, data)
    failure: str | None = None
    while attempts:
        attempt = attempts.pop(0)
        trainer.args.per_device_eval_batch_size = attempt.batch_size
        trainer.args.eval_accumulation_steps = attempt.accumulation_steps
        try:
            found = _evaluate(trainer, data, attempt, attempt.kept or _COMPUTED * attempt.batch_size * ranks)
            guard.check()
        except Exception as error:
            is_short = is_out_of_memory(error)
            if not attempts or ranks > 1 or not (is_short or attempt.kept):
                raise CheckError(
                    f"while evaluating with a batch of {attempt.batch_size}: {first_line(error)}"
                ) from error
            if attempt.kept:
                failure = f"{'out of memory' if is_short else type(error).__name__}: {first_line(error)}"
                attempts = attempts if is_short else [a for a in attempts if not a.kept]
        else:
            return found if attempt.kept else {**found, "metrics_failed": failure}
        # Out here the exception, whose frames hold the failed batch, is gone.
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        guard.begin_anew(trained)
    raise AssertionError("a ladder has a last rung")


def _attempts(sizes: tuple[int, ...], trainer: Any, data: EvaluationData) -> list[_Attempt]:
    """Return what to try: with all predictions, moved to the host after each batch if need be, then without them."""
    own = getattr(trainer.args, "eval_accumulation_steps", None)
    steps = [own] if data.kept is None or trainer.args.device.type == "cpu" else list(dict.fromkeys((own, 1)))
    keeping = [_Attempt(size, step, data.kept) for size in sizes for step in steps] if data.kept else []
    return [*keeping, *(_Attempt(size, own, None) for size in sizes)]


def _evaluate(trainer: Any, data: EvaluationData, attempt: _Attempt, samples: int) -> dict[str, Any]:
    """Evaluate once; return the fields of `Soaked`."""
    found: dict[str, Any] = {"eval_batch_size": attempt.batch_size}
    if attempt.kept is None:
        with patch.object(trainer, "compute_metrics", None) if data.kept else contextlib.nullcontext():
            trainer.evaluate(data.longest(samples))
        return found
    with _stood_in(trainer) as seen:
        trainer.evaluate(data.longest(samples))
    steps = {} if attempt.accumulation_steps is None else {"eval_accumulation_steps": attempt.accumulation_steps}
    return {**found, **steps, "predicted_samples": samples, **seen}


@contextlib.contextmanager
def _stood_in(trainer: Any) -> Iterator[dict[str, Any]]:
    """Let the model compute the first batches alone; yield the size of the predictions, and why the metrics failed."""
    step, loop, metrics = trainer.prediction_step, trainer.evaluation_loop, trainer.compute_metrics
    seen: dict[str, Any] = {}
    first: list[Any] = []
    batches = samples = 0
    ends_at = time.monotonic() + _LONGEST_S

    def prediction_step(model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal batches, samples
        if batches >= _COMPUTED and time.monotonic() > ends_at:
            raise TimeoutError(f"reading all samples takes too long; the predictions of the first {samples:,} fitted")
        rows = find_batch_size(inputs)
        batches, samples = batches + 1, samples + rows
        if first and batches > _COMPUTED:
            return recursively_apply(lambda t: t.expand(rows, *t.shape[1:]).clone() if t.ndim else t.clone(), first[0])
        found = step(model, inputs, *args, **kwargs)
        if not first:
            first.append(recursively_apply(lambda t: t[:1].clone() if t.ndim else t.clone(), found))
        return found

    def evaluation_loop(*args: Any, **kwargs: Any) -> Any:
        output = loop(*args, **kwargs)
        seen["predictions_bytes"] = sum(getattr(array, "nbytes", 0) for array in tree_leaves(output.predictions))
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
