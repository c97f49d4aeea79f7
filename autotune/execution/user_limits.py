"""What of a user's own training can't be changed from outside, and why: knobs, single values, the order of samples.

Looks at the Trainer as it stands when it is about to train. Called by `own_facts`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import nn

from autotune.values.model import Task
from autotune.values.user_code import Barred


class Seen(NamedTuple):
    """A training as it stands."""

    trainer: Any
    model: Any
    base: Any  # the model inside an adapter's wrapper
    batches: str | None  # why the order of the samples is the code's own; None: it isn't
    lengths: Any  # of the samples, None: they have none
    batch: Any  # of a few of them
    weights: str  # the dtype of most

    def arguments_have(self, *names: str) -> bool:
        """Return whether any of these TrainingArguments is set."""
        return any(getattr(self.trainer.args, name) for name in names)


def overrides(trainer: Any, name: str) -> bool:
    """Return whether the code has a method of its own in place of the library's."""
    method = getattr(type(trainer), name)
    return not method.__module__.startswith("transformers.") or name in vars(trainer)


def own_batches(trainer: Any) -> str | None:
    """Return why the order of the samples is the code's own; None if trials may set it."""
    from torch.utils.data import IterableDataset
    from transformers.trainer_utils import has_length

    name = type(trainer).__name__
    for method in ("get_train_dataloader", "_get_train_sampler", "_get_dataloader"):
        if overrides(trainer, method):
            return f"{name} has a {method} of its own"
    if isinstance(trainer.train_dataset, IterableDataset) or not has_length(trainer.train_dataset):
        return "the samples come as a stream"
    return None


def is_normalizable(trainer: Any, base: Any) -> bool:
    """Return whether the loss is the library model's own, whose way to count labels is known."""
    from transformers import PreTrainedModel

    own = overrides(trainer, "compute_loss") or trainer.compute_loss_func is not None or trainer.label_smoother
    return isinstance(base, PreTrainedModel) and not own and type(base).__module__.startswith("transformers.")


def weights_of(model: nn.Module) -> str:
    """Return the dtype of most weights."""
    sizes: dict[str, int] = {}
    for parameter in model.parameters():
        name = str(parameter.dtype).removeprefix("torch.")
        sizes[name] = sizes.get(name, 0) + parameter.numel()
    return max(sizes, key=lambda name: sizes[name], default="float32")


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
        "precision": f"the weights are {seen.weights}, as your code makes them" if seen.weights != "float32" else None,
        "optim": _own_optimizer(trainer),
        "attn_implementation": None if can_switch else f"{name} can't switch its attention once it is made",
        "train_sampling_strategy": seen.batches,
        "dataloader_num_workers": loader,
        "dataloader_prefetch_factor": loader,
        "use_liger_kernel": None if hasattr(base, "config") else "Liger's kernels are for models of transformers",
    }
    return {knob: reason for knob, reason in reasons.items() if reason is not None}


def _own_optimizer(trainer: Any) -> str | None:
    if trainer.optimizer is not None or trainer.optimizer_cls_and_kwargs is not None:
        return "your code hands the Trainer an optimizer"
    for method in ("create_optimizer", "create_optimizer_and_scheduler", "get_optimizer_cls_and_kwargs"):
        if overrides(trainer, method):
            return f"{type(trainer).__name__} has a {method} of its own"
    return None


def _no_adapter(seen: Seen) -> str | None:
    """Return why no adapter can be put on the model."""
    from transformers import PreTrainedModel

    if hasattr(seen.model, "peft_config") or getattr(seen.base, "_hf_peft_config_loaded", False):
        return "the model has an adapter of its own already"
    if not isinstance(seen.base, PreTrainedModel):
        return f"{type(seen.base).__name__} is no model of transformers"
    if seen.trainer.optimizer is not None:
        return "your code hands the Trainer an optimizer, of the weights as they are"
    return None


def barred(seen: Seen) -> tuple[Barred, ...]:
    """Return the values that single knobs can't have."""
    from transformers import PreTrainedModel

    found = []
    if not isinstance(seen.base, PreTrainedModel):
        reason = f"{type(seen.base).__name__} is no model of transformers: whether it casts its inputs isn't known"
        found.append(Barred(knob="precision", value="pure_bf16", reason=reason))
    if seen.lengths is None:
        reason = "the samples have no input_ids whose lengths could be read in short time"
        found.append(Barred(knob="train_sampling_strategy", value="group_by_length", reason=reason))
    return tuple(found)


def not_predicted(seen: Seen, task: Task) -> str | None:
    """Return why the cost model can't trace this training, None if it can."""
    if task is Task.OWN:
        return f"{type(seen.base).__name__} is no model of transformers with a head that is known"
    if seen.model is not seen.base or getattr(seen.base, "quantization_method", None) is not None:
        return "the model has an adapter or packed weights of its own"
    if seen.weights != "float32" and (seen.arguments_have("bf16", "fp16") or seen.weights != "bfloat16"):
        return f"weights in {seen.weights} under mixed precision"
    if task.takes_text and width_of(seen.batch, "input_ids") is None:
        return "batches have no rows of input_ids"
    return None


def width_of(batch: Any, name: str) -> int | None:
    """Return the length of the rows of a batch; None if it has none of that name."""
    tensor = batch.get(name) if hasattr(batch, "get") else None
    return int(tensor.shape[1]) if isinstance(tensor, torch.Tensor) and tensor.ndim > 1 else None
