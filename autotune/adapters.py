"""Makes a model the one that is trained: the adapter put on, the loss that of the global batch.

Called by the trial's worker and by whoever trains with an exported configuration, so that both train the same.
"""

from __future__ import annotations

from typing import Any


def prepare_model(model: Any, adapter: dict[str, Any] | None) -> Any:
    """Return `model` ready for a Trainer.

    Args:
        model: A transformers model.
        adapter: Keyword arguments of `peft.LoraConfig`; None trains all weights.

    Raises:
        ValueError: peft finds none of the adapter's target modules.
    """
    from autotune.loss import normalize_loss

    return normalize_loss(model if adapter is None else put_on(model, adapter))


def put_on(model: Any, adapter: dict[str, Any]) -> Any:
    """Return `model` with an adapter of new weights, on whatever device it is; see :func:`prepare_model`."""
    from peft import LoraConfig, get_peft_model

    return get_peft_model(model, LoraConfig(**adapter))
