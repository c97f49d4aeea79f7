"""Models, data and metrics on which other people's training scripts run in seconds (`test_unchanged_scripts`).

python tests/unchanged_data.py FOLDER     where examples/make_tiny.py has written its models and texts
"""

import json
import sys
import wave
from pathlib import Path

import numpy as np

# Metrics as `evaluate.load` finds them in the working directory.
_METRICS = {
    "accuracy": "{'accuracy': float(np.mean(np.asarray(predictions) == np.asarray(references)))}",
    "rouge": "{'rouge': float(np.mean([p == r for p, r in zip(predictions, references)]))}",
    "wer": "float(np.mean([p != r for p, r in zip(predictions, references)]))",
    "sacrebleu": "{'score': float(np.mean([p in r for p, r in zip(predictions, references)]))}",
    "squad": "{'squad': float(len(predictions))}",
}
_METRIC = '''
import datasets
import evaluate
import numpy as np


class Own(evaluate.Metric):
    def _info(self):
        features = datasets.Features(dict.fromkeys(("predictions", "references"), datasets.Value("string")))
        return evaluate.MetricInfo(description="", citation="", inputs_description="", features=features)

    def compute(self, *, predictions, references, **kwargs):
        """Take any features."""
        return '''
_FEW = 24


def make(folder: Path) -> None:
    """Write everything into the folder in which `make_tiny` has written."""
    texts = [json.loads(line)["text"] for line in (folder / "texts.json").read_text().splitlines()]
    words = [" ".join(text.split()[:40]) or "nothing" for text in texts]
    for name, returned in _METRICS.items():
        (folder / name).mkdir(exist_ok=True)
        (folder / name / f"{name}.py").write_text(f"{_METRIC}{returned}\n")
    _rows(folder, words)
    _preferences(folder, words)
    _images(folder)
    _speech(folder, words)
    _models(folder)
    for name in ("abbrev_types.txt", "collocations.tab", "sent_starters.txt", "ortho_context.tab"):
        _write(folder / "nltk_data" / "tokenizers" / "punkt_tab" / "english" / name, [])
    (folder / "nltk_data" / "tokenizers" / "punkt").mkdir()
    rewards = "def brief(completions, **kwargs):\n    return [-float(len(str(each))) for each in completions]\n"
    (folder / "rewards.py").write_text(rewards)


