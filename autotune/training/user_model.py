"""Makes a model that a user's own code has made the one of a configuration, as far as that can be done afterwards.

Called in a trial's process, and where a result is applied to the code, so that both train the same.
"""

from __future__ import annotations

from typing import Any

from autotune.training.arguments import TrainingPlan
from autotune.values.user_code import OwnCode


def fitted(model: Any, mapping: TrainingPlan, code: OwnCode) -> Any:
    """Return `model` as the configuration has it: its kernels, its precision, its adapter, its loss.

    Args:
        model: As the code made it.
        mapping: What the configuration means.
        code: Says what of it is the code's own.

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
    """Turn the weights into bf16; buffers, such as the frequencies of rotary positions, stay as they are."""
    import torch

    for parameter in model.parameters():
        if parameter.dtype is torch.float32:
            parameter.data = parameter.data.to(torch.bfloat16)
