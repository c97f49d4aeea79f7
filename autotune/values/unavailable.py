"""Values of knobs that guides of another time or kind recommend and that can't be had, with the reasons. Values only.

Optimizers and compiler backends have tables of their own.
"""

from __future__ import annotations

_GONE_ATTENTION = "BetterTransformer is gone from transformers; sdpa replaced it"
_FP8 = (
    "fp8 is not offered: TrainingArguments has no field for it (accelerate takes it from its own launcher), so what "
    "was measured could not be exported; bf16 is the nearest"
)
_QAT = (
    "quantization-aware training is not offered (transformers' Trainer has no way to it, torchao's is a recipe of its "
    "own); nf4 or int8 train an adapter on packed weights"
)
_HUB_KERNELS = "kernels of a repository on the hub are not offered: its code would run by name alone"

_REASONS = {
    ("attn_implementation", "bettertransformer"): _GONE_ATTENTION,
    ("attn_implementation", "better_transformer"): _GONE_ATTENTION,
    ("precision", "fp8"): _FP8,
}


def why_not(parameter: str, value: object) -> str | None:
    """Return why a value of a knob can't be had; None if it isn't one of these."""
    if not isinstance(value, str):
        return None
    if parameter == "quantization" and "qat" in value.lower():
        return _QAT
    if parameter in ("attn_implementation", "experts_implementation") and "/" in value:
        return _HUB_KERNELS
    return _REASONS.get((parameter, value.lower()))
