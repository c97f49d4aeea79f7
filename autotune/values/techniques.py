"""Tables of activation checkpointing, of backends of torch.compile, and of values that are not offered.

Activation checkpointing stores the inputs of layers and computes their activations again in the backward pass
(arXiv:1604.06174).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal, get_args

from pydantic import AfterValidator

from autotune.errors import suggestion

Checkpointing = Literal["none", "full", "every-2nd", "every-4th", "offload"]


@dataclass(frozen=True)
class CheckpointingKind:
    """Options of a kind of activation checkpointing.

    Attributes:
        every: Every n-th layer is checkpointed; the others store their activations.
        offload: Inputs of layers are stored in pinned host memory.
    """

    every: int = 1
    offload: bool = False


CHECKPOINTING: dict[Checkpointing, CheckpointingKind] = {
    "full": CheckpointingKind(),
    "every-2nd": CheckpointingKind(every=2),
    "every-4th": CheckpointingKind(every=4),
    "offload": CheckpointingKind(offload=True),
}
assert {"none", *CHECKPOINTING} == set(get_args(Checkpointing))

# transformers 5.23 renamed gradient_checkpointing (kept as an alias until 6) to activation_checkpointing.
RENAMED = (5, 23)


def checkpointing_arguments(kind: Checkpointing, transformers: tuple[int, int]) -> dict[str, object]:
    """Return the TrainingArguments of a kind for a version of transformers."""
    name = "activation_checkpointing" if transformers >= RENAMED else "gradient_checkpointing"
    if kind == "none":
        return {name: False}
    row = CHECKPOINTING[kind]
    options: dict[str, object] = {"use_reentrant": False}
    if row.every > 1:
        options["every_n_layers"] = row.every
    if row.offload:
        options["offload"] = True
    return {name: True, f"{name}_kwargs": options}


# In ascending order of the activations kept on the device.
_LIGHTEST_FIRST = (("offload",), ("full",), ("every-2nd",), ("every-4th",), ("none",))


def keeps_less(one: Checkpointing, other: Checkpointing) -> bool:
    """Return whether `one` surely keeps fewer activations on the device than `other`."""
    rank = {kind: i for i, kinds in enumerate(_LIGHTEST_FIRST) for kind in kinds}
    return rank[one] < rank[other]


def checkpointing_of(options: dict[str, object]) -> Checkpointing:
    """Return the kind that a user's `activation_checkpointing_kwargs` mean.

    The newer implementation takes the place of torch's older, reentrant one: it computes the same, and doesn't hold a
    layer's output while the layer runs again.

    Raises:
        ValueError: No kind has these options.
    """
    known = {"use_reentrant", "every_n_layers", "offload"}
    wanted = (options.get("every_n_layers", 1), options.get("offload", False))
    for name, row in CHECKPOINTING.items():
        if (row.every, row.offload) == wanted and options.keys() <= known:
            return name
    raise ValueError(f"checkpointing with {options} is none of {', '.join(CHECKPOINTING)}")


# Backends of torch.compile that train. `aot_eager` and `eager` run the traced graph as it is, slower than without
# compiling, to find the stage that causes an error. All others (`torch._dynamo.list_backends(exclude_tags=())`) run
# forward passes only, need an accelerator other than a GPU, or are gone from torch.
BACKENDS = ("inductor", "cudagraphs", "aot_eager", "eager")


def _known(name: str) -> str:
    if name not in BACKENDS:
        suggested = suggestion(name, BACKENDS)
        known = ", ".join(BACKENDS)
        raise ValueError(f"{name!r} is no backend of torch.compile for training: expected {known}{suggested}")
    return name


BackendName = Annotated[str, AfterValidator(_known)]

# Modes of inductor: `torch._inductor.list_mode_options()`.
Mode = Literal["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"]

# Reasons why values that guides recommend are not offered.
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
    ("optim", "adamw"): "there are several: adamw_torch_fused (the Trainer's default), adamw_torch, adamw_bnb_8bit ...",
    ("adapter", "qlora"): "QLoRA is LoRA on weights of 4 bits: --fix adapter=lora,quantization=nf4",
}


def why_not(parameter: str, value: object) -> str | None:
    """Return why a known value of a knob is not offered; None for other values."""
    if not isinstance(value, str):
        return None
    if parameter == "quantization" and "qat" in value.lower():
        return _QAT
    if parameter in ("attn_implementation", "experts_implementation") and "/" in value:
        return _HUB_KERNELS
    return _REASONS.get((parameter, value.lower()))
