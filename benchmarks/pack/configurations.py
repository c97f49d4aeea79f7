"""Trainings that users ask for, each a trial in the real runner: a table, by the part that runs them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from autotune.values import techniques
from pack.check import Kind
from pack.models import GLOBAL_BATCH
from pack.part import CUDA, Need


class Configuration(NamedTuple):
    """A training of one of the small models, and how its trial has to come out."""

    name: str
    config: Mapping[str, Any]  # fields of TrainConfig that differ from BASE
    model: str = "llama"
    seen: Mapping[str, str] = {}  # by knob what its effect has to match, a regular expression
    fails: bool = False  # the trial must not complete
    kind: Kind = Kind.ANYWHERE
    needs: tuple[Need, ...] = ()  # beside what autotune itself asks for


BASE: dict[str, Any] = {"per_device_train_batch_size": 4, "attn_implementation": "sdpa", "precision": "bf16"}
_ADAPTED: dict[str, Any] = {"adapter": {"kind": "lora", "rank": 8}}
_COMPILED: dict[str, Any] = {"torch_compile_backend": "inductor"}

PRECISION = (
    Configuration("fp32", {"precision": "fp32"}),
    Configuration("tf32", {"precision": "fp32", "tf32": True}, seen={"tf32": "tf32"}),
    Configuration("bf16", {}, seen={"precision": "bfloat16"}),
    Configuration("fp16", {"precision": "fp16", "optim": "adamw_torch"}),
    Configuration("fp16, fused optimizer", {"precision": "fp16"}),
    Configuration("pure bf16", {"precision": "pure_bf16"}, seen={"precision": "weights bfloat16"}),
)
OVERFLOW = (
    Configuration("the model in bf16", {}, model="overflowing-llama", kind=Kind.VALUES_OR_TIME),
    Configuration(
        "fp16 that always overflows, fused optimizer",
        {"precision": "fp16"},
        model="overflowing-llama",
        fails=True,
        kind=Kind.VALUES_OR_TIME,
    ),
    Configuration(
        "fp16 that always overflows",
        {"precision": "fp16", "optim": "adamw_torch"},
        model="overflowing-llama",
        fails=True,
        kind=Kind.VALUES_OR_TIME,
    ),
)
ATTENTION = (
    Configuration("eager", {"attn_implementation": "eager"}),
    # On compute capability 9.0 and 10.0 torch prefers cuDNN's kernel.
    Configuration("flash kernel of sdpa", {}, seen={"attn_implementation": "flash|cudnn"}, needs=(CUDA,)),
    Configuration("flash_attention_2", {"attn_implementation": "flash_attention_2"}),
    Configuration("flex_attention", {"attn_implementation": "flex_attention"}),
)
CHECKPOINTING = tuple(
    Configuration(kind, {"checkpointing": kind}, seen={"checkpointing": "^[1-9][0-9]* checkpointed"})
    for kind in techniques.CHECKPOINTING
)
_SEEN_COMPILED = {"torch_compile_backend": "^inductor: [1-9]"}
_TUNED: dict[str, Any] = {**_COMPILED, "torch_compile_mode": "max-autotune"}
_SQUARE: dict[str, Any] = {"model": "square-llama", "seen": _SEEN_COMPILED}
COMPILATION = (
    Configuration("inductor", _COMPILED, seen=_SEEN_COMPILED),
    Configuration("inductor, fp32", {**_COMPILED, "precision": "fp32"}, seen=_SEEN_COMPILED),
    Configuration("inductor, checkpointing", {**_COMPILED, "checkpointing": "full"}, seen=_SEEN_COMPILED),
    # With CUDA graphs micro-steps can't be accumulated: torch says that outputs of one were overwritten by the next.
    Configuration("max-autotune", {**_TUNED, "per_device_train_batch_size": GLOBAL_BATCH}, **_SQUARE),
    Configuration(
        "max-autotune-no-cudagraphs", {**_TUNED, "torch_compile_mode": "max-autotune-no-cudagraphs"}, **_SQUARE
    ),
)
LIGER = (
    Configuration("Liger", {"use_liger_kernel": True}, seen={"use_liger_kernel": "^[1-9]"}),
    Configuration("Liger, compiled", {"use_liger_kernel": True, **_COMPILED}, seen={"use_liger_kernel": "^[1-9]"}),
)
SAVERS = (
    Configuration("the loss in chunks", {"chunked_loss": True}, seen={"chunked_loss": "chunks"}),
    Configuration("the loss in chunks, compiled", {"chunked_loss": True, **_COMPILED}, seen=_SEEN_COMPILED),
    Configuration("expandable segments", {"expandable_segments": True}, needs=(CUDA,)),
    Configuration("emptied cache", {"torch_empty_cache_steps": 4}, needs=(CUDA,)),
)
ADAPTERS = (
    Configuration("LoRA", _ADAPTED, seen={"adapter": "^lora"}),
    Configuration("QLoRA (nf4)", {**_ADAPTED, "quantization": "nf4"}, seen={"quantization": "^nf4 in"}),
    Configuration("LoRA on int8", {**_ADAPTED, "quantization": "int8"}, seen={"quantization": "^int8 in"}),
    Configuration("LoRA, checkpointing", {**_ADAPTED, "checkpointing": "full"}),
)
OPTIMIZERS = tuple(
    Configuration(name, {"optim": name}) for name in ("adamw_torch", "adafactor", "adamw_bnb_8bit", "paged_adamw_8bit")
)
VISION = (
    Configuration("images", {"dataloader_num_workers": 0}, model="vit"),
    Configuration(
        "images, 2 workers",
        {"dataloader_num_workers": 2, "dataloader_pin_memory": True},
        model="vit",
        seen={"dataloader_num_workers": "^2$"},
    ),
)
