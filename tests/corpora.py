"""Workloads of tiny models and files of texts, for tests of samples and of reading them."""

import json
from pathlib import Path
from typing import Any

import pytest
import transformers
from tiny_models import TOKENS

from autotune.errors import InputError
from autotune.training.dataset import training_data
from autotune.training.texts import prepare, text_lengths
from autotune.values.model import ModelSpec, Task
from autotune.values.workload import LengthProfile, Workload

VOCABULARY = 300
TINY = {"num_hidden_layers": 1, "hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2}
BOTH = {
    f"{side}_{name}": value
    for side in ("encoder", "decoder")
    for name, value in {"layers": 1, "ffn_dim": 16, "attention_heads": 2}.items()
}

MODELS: dict[str, dict[str, Any]] = {
    "llama": {"vocab_size": VOCABULARY, **TINY},
    "bert": {"vocab_size": VOCABULARY, **TINY},
    "gpt2": {"vocab_size": VOCABULARY, "n_layer": 1, "n_embd": 16, "n_head": 2, "eos_token_id": 299,
             "bos_token_id": 299},
    "t5": {"vocab_size": VOCABULARY, "d_model": 16, "d_ff": 16, "d_kv": 8, "num_layers": 1, "num_heads": 2,
           "decoder_start_token_id": 0},
    "bart": {"vocab_size": VOCABULARY, "d_model": 16, **BOTH, "num_labels": 2},
    "vit": {"image_size": 32, "patch_size": 16, **TINY},
    "resnet": {"num_channels": 1, "embedding_size": 8, "hidden_sizes": [8], "depths": [1]},
    "wav2vec2": {"vocab_size": 16, **TINY, "conv_dim": [8] * 7, "num_conv_pos_embeddings": 8,
                 "num_conv_pos_embedding_groups": 2},
    "whisper": {"vocab_size": VOCABULARY, "d_model": 16, **BOTH, "num_mel_bins": 4, "max_source_positions": 24,
                "max_target_positions": 24, **TOKENS, "decoder_start_token_id": 1},
    "llava": {
        "image_token_id": 90,
        "text_config": {"model_type": "llama", "vocab_size": 96, **TINY, "pad_token_id": 0},
        "vision_config": {"model_type": "clip_vision_model", **TINY, "num_hidden_layers": 2, "image_size": 16,
                          "patch_size": 8},
    },
}  # fmt: skip


USUAL_MODEL = {
    Task.CAUSAL_LM: "llama",
    Task.SEQ2SEQ_LM: "t5",
    Task.MASKED_LM: "bert",
    Task.SEQUENCE_CLASSIFICATION: "bert",
    Task.IMAGE_CLASSIFICATION: "vit",
    Task.SPEECH_CTC: "wav2vec2",
    Task.SPEECH_SEQ2SEQ: "whisper",
    Task.AUDIO_CLASSIFICATION: "wav2vec2",
    Task.IMAGE_TEXT_TO_TEXT: "llava",
}


def config_of(model_type: str, **changes: Any) -> Any:
    return transformers.CONFIG_MAPPING[model_type](**{**MODELS[model_type], **changes})


def workload_of(task: Task = Task.CAUSAL_LM, model_type: str | None = None, **fields: Any) -> Workload:
    model_type = model_type or USUAL_MODEL[task]
    spec = ModelSpec(
        reference=model_type,
        name=f"tiny/{model_type}",
        source="catalogue",
        model_type=model_type,
        kind="decoder",
        config={**MODELS[model_type], **fields.pop("changes", {})},
        path=fields.pop("path", None),
    )
    return Workload(**{"model": spec, "task": task, "sequence_length": 24, "global_batch_size": 8, **fields})


def jsonl(path: Path, rows: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def texts(path: Path, *values: str | None) -> str:
    return jsonl(path, [{"text": value} for value in values])


def prepared(workload: Workload, directory: Path) -> tuple[LengthProfile, str]:
    """Return the profile of a file's texts, and what is said of them."""
    profile, notes = prepare(workload, directory)
    assert profile is not None
    return profile, "\n".join(notes)


def tokens(workload: Workload, directory: Path) -> list[int]:
    """Return the lengths of the texts of a file in bytes, without their end."""
    prepare(workload, directory)
    return [int(length) - 1 for length in text_lengths(directory)[:, 0]]


def real(workload: Workload, directory: Path, samples: int = 8) -> tuple[Any, Any]:
    prepared(workload, directory)
    return training_data(workload, config_of(workload.model.model_type), samples=samples, directory=directory)


def refusal(workload: Workload, directory: Path) -> str:
    with pytest.raises(InputError) as caught:
        prepare(workload, directory)
    message = str(caught.value)
    assert "\n" not in message
    return message
