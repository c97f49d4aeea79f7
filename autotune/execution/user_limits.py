"""What of a user's own training can be changed from outside: knobs, single values, order of samples, micro-batches.

Looks at the Trainer as it stands when it is about to train. Whether another split of a step into micro-batches is
another training is measured: a few samples' gradients are compared (`gradients`), all in one micro-batch and in two.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple
from unittest.mock import patch

import numpy as np
import torch
from torch.utils.data import IterableDataset
from transformers import PreTrainedModel
from transformers.trainer_utils import has_length

from autotune.execution import user_model
from autotune.execution.failures import is_out_of_memory
from autotune.execution.gradients import (
    ROUNDING,
    SHORT_ROUNDING,
    Gradient,
    Split,
    compared,
    diagnosed,
    distance,
    gradient_of,
    is_short,
    randomness_off,
    seeded,
    still_batch_norm,
    weighted,
)
from autotune.execution.user_data import first_batch, rows_of, view
from autotune.training.loss import leaves_out_first_label, normalize_loss
from autotune.values.model import Task
from autotune.values.techniques import CHECKPOINTING
from autotune.values.workload import RECIPES, Barred

# Samples of the step whose gradients are compared, and of a micro-batch of it.
SAMPLES, SPLIT_SAMPLES = 4, 2

# Trainers of TRL that switch checkpointing off and on, for the reference or to generate.
_SWITCHING = {kind.trainer for kind in RECIPES.values() if kind.generates or kind.precomputes}

# A router's loss looks at all tokens of a micro-batch: the relative distance that it may make (as the first loss in
# `autotune.verification.loss_check`).
ROUTER = 0.1


class Seen(NamedTuple):
    """A training as it stands."""

    trainer: Any
    model: Any
    base: Any  # the model inside an adapter's wrapper
    batches: str | None  # why the order of the samples is the code's own; None: it isn't
    lengths: Any  # of the samples, None: they have none
    batch: Any  # of a few of them
    weights: str  # the dtype of most that aren't packed


def overrides(trainer: Any, name: str) -> bool:
    """Return whether the code has a method of its own in place of the library's."""
    method = getattr(type(trainer), name)
    return not method.__module__.startswith("transformers.") or name in vars(trainer)


def user_batches(trainer: Any) -> str | None:
    """Return why the order of the samples is the code's own; None if trials may set it."""
    for method in ("get_train_dataloader", "_get_train_sampler", "_get_dataloader"):
        if overrides(trainer, method):
            return f"{type(trainer).__name__} has a {method} of its own"
    if isinstance(trainer.train_dataset, IterableDataset) or not has_length(trainer.train_dataset):
        return "the samples come as a stream"
    return None


def is_normalizable(trainer: Any, base: Any) -> bool:
    """Return whether the loss is the library model's own, whose way to count labels is known."""
    own = overrides(trainer, "compute_loss") or trainer.compute_loss_func is not None or trainer.label_smoother
    return isinstance(base, PreTrainedModel) and not own and type(base).__module__.startswith("transformers.")


def held(seen: Seen) -> dict[str, str]:
    """Return the knobs that can't be changed of this code, with the reasons."""
    trainer, base, name = seen.trainer, seen.base, type(seen.base).__name__
    made = "the model is made by your code already"
    can_switch = getattr(base, "_can_set_attn_implementation", lambda: False)()
    loader = seen.batches if overrides(trainer, "get_train_dataloader") else None
    reasons = {
        "packing": "your code puts its samples into batches",
        "quantization": made,
        "experts_per_token": made,
        "expert_capacity": made,
        "adapter": _no_adapter(seen),
        "precision": _no_precision(seen),
        "optim": _user_optimizer(trainer),
        "attn_implementation": None if can_switch else f"{name} can't switch its attention once it is made",
        "train_sampling_strategy": seen.batches,
        "dataloader_num_workers": loader,
        "dataloader_prefetch_factor": loader,
        "chunked_loss": "your code's own model and loss stay as they are",
        "activation_memory_budget": "what your code compiles keeps what torch decides",
        "use_liger_kernel": None if hasattr(base, "config") else "Liger's kernels are for models of transformers",
    }
    return {knob: reason for knob, reason in reasons.items() if reason is not None}


def _user_optimizer(trainer: Any) -> str | None:
    """Return how the code decides its optimizer; None if it leaves that to the Trainer."""
    if trainer.optimizer is not None or trainer.optimizer_cls_and_kwargs is not None:
        return "your code hands the Trainer an optimizer"
    for method in ("create_optimizer", "create_optimizer_and_scheduler", "get_optimizer_cls_and_kwargs"):
        if overrides(trainer, method):
            return f"{type(trainer).__name__} has a {method} of its own"
    return None


