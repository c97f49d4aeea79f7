"""The models of a pack that no catalogue has: small, so that a trial takes seconds; smaller still on a CPU."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from autotune.training.resolve import default_task, resolve
from autotune.values.hardware import Hardware
from autotune.values.workload import Workload

_LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 8192,
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
}
_TINY_LLAMA = {**_LLAMA, "vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4}
_TINIEST = {**_TINY_LLAMA, "num_hidden_layers": 1}
_WIDE = {**_TINIEST, "vocab_size": 32000}
_VIT: dict[str, Any] = {
    "model_type": "vit",
    "image_size": 224,
    "patch_size": 16,
    "hidden_size": 384,
    "intermediate_size": 1536,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
}
_TINY_VIT = {**_VIT, "image_size": 32, "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4}

# Few shapes of products: max-autotune compiles dozens of kernels for each.
_SQUARE = {**_LLAMA, "vocab_size": 512, "intermediate_size": 512, "num_hidden_layers": 1}

# With weights of standard deviation 1 (the most that transformers takes) what an MLP puts out spreads by around
# 0.6 x width x sqrt(inner width) = 55,000: among a thousand values some always leave fp16 (65,504), and none bf16.
_OVERFLOWING = {
    **_LLAMA,
    "vocab_size": 512,
    "hidden_size": 1024,
    "intermediate_size": 8192,
    "num_hidden_layers": 2,
    "initializer_range": 1.0,
}

MODELS: dict[str, dict[str, dict[str, Any]]] = {
    "llama": {"cuda": _LLAMA, "cpu": _TINY_LLAMA},
    "vit": {"cuda": _VIT, "cpu": _TINY_VIT},
    "square-llama": {"cuda": _SQUARE, "cpu": _SQUARE},
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
