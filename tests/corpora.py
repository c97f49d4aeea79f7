"""Workloads of tiny models and files of texts, for tests of samples and of reading them."""

import json
from pathlib import Path
from typing import Any

import transformers
from optimizer_steps import BART, BERT, GPT2, LLAMA, T5, WAV2VEC2, WHISPER, plain
from tiny_models import TINY
from vision_language import vision_language

from autotune.values.model import ModelSpec, Task
from autotune.values.workload import Workload

VOCABULARY = 300  # bytes are among its ids
OF_TEXT = {"llama": LLAMA, "bert": BERT, "gpt2": GPT2, "t5": T5, "bart": BART}

MODELS: dict[str, dict[str, Any]] = {
    **{name: {**plain(figures), "vocab_size": VOCABULARY} for name, figures in OF_TEXT.items()},
    "whisper": {**plain(WHISPER), "vocab_size": VOCABULARY, "max_target_positions": 24},
    "wav2vec2": plain(WAV2VEC2),
    "vit": plain(TINY["vit"]),
    "resnet": {"num_channels": 1, "embedding_size": 8, "hidden_sizes": [8], "depths": [1]},
    "llava": plain(vision_language()["llava"]),
}

USUAL_MODEL = {
    Task.CAUSAL_LM: "llama", Task.SEQ2SEQ_LM: "t5", Task.MASKED_LM: "bert", Task.SEQUENCE_CLASSIFICATION: "bert",
    Task.IMAGE_CLASSIFICATION: "vit", Task.SPEECH_CTC: "wav2vec2", Task.SPEECH_SEQ2SEQ: "whisper",
    Task.AUDIO_CLASSIFICATION: "wav2vec2", Task.IMAGE_TEXT_TO_TEXT: "llava",
}  # fmt: skip


def config_of(model_type: str, **changes: Any) -> Any:
    return transformers.CONFIG_MAPPING[model_type](**{**MODELS[model_type], **changes})


def workload_of(task: Task = Task.CAUSAL_LM, model_type: str | None = None, **fields: Any) -> Workload:
    model_type = model_type or USUAL_MODEL[task]
    spec = ModelSpec(
        reference=model_type, name=f"tiny/{model_type}", source="catalogue", model_type=model_type, kind="decoder",
        config={**MODELS[model_type], **fields.pop("changes", {})}, path=fields.pop("path", None),
    )  # fmt: skip
    return Workload(**{"model": spec, "task": task, "sequence_length": 24, "global_batch_size": 8, **fields})


def jsonl(path: Path | str, rows: list[dict[str, Any]]) -> str:
    Path(path).write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def save_tokenizer(folder: Path | str, words: list[str], unknown: str, **special: str) -> None:
    """Write a tokenizer of whole words beside a model, `unknown` being the one for all others."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    made = Tokenizer(models.WordLevel({word: n for n, word in enumerate(words)}, unk_token=unknown))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    transformers.PreTrainedTokenizerFast(tokenizer_object=made, **special).save_pretrained(str(folder))


def texts(path: Path | str, *values: str | None) -> str:
    return jsonl(path, [{"text": value} for value in values])
