"""Tiny configurations: one of every family of models that is promised, and some that the catalogue doesn't know."""

import tiny_models
from conftest import TINY_LLAMA
from tiny_models import BOTH, TOKENS

SIZES = {**tiny_models.SIZES, "vocab_size": 128, "max_position_embeddings": 64, **TOKENS}
DECODER = {**SIZES, "num_key_value_heads": 2, "head_dim": 8}
GPT2 = {"vocab_size": 128, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, **TOKENS}
T5 = {
    **tiny_models.T5, "vocab_size": 128, "pad_token_id": 0, "eos_token_id": 1, "decoder_start_token_id": 0,
    "is_encoder_decoder": True,
}  # fmt: skip
BART = {"vocab_size": 128, "d_model": 32, **BOTH, "max_position_embeddings": 64, **TOKENS, "is_encoder_decoder": True}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 16}
WAVES = {**SIZES, "conv_dim": [8] * 7, "num_conv_pos_embeddings": 8, "num_conv_pos_embedding_groups": 2}
PATCHES = {**SIZES, "image_size": 16, "patch_size": 8}

FAMILIES = {
    "BERT": {"model_type": "bert", **SIZES},
    "RoBERTa": {"model_type": "roberta", **SIZES, "max_position_embeddings": 66, "pad_token_id": 1},
    "DeBERTa": {"model_type": "deberta-v2", **SIZES, "relative_attention": True, "pos_att_type": ["p2c", "c2p"]},
    "GPT-2": {"model_type": "gpt2", **GPT2},
    "OPT": {"model_type": "opt", **SIZES, "ffn_dim": 48, "word_embed_proj_dim": 32},
    "BLOOM": {"model_type": "bloom", "vocab_size": 128, "hidden_size": 32, "n_layer": 2, "n_head": 4, **TOKENS},
    "Pythia": {"model_type": "gpt_neox", **SIZES},
    "Llama": TINY_LLAMA,
    "Mistral": {"model_type": "mistral", **DECODER},
    "Qwen": {"model_type": "qwen3", **DECODER},
    "Gemma": {"model_type": "gemma2", **DECODER, "query_pre_attn_scalar": 8},
    "Phi": {"model_type": "phi3", **DECODER},
    "T5": {"model_type": "t5", **T5},
    "mT5": {"model_type": "mt5", **T5, "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False},
    "BART": {"model_type": "bart", **BART},
    "Switch": {"model_type": "switch_transformers", **T5, "num_experts": 4, "num_sparse_encoder_layers": 1,
               "num_sparse_decoder_layers": 1},
    "Mixtral": {"model_type": "mixtral", **DECODER, "num_local_experts": 4},
    "Qwen-MoE": {"model_type": "qwen3_moe", **DECODER, **EXPERTS, "num_experts": 4},
    "DeepSeek": {"model_type": "deepseek_v3", **SIZES, **EXPERTS, "n_routed_experts": 4, "first_k_dense_replace": 1,
                 "n_group": 1, "topk_group": 1, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 8,
                 "qk_rope_head_dim": 8, "v_head_dim": 8, "num_key_value_heads": 4},
    "ViT": {"model_type": "vit", **PATCHES},
    "Swin": {"model_type": "swin", "image_size": 32, "patch_size": 4, "embed_dim": 16, "depths": [2, 2],
             "num_heads": [2, 4], "window_size": 4},
    "ResNet": {"model_type": "resnet", "embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1]},
    "ImageGPT": {"model_type": "imagegpt", **GPT2},
    "wav2vec 2.0": {"model_type": "wav2vec2", **WAVES},
    "Whisper": {"model_type": "whisper", "vocab_size": 128, "d_model": 32, **BOTH, "num_mel_bins": 8,
                "max_source_positions": 32, "max_target_positions": 16, **TOKENS, "decoder_start_token_id": 1},
    "Mamba": {"model_type": "mamba", "vocab_size": 128, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 4},
}  # fmt: skip

# Types that the catalogue doesn't name, and why one is refused: None where it is tuned.
STRANGERS = {
    "camembert": ({**SIZES, "max_position_embeddings": 66, "pad_token_id": 1}, None),
    "mpnet": (SIZES, None),
    "fnet": (SIZES, None),
    "roformer": ({**SIZES, "embedding_size": 32}, None),
    "longformer": ({**SIZES, "attention_window": 8, "max_position_embeddings": 66, "pad_token_id": 1}, None),
    "big_bird": ({**SIZES, "attention_type": "original_full"}, None),
    "squeezebert": ({**SIZES, "embedding_size": 32}, None),
    "xlnet": ({"vocab_size": 128, "d_model": 32, "n_layer": 2, "n_head": 4, "d_inner": 48, **TOKENS}, None),
    "codegen": ({**GPT2, "rotary_dim": 4}, None),
    "ctrl": ({**GPT2, "dff": 48}, None),
    "xglm": (
        {"vocab_size": 128, "d_model": 32, "ffn_dim": 48, "num_layers": 2, "attention_heads": 4, **TOKENS}, None,
    ),
    "granite": (DECODER, None),
    "olmo2": (DECODER, None),
    "glm": ({**DECODER, "partial_rotary_factor": 0.5}, None),
    "mamba2": (
        {"vocab_size": 128, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 8, "num_heads": 8, "head_dim": 8,
         "n_groups": 1, **TOKENS},
        None,
    ),
    "rwkv": ({"vocab_size": 128, "hidden_size": 32, "num_hidden_layers": 2, "context_length": 64}, None),
    "pegasus": ({**BART, "decoder_start_token_id": 0}, None),
    "longt5": ({**T5, "local_radius": 7}, None),
    "prophetnet": (
        {"vocab_size": 128, "hidden_size": 32, "num_encoder_layers": 2, "num_decoder_layers": 2,
         "num_encoder_attention_heads": 4, "num_decoder_attention_heads": 4, "encoder_ffn_dim": 48,
         "decoder_ffn_dim": 48, **TOKENS, "decoder_start_token_id": 1},
        None,
    ),
    "beit": (PATCHES, None),
    "regnet": ({"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1], "groups_width": 8}, None),
    "dinov2": ({**PATCHES, "mlp_ratio": 2}, None),
    "poolformer": ({"hidden_sizes": [8, 16, 16, 16], "depths": [1, 1, 1, 1]}, None),
    "data2vec-audio": (WAVES, None),
    "clip": ({"text_config": SIZES, "vision_config": PATCHES, "projection_dim": 16}, None),
    "canine": ({**SIZES, "num_hash_buckets": 64, "num_hash_functions": 2, "local_transformer_stride": 8}, None),
    "pp_lcnet": ({}, "returns no loss"),
    "siglip2": ({}, "needs images cut into patches"),
    "speecht5": ({}, "no head that can be trained here"),
    "encodec": ({}, "no head that can be trained here"),
}  # fmt: skip