def _write(path: Path, rows: list[dict]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def _rows(folder: Path, words: list[str]) -> None:
    tables = {
        "summaries": [{"text": text, "summary": text[:40]} for text in words],
        "translations": [{"translation": {"en": text, "de": text[:40]}} for text in words],
    }
    for name, rows in tables.items():
        _write(folder / f"{name}.json", rows)
        _write(folder / f"few-{name}.json", rows[:_FEW])
    _write(folder / "few-texts.json", [{"text": text} for text in words[:_FEW]])
    questions = [
        {
            "id": str(number), "title": "", "context": text, "question": "What comes first?",
            "answers": {"text": [text.split()[0]], "answer_start": [0]},
        }
        for number, text in enumerate(words)
    ]  # fmt: skip
    (folder / "questions.json").write_text(json.dumps({"data": questions}))
    (folder / "few-questions.json").write_text(json.dumps({"data": questions[:_FEW]}))


def _preferences(folder: Path, words: list[str]) -> None:
    tables: dict[str, list[dict]] = {"chats": [], "preferences": [], "judged": [], "prompts": []}
    for number, text in enumerate(words):
        asked = [{"role": "user", "content": text[:60]}]
        right, wrong = ([{"role": "assistant", "content": content}] for content in (text, text[::-1]))
        tables["chats"].append({"messages": asked + right})
        tables["preferences"].append({"prompt": asked, "chosen": right, "rejected": wrong})
        tables["judged"].append({"prompt": asked, "completion": right, "label": bool(number % 2)})
        tables["prompts"].append({"prompt": asked})
    for name, rows in tables.items():
        _write(folder / name / "train.json", rows)
        _write(folder / name / "test.json", rows[:_FEW])


def _images(folder: Path) -> None:
    from datasets import Dataset, Features, Image, List, Value
    from PIL import Image as Picture

    draw = np.random.default_rng(0)
    pictures = [Picture.fromarray(draw.integers(0, 255, (32, 32, 3), dtype=np.uint8)) for _ in range(60)]
    for number, picture in enumerate(pictures):
        kind = folder / "images" / ("cat" if number % 2 else "dog")
        kind.mkdir(parents=True, exist_ok=True)
        picture.save(kind / f"{number}.png")
    part = Features({"type": Value("string"), "text": Value("string")})
    features = Features(
        {"images": List(Image()), "messages": List(Features({"role": Value("string"), "content": List(part)}))}
    )
    turns = [
        {"role": "user", "content": [{"type": "image", "text": None}, {"type": "text", "text": "What is this?"}]},
        {"role": "assistant", "content": [{"type": "text", "text": "noise"}]},
    ]
    rows = {"images": [[picture] for picture in pictures], "messages": [turns] * len(pictures)}
    (folder / "pictures").mkdir(exist_ok=True)
    Dataset.from_dict(rows, features=features).to_parquet(folder / "pictures" / "train.parquet")


def _speech(folder: Path, words: list[str]) -> None:
    draw = np.random.default_rng(0)
    for split, count in (("train", 60), ("test", _FEW)):
        place = folder / "speech" / split
        place.mkdir(parents=True, exist_ok=True)
        lines = ["file_name,text"]
        for number in range(count):
            sound = draw.integers(-2000, 2000, 16000 * (5 + number % 5) // 10, dtype=np.int16)
            with wave.open(str(place / f"{number}.wav"), "wb") as file:
                file.setnchannels(1)
                file.setsampwidth(2)
                file.setframerate(16000)
                file.writeframes(sound.tobytes())
            text = "".join(c for c in words[number].lower() if c.isalpha() or c == " ")[:12] or "a"
            lines.append(f"{number}.wav,{text}")
        (place / "metadata.csv").write_text("\n".join(lines) + "\n")


def _models(folder: Path) -> None:
    import torch
    import transformers
    from transformers import AutoConfig, PreTrainedTokenizerFast

    torch.manual_seed(0)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder / "bert")
    tokenizer.add_special_tokens({"mask_token": "<mask>"})
    masked = transformers.AutoModelForMaskedLM.from_config(
        AutoConfig.from_pretrained(folder / "bert", vocab_size=len(tokenizer))
    )
    figures = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4, "vocab_size": 2000}
    t5 = AutoConfig.for_model("t5", **figures, decoder_start_token_id=0, pad_token_id=0, eos_token_id=3)
    small = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    vit = AutoConfig.for_model("vit", **small, image_size=32, patch_size=8)
    heard = {"conv_dim": [8] * 7, "num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 4}
    wav2vec2 = AutoConfig.for_model("wav2vec2", **small, **heard)
    made = {
        "masked": (masked, tokenizer),
        "t5": (
            transformers.AutoModelForSeq2SeqLM.from_config(t5),
            PreTrainedTokenizerFast.from_pretrained(folder / "llama"),
        ),
        "vit": (
            transformers.AutoModelForImageClassification.from_config(vit),
            transformers.ViTImageProcessor(size={"height": 32, "width": 32}),
        ),
        "wav2vec2": (
            transformers.AutoModel.from_config(wav2vec2),
            transformers.Wav2Vec2FeatureExtractor(return_attention_mask=False),
        ),
        "whisper": _whisper(folder),
        "vlm": _vlm(folder),
    }
    for name, parts in made.items():
        for part in parts:
            part.save_pretrained(folder / name)
    # run_speech_recognition_ctc.py takes a local model for a checkpoint to go on from.
    control = [transformers.TrainerControl()]
    transformers.TrainerState(train_batch_size=4, stateful_callbacks=control).save_to_json(
        str(folder / "wav2vec2" / "trainer_state.json")
    )


def _whisper(folder: Path) -> tuple:
    import transformers

    model = json.loads((folder / "llama" / "tokenizer.json").read_text())["model"]
    special = {"pad_token": "<pad>", "unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"}
    tokenizer = transformers.WhisperTokenizer(
        vocab=model["vocab"], merges=[tuple(m) for m in model["merges"]], **special
    )
    figures = {
        "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48,
        "encoder_attention_heads": 4, "decoder_attention_heads": 4, "num_mel_bins": 8, "max_source_positions": 50,
        "max_target_positions": 64, "vocab_size": len(tokenizer), "pad_token_id": 0, "bos_token_id": 2,
        "eos_token_id": 3, "decoder_start_token_id": 2, "suppress_tokens": None, "begin_suppress_tokens": None,
    }  # fmt: skip
    features = transformers.WhisperFeatureExtractor(feature_size=8, chunk_length=1)
    config = transformers.AutoConfig.for_model("whisper", **figures)
    processor = transformers.WhisperProcessor(feature_extractor=features, tokenizer=tokenizer)
    return transformers.AutoModelForSpeechSeq2Seq.from_config(config), processor


def _vlm(folder: Path) -> tuple:
    import transformers

    tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(folder / "llama")
    tokenizer.add_special_tokens({"additional_special_tokens": ["<image>"]})
    small = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = transformers.AutoConfig.for_model(
        "llava",
        text_config={"model_type": "llama", **small, "vocab_size": len(tokenizer), "num_key_value_heads": 2},
        vision_config={"model_type": "clip_vision_model", **small, "image_size": 32, "patch_size": 8},
        image_token_index=tokenizer.convert_tokens_to_ids("<image>"),
    )
    template = (
        "{% for message in messages %}<s>{{ message['role'] }}\n{% for part in message['content'] %}"
        "{% if part['type'] == 'image' %}<image>{% else %}{{ part['text'] }}{% endif %}{% endfor %}</s>\n{% endfor %}"
    )
    processor = transformers.LlavaProcessor(
        image_processor=transformers.CLIPImageProcessor(
            size={"shortest_edge": 32}, crop_size={"height": 32, "width": 32}
        ),
        tokenizer=tokenizer, patch_size=8, vision_feature_select_strategy="default", chat_template=template,
        num_additional_image_tokens=1,
    )  # fmt: skip
    return transformers.AutoModelForImageTextToText.from_config(config), processor


if __name__ == "__main__":
    make(Path(sys.argv[1]))
