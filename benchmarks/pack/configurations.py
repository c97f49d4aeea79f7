"""Trainings that users ask for, each a trial in the real runner: a table, by the part that runs them; and their models.

The models are those that no catalogue has: small, so that a trial takes seconds; smaller still on a CPU.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from autotune.training.resolve import default_task, resolve
from autotune.values import techniques
from autotune.values.hardware import Hardware
from autotune.values.workload import Workload
from pack.report import Kind
from pack.session import CUDA, Need

_LLAMA: dict[str, Any] = {
    "model_type": "llama", "vocab_size": 8192, "hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 4,
    "num_attention_heads": 8,
}  # fmt: skip
_TINY_LLAMA = {**_LLAMA, "vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4}
_TINIEST = {**_TINY_LLAMA, "num_hidden_layers": 1}
_WIDE = {**_TINIEST, "vocab_size": 32000}
_VIT: dict[str, Any] = {
    "model_type": "vit", "image_size": 224, "patch_size": 16, "hidden_size": 384, "intermediate_size": 1536,
    "num_hidden_layers": 4, "num_attention_heads": 6,
}  # fmt: skip
_TINY_VIT = {**_VIT, "image_size": 32, "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4}

# Few shapes of products: max-autotune compiles dozens of kernels for each.
_SQUARE_LLAMA = {**_LLAMA, "vocab_size": 512, "intermediate_size": 512, "num_hidden_layers": 1}

# With weights of standard deviation 1 (the most that transformers takes) what an MLP puts out spreads by around
# 0.6 x width x sqrt(inner width) = 55,000: among a thousand values some always leave fp16 (65,504), and none bf16.
_WIDE_WEIGHTS = {"hidden_size": 1024, "intermediate_size": 8192, "num_hidden_layers": 2, "initializer_range": 1.0}
_OVERFLOWING = {**_LLAMA, "vocab_size": 512, **_WIDE_WEIGHTS}

MODELS: dict[str, dict[str, dict[str, Any]]] = {
    "llama": {"cuda": _LLAMA, "cpu": _TINY_LLAMA},
    "vit": {"cuda": _VIT, "cpu": _TINY_VIT},
    "square-llama": {"cuda": _SQUARE_LLAMA, "cpu": _SQUARE_LLAMA},
    "overflowing-llama": {"cuda": _OVERFLOWING, "cpu": _OVERFLOWING},
    "tiny-llama": {"cuda": _TINIEST, "cpu": _TINIEST},
    "wide-llama": {"cuda": _WIDE, "cpu": _WIDE},
}
LENGTH = {"cuda": 256, "cpu": 16}
GLOBAL_BATCH = 8


def reference(name: str, hardware: Hardware, folder: Path) -> str:
    """Return what autotune takes for a model: a name of the catalogue, or the folder of a config that is made here."""
    if name not in MODELS:
        return name
    directory = folder / name
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(json.dumps(MODELS[name][hardware.kind]))
    return str(directory)


def workload(name: str, hardware: Hardware, folder: Path, **fields: Any) -> Workload:
    """Return what trials of a model train; `fields` differ from the usual."""
    spec = resolve(reference(name, hardware, folder))
    usual = {"sequence_length": LENGTH[hardware.kind], "global_batch_size": GLOBAL_BATCH}
    return Workload(**{"model": spec, "task": default_task(spec), **usual, **fields})


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
_OVERFLOWS: dict[str, Any] = {"model": "overflowing-llama", "kind": Kind.VALUES_OR_TIME}
_FP16: dict[str, Any] = {"precision": "fp16"}
OVERFLOW = (
    Configuration("the model in bf16", {}, **_OVERFLOWS),
    Configuration("fp16 that always overflows, fused optimizer", _FP16, **_OVERFLOWS, fails=True),
    Configuration("fp16 that always overflows", {**_FP16, "optim": "adamw_torch"}, **_OVERFLOWS, fails=True),
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
_NO_GRAPHS = "max-autotune-no-cudagraphs"
_SQUARE: dict[str, Any] = {"model": "square-llama", "seen": _SEEN_COMPILED}
COMPILATION = (
    Configuration("inductor", _COMPILED, seen=_SEEN_COMPILED),
    Configuration("inductor, fp32", {**_COMPILED, "precision": "fp32"}, seen=_SEEN_COMPILED),
    Configuration("inductor, checkpointing", {**_COMPILED, "checkpointing": "full"}, seen=_SEEN_COMPILED),
    # With CUDA graphs micro-steps can't be accumulated: torch says that outputs of one were overwritten by the next.
    Configuration("max-autotune", {**_TUNED, "per_device_train_batch_size": GLOBAL_BATCH}, **_SQUARE),
    Configuration(_NO_GRAPHS, {**_TUNED, "torch_compile_mode": _NO_GRAPHS}, **_SQUARE),
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
_WORKERS = {"dataloader_num_workers": 2, "dataloader_pin_memory": True}
VISION = (
    Configuration("images", {"dataloader_num_workers": 0}, model="vit"),
    Configuration("images, 2 workers", _WORKERS, model="vit", seen={"dataloader_num_workers": "^2$"}),
)