def _no_precision(seen: Seen) -> str | None:
    if user_model.is_packed(seen.base):
        return "packed weights compute in what your code says"
    return f"the weights are {seen.weights}, as your code makes them" if seen.weights != "float32" else None


def _no_adapter(seen: Seen) -> str | None:
    """Return why no adapter can be put on the model."""
    if hasattr(seen.model, "peft_config") or getattr(seen.base, "_hf_peft_config_loaded", False):
        return "the model has an adapter of its own already"
    if not isinstance(seen.base, PreTrainedModel):
        return f"{type(seen.base).__name__} is no model of transformers"
    if seen.trainer.optimizer is not None:
        return "your code hands the Trainer an optimizer, of the weights as they are"
    return None


def barred(seen: Seen) -> tuple[Barred, ...]:
    """Return the values that single knobs can't have."""
    found = []
    if not isinstance(seen.base, PreTrainedModel):
        reason = f"{type(seen.base).__name__} is no model of transformers: whether it casts its inputs isn't known"
        found.append(Barred(knob="precision", value="pure_bf16", reason=reason))
    if seen.lengths is None:
        reason = "the samples have no input_ids whose lengths could be read in short time"
        found.append(Barred(knob="train_sampling_strategy", value="group_by_length", reason=reason))
    if any(kind.__module__.startswith("trl.") and kind.__name__ in _SWITCHING for kind in type(seen.trainer).__mro__):
        reason = "TRL switches it off in each step, and on again for all layers"
        partial = [name for name, kind in CHECKPOINTING.items() if kind.every > 1 or kind.offload]
        found += [Barred(knob="checkpointing", value=name, reason=reason) for name in partial]
    return tuple(found)


def not_predicted(seen: Seen, task: Task) -> str | None:
    """Return why the cost model can't trace this training, None if it can."""
    if task is Task.OWN:
        return f"{type(seen.base).__name__} is no model of transformers with a head that is known"
    if (reason := user_model.not_traced(seen.model, seen.base)) is not None:
        return reason
    if seen.weights not in ("float32", "bfloat16", "float16"):
        return f"weights in {seen.weights}"
    if task.takes_text and width_of(seen.batch, "input_ids") is None:
        return "batches have no rows of input_ids"
    return None


def width_of(batch: Any, name: str) -> int | None:
    """Return the length of the rows of a batch; None if it has none of that name."""
    tensor = batch.get(name) if hasattr(batch, "get") else None
    return int(tensor.shape[1]) if isinstance(tensor, torch.Tensor) and tensor.ndim > 1 else None


def split_of_trainer(trainer: Any, *, normalizes: bool, lengths: Any, reorders: bool, batch_coupled: bool) -> Split:
    """Return whether the gradient of a Trainer's step depends on the split, tried with a few of its samples.

    The Trainer's own `training_step` computes it, with its count of the step's labels. Afterwards the model has the
    normalised loss, if that is what trials give it, and no gradients.

    Args:
        trainer: When it is about to train.
        normalizes: Whether trials put `normalize_loss` on its model.
        lengths: Of the samples; None if they have none.
        reorders: Whether trials set the order of the samples.
        batch_coupled: Whether the model has routers or batch norm.
    """
    try:
        whole, parts = _batches(trainer, lengths, reorders=reorders)
    except Exception as error:  # whatever the user's data raise
        return Split(unknown=f"no batch of {SAMPLES} samples could be made ({type(error).__name__}: {error})")
    if parts is None:
        return Split(unknown="its batches have no rows that could be split")
    if normalizes:
        normalize_loss(trainer.model)
        trainer.model_accepts_loss_kwargs = True
        trainer._loss_shifts_labels = leaves_out_first_label(trainer.model)
    computes_short = trainer.accelerator.mixed_precision != "no" or is_short(trainer.model.parameters())
    rounding = ROUTER if batch_coupled else SHORT_ROUNDING if computes_short else ROUNDING
    shapes = (f"1 micro-batch of {SAMPLES}", f"{len(parts)} of {SPLIT_SAMPLES}")
    try:
        with randomness_off(trainer.model), still_batch_norm(trainer.model):
            one, other = _gradient(trainer, [whole], 0), _gradient(trainer, parts, 0)
            found = compared(one, lambda: _gradient(trainer, [whole], 1), other, shapes=shapes, rounding=rounding)
            if found.changes is not None:
                return found._replace(changes=found.changes + _diagnosis(trainer, one, other, parts, rounding))
            if found.unknown is None and not normalizes:
                return found._replace(remark=_sums(trainer, one, whole, rounding))
            return found
    except Exception as error:  # whatever the user's code raises
        if is_out_of_memory(error):
            return Split(unknown=f"{SAMPLES} samples do not fit the memory")
        return Split(unknown=f"a step of {SAMPLES} samples failed ({type(error).__name__}: {error})")
    finally:
        trainer.model.zero_grad(set_to_none=True)


