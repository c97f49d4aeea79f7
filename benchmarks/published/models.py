"""Models of published measurements: by their names in the catalogue, and a few beyond it.

Figures are those of the public `config.json` that is named beside each.
"""

from __future__ import annotations

import re
from typing import Any

from autotune.training.resolve import resolve
from autotune.values.catalogue import catalogue
from autotune.values.model import Kind, ModelSpec

_HUB = "https://huggingface.co/{}/blob/main/config.json"

# Names of rows that mean a model of the catalogue: other checkpoints and mirrors of the same figures.
_SAME_AS = {
    "phi1.51.3b": "phi-1.5",
    "llama7bhf": "llama-2-7b",  # LLaMA 1, of the same shape
    "llama13bhf": "llama-2-13b",
    "debertav2xlargemnli": "deberta-v2-xlarge",
}

# Decoders of Llama's figures: id, type, width, inner width, layers, heads, heads of keys, vocabulary, positions, more.
_LIKE_LLAMA: tuple[tuple[str, str, int, int, int, int, int | None, int, int, dict[str, Any]], ...] = (
    ("ibm/PowerLM-3b", "granite", 2304, 9216, 40, 36, 36, 49152, 4096, {"tie_word_embeddings": True}),
    ("ibm-granite/granite-3.0-8b-base", "granite", 4096, 12800, 40, 32, 8, 49155, 4096, {"tie_word_embeddings": True}),
    ("ibm-granite/granite-8b-code-base", "llama", 4096, 14336, 36, 32, 8, 49152, 4096, {"tie_word_embeddings": True}),
    ("mistral-community/Mistral-7B-v0.2", "mistral", 4096, 14336, 32, 32, 8, 32000, 32768,
     {"sliding_window": None, "tie_word_embeddings": False}),
    ("01-ai/Yi-34B", "llama", 7168, 20480, 60, 56, 8, 64000, 4096, {}),
    ("stabilityai/stablelm-base-alpha-3b", "gpt_neox", 4096, 16384, 16, 32, None, 50688, 4096,
     {"rotary_pct": 0.25, "use_parallel_residual": True, "tie_word_embeddings": False}),
)  # fmt: skip
_LLAMAS_FIGURES = (
    "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "vocab_size",
    "max_position_embeddings",
)  # fmt: skip

# Id, type, kind, figures.
_BEYOND: tuple[tuple[str, str, Kind, dict[str, Any]], ...] = (
    ("bigcode/gpt_bigcode-santacoder", "gpt_bigcode", "decoder",
     {"n_embd": 2048, "n_layer": 24, "n_head": 16, "n_inner": 8192, "n_positions": 2048, "vocab_size": 49280,
      "multi_query": True, "bos_token_id": 49152, "eos_token_id": 49152}),
    ("timm/vit_giant_patch14_dinov2.lvd142m", "dinov2", "vision",
     {"hidden_size": 1536, "num_hidden_layers": 40, "num_attention_heads": 24, "mlp_ratio": 4, "use_swiglu_ffn": True,
      "image_size": 224, "patch_size": 14}),
    *((id_, type_, "decoder",
       {**{name: n for name, n in zip(_LLAMAS_FIGURES, figures, strict=True) if n is not None}, **others})
      for id_, type_, *figures, others in _LIKE_LLAMA),
)  # fmt: skip

# MPT by size: width, layers, heads, as in llm-foundry's `scripts/train/yamls/pretrain/mpt-*.yaml`; the rows' numbers of
# parameters agree. Its blocks have the shapes of GPT-2's, which stand for them, with a fused kernel and no dropout.
_MPT = {
    "mpt125m": (768, 12, 12),
    "mpt350m": (1024, 24, 16),
    "mpt760m": (1536, 24, 12),
    "mpt1b": (2048, 24, 16),
    "mpt3b": (2560, 32, 20),
    "mpt7b": (4096, 32, 32),
    "mpt13b": (5120, 40, 40),
    "mpt30b": (7168, 48, 56),
    "mpt70b": (8192, 80, 64),
}

# Elements of a row that share a scale in GPTQ checkpoints without groups; all others of the rows have groups of 128:
# `quantize_config.json` of each.
_UNGROUPED = ("mixtral-8x7b-instruct-v0.1-gptq", "llama-2-70b-gptq")


def model_named(name: str) -> ModelSpec | None:
    """Return the model that a row calls `name`, None if its figures aren't known."""
    keys = [_key(name), _key(re.sub(r"(?i)[-_](gptq|instruct(-v[\d.]+)?)", "", name))]
    known = {_key(word): entry.id for entry in catalogue() for word in (entry.id, *entry.names)}
    beyond = {_key(id_): (id_, kind_of, kind, figures) for id_, kind_of, kind, figures in _BEYOND}
    for key in keys:
        if key in _MPT:
            return _mpt(key)
        if key in _SAME_AS or key in known:
            return resolve(_SAME_AS.get(key) or known[key])
        if key in beyond or key + "b" in beyond:
            id_, model_type, kind, figures = beyond.get(key) or beyond[key + "b"]
            return _spec(_HUB.format(id_), id_, model_type, kind, figures)
    return None


def _mpt(key: str) -> ModelSpec:
    width, layers, heads = _MPT[key]
    figures = {"n_embd": width, "n_layer": layers, "n_head": heads, "n_positions": 65536, "vocab_size": 50368}
    figures |= {"activation_function": "gelu", "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    return _spec("https://github.com/mosaicml/llm-foundry", f"mosaicml/{key}", "gpt2", "decoder", figures)


def _spec(reference: str, name: str, model_type: str, kind: Kind, config: dict[str, Any]) -> ModelSpec:
    return ModelSpec(
        reference=reference, name=name, source="catalogue", model_type=model_type, kind=kind, config=config
    )


def gptq_group(name: str) -> int | None:
    """Return how many weights of a row share a scale in a GPTQ checkpoint, None for all."""
    return None if name.lower().rpartition("/")[2] in _UNGROUPED else 128


def _key(name: str) -> str:
    """Return a name without owner, case and separators."""
    key = re.sub(r"[^a-z0-9.]", "", name.rpartition("/")[2].lower())
    return {"stablelmalpha3b": "stablelmbasealpha3b"}.get(key, key)
