"""Makes a model the one that is trained: the adapter put on, the loss that of the global batch.

Called by the trial's worker and by whoever trains with an exported configuration, so that both train the same.
"""

from __future__ import annotations

import warnings
from typing import Any

from autotune.training.peft_arguments import BITFIT, CLASSIFICATION_HEADS


def prepare_model(model: Any, adapter: dict[str, Any] | None) -> Any:
    """Return `model` ready for a Trainer.

    Args:
        model: A transformers model.
        adapter: Of `peft_arguments.adapter_arguments`; None trains all weights.

    Raises:
        ValueError: The adapter finds nothing in the model that it could be put on.
    """
    from autotune.training.loss import normalize_loss

    return normalize_loss(model if adapter is None else put_on(model, adapter))


def put_on(model: Any, adapter: dict[str, Any]) -> Any:
    """Return `model` with an adapter of new weights, on whatever device it is; see :func:`prepare_model`."""
    config = peft_config(adapter)
    if config is None:
        return _only_biases(model)
    from peft import get_peft_model

    if config.is_prompt_learning and config.task_type == "SEQ_2_SEQ_LM":
        # Prefixes are the decoder's; peft counts the layers of the encoder, which usually has as many.
        layers = (getattr(model.config, name, None) for name in ("num_decoder_layers", "decoder_layers"))
        config.num_layers = next((count for count in layers if count), None)
    with warnings.catch_warnings():
        # GPT-2's layers hold their weights the other way round, which peft finds out itself and then warns of.
        warnings.filterwarnings("ignore", message="fan_in_fan_out is set to")
        # Nor are patterns a mistake that it makes itself for the fused weights of experts.
        warnings.filterwarnings("ignore", message=r"The following \w+_pattern keys did not match")
        return get_peft_model(model, config)


def peft_config(adapter: dict[str, Any]) -> Any | None:
    """Return the peft config of an adapter's arguments, None for BitFit, which peft hasn't."""
    if adapter.get("peft_type") == BITFIT:
        return None
    import peft

    return peft.get_peft_config({"peft_type": "LORA", **adapter})


def _only_biases(model: Any) -> Any:
    """Freeze all but the biases and the head of a classifier, which is new.

    Raises:
        ValueError: The model has no biases.
    """
    found = False
    for name, parameter in model.named_parameters():
        is_bias = name.endswith("bias")
        is_head = name.split(".")[0] in CLASSIFICATION_HEADS
        parameter.requires_grad_(is_bias or is_head)
        found = found or (is_bias and not is_head)
    if not found:
        raise ValueError("BitFit trains biases, and the model has none")
    return model
