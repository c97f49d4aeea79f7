"""Models small enough to train a step in milliseconds, as their config.json would be."""

from conftest import write_model

from autotune.training.build import build_model
from autotune.training.resolve import resolve

TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
SIZES = {"vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
DECODER = {**SIZES, "num_key_value_heads": 2, "max_position_embeddings": 64, "bos_token_id": 1, "eos_token_id": 2}
T5 = {"vocab_size": 96, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4}
SIDE = {"layers": 2, "ffn_dim": 48, "attention_heads": 4}
BOTH = {f"{side}_{name}": value for side in ("encoder", "decoder") for name, value in SIDE.items()}

TINY = {
    "llama": DECODER,
    "mixtral": {**DECODER, "num_local_experts": 4, "num_experts_per_tok": 2},
    "mamba": {"vocab_size": 96, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 4, **dict.fromkeys(TOKENS, 0)},
    "bert": {**SIZES, "max_position_embeddings": 64},
    "roberta": {**SIZES, "num_hidden_layers": 1, "max_position_embeddings": 66, "pad_token_id": 1, "bos_token_id": 0,
                "eos_token_id": 2},
    "t5": {**T5, "is_encoder_decoder": True, "decoder_start_token_id": 0, "n_positions": 512},
    "wav2vec2": {**SIZES, "vocab_size": 32, "conv_dim": [8] * 7, "num_conv_pos_embeddings": 16,
                 "num_conv_pos_embedding_groups": 4},
    "whisper": {"is_encoder_decoder": True, "vocab_size": 96, "d_model": 32, **BOTH, "num_mel_bins": 8,
                "max_source_positions": 30, "max_target_positions": 20, **TOKENS, "decoder_start_token_id": 1},
    "vit": {"image_size": 16, "patch_size": 8, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
            "num_attention_heads": 4, "id2label": {"0": "cat", "1": "dog", "2": "bird"}},
}  # fmt: skip
TINY = {name: {"model_type": name, **figures} for name, figures in TINY.items()}


# Rates of wav2vec 2.0 that its config class sets where a config.json doesn't.
NO_DROPOUT = (
    "hidden_dropout", "activation_dropout", "attention_dropout", "feat_proj_dropout", "final_dropout", "layerdrop",
    "mask_feature_prob",
)  # fmt: skip


def tiny(tmp_path, name, **changes):
    return resolve(str(write_model(tmp_path / f"tiny-{name}", {**TINY[name], **changes})))


def on_cpu(spec, task, **options):
    return build_model(spec, task, **{"dtype": "float32", "attn_implementation": None, "device": "cpu", **options})


def without_dropout(config):
    return {k: 0.0 if "drop" in k or k.endswith("pdrop") else v for k, v in config.items()}
