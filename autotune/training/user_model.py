"""Changes a model that a user's own code has made into that of a configuration, in trials and with the answer alike."""

from __future__ import annotations

from typing import Any

from autotune.training.arguments import TrainingPlan
from autotune.values.user_code import OwnCode


def fitted(model: Any, mapping: TrainingPlan, code: OwnCode) -> Any:
    """Return `model` with the kernels, precision, adapter and loss of a configuration.

    Args:
        model: As the code made it.
        mapping: What the configuration means.
        code: Says which knobs the code has set itself.

    Raises:
        ValueError: The adapter finds nothing in the model that it could be put on.
    """
    from autotune.training.adapters import put_on
    from autotune.training.loss import normalize_loss

    wanted = mapping.model
    for name, setter in (
        ("attn_implementation", "set_attn_implementation"),
        ("experts_implementation", "set_experts_implementation"),
    ):
        is_ours = name in wanted and name not in code.held and hasattr(model, setter)
        if is_ours and getattr(model.config, f"_{name}", None) != wanted[name]:
            getattr(model, setter)(wanted[name])
    if wanted.get("dtype") == "bfloat16" and "precision" not in code.held:
        _cast(model)
    if mapping.adapter is not None and not hasattr(model, "peft_config"):  # code may make several Trainers of a model
        model = put_on(model, mapping.adapter)
    return normalize_loss(model) if code.normalizes else model


def _cast(model: Any) -> None:
    """Make the weights bf16; buffers, such as the frequencies of rotary positions, stay as they are."""
    import torch

    for parameter in model.parameters():
        if parameter.dtype is torch.float32:
            parameter.data = parameter.data.to(torch.bfloat16)
