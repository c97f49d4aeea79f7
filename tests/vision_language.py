"""Tiny vision-language models, one of every family whose images are made."""

from typing import Any

from conftest import write_model

from autotune.training.build import build_config
from autotune.training.inputs import image_text
from autotune.training.resolve import resolve
from autotune.values.model import ModelSpec, Task
from autotune.values.workload import Workload


def vision_language(*, wide: int = 1, vocabulary: int = 512) -> dict[str, dict[str, Any]]:
    """Return a config of every type; `wide` times 64 is the hidden size, and the edge of an image is 32 pixels."""
    text = {
        "vocab_size": vocabulary, "hidden_size": 64 * wide, "intermediate_size": 128 * wide, "num_hidden_layers": 4,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16 * wide, "max_position_embeddings": 512,
        "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    }  # fmt: skip
    sees = {
        "hidden_size": 32 * wide, "intermediate_size": 64 * wide, "num_hidden_layers": 4, "num_attention_heads": 4,
        "image_size": 32, "patch_size": 8, "num_channels": 3,
    }  # fmt: skip
    llama = {"model_type": "llama", **text}
    clip = {"model_type": "clip_vision_model", **sees}
    siglip = {"model_type": "siglip_vision_model", **sees, "vision_use_head": False}
    qwen = {
        "depth": 4, "num_heads": 4, "in_channels": 3, "patch_size": 4, "temporal_patch_size": 2,
        "spatial_merge_size": 2, "hidden_size": 32 * wide, "out_hidden_size": 64 * wide,
        "intermediate_size": 64 * wide,
    }  # fmt: skip
    marks = {
        "image_token_id": vocabulary - 4, "video_token_id": vocabulary - 3, "vision_start_token_id": vocabulary - 2,
        "vision_end_token_id": vocabulary - 1,
    }  # fmt: skip
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2 * wide, 3 * wide, 3 * wide]}
    image = {"image_token_id": vocabulary - 4}
    turned = {**text, "rope_parameters": rope}
    found = {
        "qwen2_vl": {**marks, "text_config": turned,
                     "vision_config": {**qwen, "embed_dim": 32 * wide, "hidden_size": 64 * wide, "mlp_ratio": 2}},
        "qwen2_5_vl": {**marks, "text_config": turned,
                       "vision_config": {**qwen, "window_size": 16, "fullatt_block_indexes": [3]}},
        "qwen3_vl": {
            **marks,
            "text_config": {**turned, "num_hidden_layers": 6, "rope_parameters": {**rope, "mrope_interleaved": True}},
            "vision_config": {**qwen, "num_position_embeddings": 64, "deepstack_visual_indexes": [1, 2]},
        },
        "llava": {**image, "text_config": llama, "vision_config": clip},
        "paligemma": {**image, "projection_dim": 64 * wide, "text_config": {"model_type": "gemma", **text},
                      "vision_config": siglip},
        "gemma3": {
            **image, "mm_tokens_per_image": 4,
            "text_config": {"model_type": "gemma3_text", **text, "num_hidden_layers": 6, "sliding_window": 16,
                            "sliding_window_pattern": 2},
            "vision_config": siglip,
        },
        "idefics3": {**image, "scale_factor": 2, "text_config": llama, "vision_config": sees},
        "smolvlm": {**image, "scale_factor": 2, "text_config": llama, "vision_config": sees},
        "internvl": {**image, "text_config": {"model_type": "qwen2", **text},
                     "vision_config": {**sees, "image_size": [32, 32], "patch_size": [8, 8]}},
    }  # fmt: skip
    return {name: {"model_type": name, **config} for name, config in found.items()}


FAMILIES = tuple(vision_language())
ANY_SIZE = tuple(name for name in FAMILIES if name.startswith("qwen"))  # their images have no size of their own


def edge(name: str) -> int | None:
    """Return a size of images that is small for a tiny model; None: its own."""
    return 32 if name in ANY_SIZE else None


def tiny_vision_language(folder: Any, name: str, **sizes: int) -> ModelSpec:
    return resolve(str(write_model(folder, vision_language(**sizes)[name])))


def with_images(spec: ModelSpec, name: str, *, images: int = 1, words: int = 64, **fields: Any) -> Workload:
    """A workload of samples of images, as small as `edge` has them, and so many words beside."""
    task = Task.IMAGE_TEXT_TO_TEXT
    shown = image_text(build_config(spec, task), images, edge(name))
    sizes = {"sequence_length": shown.tokens + words, "images": images, "image_size": shown.image.size}
    return Workload(model=spec, task=task, **sizes, **fields)