def _diagnosis(trainer: Any, whole: Gradient, split: Gradient, parts: list[Any], rounding: float) -> str:
    """Return what is wrong with the split gradient, and what would make both equal, where that was seen."""
    alone = [_gradient(trainer, [part], 0) for part in parts]
    with patch.object(trainer, "model_accepts_loss_kwargs", True):
        counts = [trainer._get_num_items_in_batch([part], trainer.args.device) for part in parts]
    labels = [float(count) for count in counts if count is not None]
    return diagnosed(whole, split, alone, labels, rounding) + _remedy(trainer, whole, parts, rounding)


def _sums(trainer: Any, one: Gradient, whole: Any, rounding: float) -> str | None:
    """Return a remark where the same samples twice make the gradient twice as long: the loss is no mean over a step."""
    twice = _gradient(trainer, [whole, whole], 0)
    if distance(weighted([one], [2.0]), twice) > rounding:
        return None
    return (
        "the loss is a sum over the samples of a step, though your Trainer takes it for one that is divided by their "
        "labels: the gradient grows with the global batch; divide by num_items_in_batch"
    )


def _remedy(trainer: Any, whole: Gradient, parts: list[Any], rounding: float) -> str:
    """Return what would make both gradients equal, where that was seen; otherwise nothing."""
    if not hasattr(type(trainer), "loss_is_scaled_for_ga"):
        return ""
    for value in (False, True):
        with patch.object(trainer, "loss_is_scaled_for_ga", value):
            split = _gradient(trainer, parts, 0)
        if whole.elements.shape == split.elements.shape and distance(whole, split) <= rounding:
            return f"; with loss_is_scaled_for_ga = {value} on your Trainer it does not"
    return ""


def _gradient(trainer: Any, batches: list[Any], seed: int) -> Gradient:
    """Return the gradient of one step of these micro-batches, as the Trainer's loop accumulates it."""
    args, model = trainer.args, trainer.model
    model.zero_grad(set_to_none=True)
    seeded(seed)
    trainer.current_gradient_accumulation_steps = len(batches)
    with patch.object(args, "gradient_accumulation_steps", len(batches)):
        count = trainer._get_num_items_in_batch(batches, args.device)
        for batch in batches:
            trainer.training_step(model, dict(batch), count)
    return gradient_of(p for p in model.parameters() if p.requires_grad)


def _batches(trainer: Any, lengths: Any, *, reorders: bool) -> tuple[Any, list[Any] | None]:
    """Return a batch of a few samples and the same in parts; None if they can't be had.

    Rows of one batch are the same samples whatever a collator draws. A batch that has no rows (a packed one) is
    collated anew in parts, where the order of the samples can be set.
    """
    samples = trainer.train_dataset
    order = _spread(lengths, len(samples)) if reorders else None
    whole = first_batch(trainer, samples if order is None else view(samples, order), SAMPLES)
    if not isinstance(whole, Mapping):
        return whole, None
    slices = [slice(start, start + SPLIT_SAMPLES) for start in range(0, SAMPLES, SPLIT_SAMPLES)]
    rows = [_rows(whole, part) for part in slices] if rows_of(whole, SAMPLES) == SAMPLES else None
    if order is None:
        return whole, rows
    parts = [first_batch(trainer, view(samples, order[part]), SPLIT_SAMPLES) for part in slices]
    # What has as many rows all the same has another dimension first, of time for example.
    return whole, rows if rows and rows_of(parts[0], SPLIT_SAMPLES) == SPLIT_SAMPLES else parts


def _spread(lengths: Any, count: int) -> Any:
    """Return the numbers of samples of different lengths, none of them among the longest."""
    order = np.arange(count) if lengths is None else np.argsort(lengths, kind="stable")
    return np.resize(order[:: max(1, count // SAMPLES)][:SAMPLES], SAMPLES).astype(np.int64)


def _rows(batch: Mapping[str, Any], rows: slice) -> dict[str, Any]:
    return {n: v[rows] if isinstance(v, torch.Tensor) and v.ndim else v for n, v in batch.items()}
