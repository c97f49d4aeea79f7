"""Tiny models of every kind, each traced once for all tests of the cost model."""

import functools
import json
from collections.abc import Callable
from typing import Any

import pytest

from autotune.cost.family import Family, Shape
from autotune.cost.profile import Profile
from autotune.training.build import describe
from autotune.training.resolve import default_task, resolve
from autotune.values.model import ModelFacts, ModelSpec, Task

SIZES = {"vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4}
DECODER = {**SIZES, "num_hidden_layers": 4, "num_key_value_heads": 2}
T5 = {"vocab_size": 512, "d_model": 64, "d_kv": 16, "d_ff": 128, "num_heads": 4, "decoder_start_token_id": 0}
SIDE = {"layers": 4, "ffn_dim": 128, "attention_heads": 4}
BOTH = {f"{side}_{name}": value for side in ("encoder", "decoder") for name, value in SIDE.items()}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}

MODELS: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama", **DECODER},
    "a deep llama": {"model_type": "llama", **DECODER, "num_hidden_layers": 8},
    "gpt_neox": {"model_type": "gpt_neox", **SIZES, "num_hidden_layers": 4},
    "bert": {"model_type": "bert", **SIZES, "num_hidden_layers": 4},
    "t5": {"model_type": "t5", **T5, "num_layers": 4, "num_decoder_layers": 4},
    "vit": {"model_type": "vit", **SIZES, "num_hidden_layers": 4, "image_size": 32, "patch_size": 8},
    "wav2vec2": {"model_type": "wav2vec2", **SIZES, "num_hidden_layers": 4, "conv_dim": [16] * 7,
                 "num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 4, "layerdrop": 0.5},
    "sew-d": {"model_type": "sew-d", **SIZES, "feature_layer_norm_eps": 1e-5, "conv_dim": [16] * 13,
              "num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 4},
    **{n: {"model_type": n, "emb_dim": 32, "n_layers": 2, "n_heads": 4, "n_words": 128} for n in ("xlm", "flaubert")},
    "whisper": {"model_type": "whisper", "vocab_size": 512, "d_model": 64, **BOTH, "num_mel_bins": 8,
                "max_source_positions": 64, "max_target_positions": 32, "pad_token_id": 0, "decoder_start_token_id": 1},
    "mixtral": {"model_type": "mixtral", **DECODER, "num_local_experts": 4, "sliding_window": None},
    "switch": {"model_type": "switch_transformers", **T5, "num_layers": 2, "num_decoder_layers": 2, "num_experts": 4,
               "num_sparse_encoder_layers": 1, "num_sparse_decoder_layers": 1, "expert_capacity": 16},
    "a leading dense layer": {
        "model_type": "glm4_moe", **DECODER, **EXPERTS, "num_hidden_layers": 5, "n_routed_experts": 4,
        "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1, "head_dim": 16,
    },
    "layers of two kinds": {"model_type": "qwen2", **DECODER, "num_hidden_layers": 8, "sliding_window": 32,
                            "use_sliding_window": True, "layer_types": ["sliding_attention", "full_attention"] * 4},
    "an odd layer": {"model_type": "qwen2_moe", **DECODER, **EXPERTS, "num_experts": 4,
                     "shared_expert_intermediate_size": 32, "mlp_only_layers": [2]},
    "layers that share keys": {
        "model_type": "gemma3n_text", **DECODER, "num_hidden_layers": 6, "num_kv_shared_layers": 3,
        "layer_types": ["full_attention"] * 6, "vocab_size_per_layer_input": 96, "hidden_size_per_layer_input": 8,
        "laurel_rank": 4, "activation_sparsity_pattern": [0.0] * 6, "head_dim": 16,
    },
    "a depth that can't be set": {"model_type": "funnel", "vocab_size": 128, "block_sizes": [2, 2],
                                  "num_decoder_layers": 2, "d_model": 32, "n_head": 4, "d_head": 8, "d_inner": 48},
}  # fmt: skip

LENGTH, TARGET_LENGTH = 64, 32

# A number of parameters that no extended trace comes to: the model is traced whole.
IMPOSSIBLE = -1


@pytest.fixture(scope="session")
def spec_of(tmp_path_factory) -> Callable[[str], ModelSpec]:
    """Return a function from the name of a tiny model to what it is built from."""

    @functools.cache
    def resolved(name: str) -> ModelSpec:
        folder = tmp_path_factory.mktemp(name.replace(" ", "-"))
        (folder / "config.json").write_text(json.dumps({"max_position_embeddings": 256, **MODELS[name]}))
        return resolve(str(folder))

    return resolved


@pytest.fixture(scope="session")
def facts_of(spec_of) -> Callable[..., ModelFacts]:
    """Return a function to what the classes of a tiny model offer."""

    @functools.cache
    def described(name: str, task: Task) -> ModelFacts:
        return describe(spec_of(name), task)

    return lambda name, task=None: described(name, task or default_task(spec_of(name)))


@pytest.fixture(scope="session")
def profile_of(spec_of, facts_of) -> Callable[..., Profile]:
    """Return a function that traces a tiny model; fp32 on a CPU unless fields of the family say otherwise."""
    from autotune.cost.profiler import profile

    @functools.cache
    def traced(name: str, task: Task, family: Family, whole: bool) -> Profile:
        shape = Shape(task=task, length=LENGTH, target_length=TARGET_LENGTH if task.has_targets else None)
        parameters = IMPOSSIBLE if whole else facts_of(name, task).parameters
        return profile(spec_of(name), family, shape, parameters=parameters)

    def usual(name: str, task: Task | None = None, *, whole: bool = False, **family: Any) -> Profile:
        task = task or default_task(spec_of(name))
        attention = facts_of(name, task).attn_implementations[0]
        fields = {"device": "cpu", "dtype": "float32", "attn_implementation": attention, **family}
        return traced(name, task, Family(**fields), whole)

    return usual
