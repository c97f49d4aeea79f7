"""Samples, batches and the reading of the user's texts."""

from __future__ import annotations

import gzip
import json
import os
import pickle
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch.utils.data import DataLoader

from autotune.errors import InputError, RunDirectoryError
from autotune.training.corpus import BYTE_LEVEL, MAX_SAMPLES
from autotune.training.dataset import IGNORED, IMAGES, Corpus, prepare, training_data
from autotune.values.config import SYNTHETIC_SAMPLES, Workload
from autotune.values.model import ModelSpec, Task

EXAMPLE = Path(__file__).parents[2] / "examples" / "make_texts.py"
VOCABULARY = 300
TINY = {"num_hidden_layers": 1, "hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {"vocab_size": VOCABULARY, **TINY},
    "bert": {"vocab_size": VOCABULARY, **TINY},
    "gpt2": {
        "vocab_size": VOCABULARY, "n_layer": 1, "n_embd": 16, "n_head": 2, "eos_token_id": 299,
        "bos_token_id": 299,
    },
    "t5": {
        "vocab_size": VOCABULARY, "d_model": 16, "d_ff": 16, "d_kv": 8, "num_layers": 1, "num_heads": 2,
        "decoder_start_token_id": 0,
    },
    "bart": {
        "vocab_size": VOCABULARY, "d_model": 16, "encoder_layers": 1, "decoder_layers": 1,
        "encoder_attention_heads": 2, "decoder_attention_heads": 2, "encoder_ffn_dim": 16,
        "decoder_ffn_dim": 16, "num_labels": 2,
    },
    "vit": {"image_size": 32, "patch_size": 16, **TINY},
    "resnet": {"num_channels": 1, "embedding_size": 8, "hidden_sizes": [8], "depths": [1]},
    "wav2vec2": {
        "vocab_size": 16, **TINY, "conv_dim": [8] * 7, "num_conv_pos_embeddings": 8,
        "num_conv_pos_embedding_groups": 2,
    },
    "whisper": {
        "vocab_size": VOCABULARY, "d_model": 16, "encoder_layers": 1, "decoder_layers": 1,
        "encoder_attention_heads": 2, "decoder_attention_heads": 2, "encoder_ffn_dim": 16, "decoder_ffn_dim": 16,
        "num_mel_bins": 4, "max_source_positions": 24, "max_target_positions": 24, "pad_token_id": 0,
        "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1,
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
}
TEXT_TASKS = [task for task in Task.heads() if task.takes_text]


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


def synthetic(task: Task, model_type: str | None = None, samples: int = 16, **fields: Any) -> tuple[Any, Any]:
    workload = workload_of(task, model_type, **fields)
    return training_data(workload, config_of(workload.model.model_type), samples=samples, directory=None)


def jsonl(path: Path, rows: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def texts(path: Path, *values: str | None) -> str:
    return jsonl(path, [{"text": value} for value in values])


def prepared(workload: Workload, directory: Path) -> Corpus:
    corpus = prepare(workload, directory)
    assert corpus is not None
    return corpus


def real(workload: Workload, directory: Path, samples: int = 8) -> tuple[Any, Any]:
    prepared(workload, directory)
    return training_data(workload, config_of(workload.model.model_type), samples=samples, directory=directory)


def refusal(workload: Workload, directory: Path) -> str:
    with pytest.raises(InputError) as caught:
        prepare(workload, directory)
    message = str(caught.value)
    assert "\n" not in message
    return message


def decoded(ids: torch.Tensor) -> str:
    return bytes(int(i) - 3 for i in ids[:-1]).decode()


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


# --- synthetic samples --------------------------------------------------------------------------------------


@pytest.mark.parametrize("task", Task.heads())
def test_a_data_set_is_as_long_as_asked(task: Task) -> None:
    data, _ = synthetic(task, samples=10_000)
    assert len(data) == 10_000


def test_a_data_set_ends_after_its_length() -> None:
    data, _ = synthetic(Task.CAUSAL_LM, samples=3)
    assert len(list(data)) == 3


@pytest.mark.parametrize("task", Task.heads())
def test_indices_wrap_around_the_samples_there_are(task: Task) -> None:
    data, _ = synthetic(task, samples=2 * SYNTHETIC_SAMPLES)
    assert same(data[5], data[SYNTHETIC_SAMPLES + 5])


@pytest.mark.parametrize("task", Task.heads())
def test_items_depend_on_seed_and_index_alone(task: Task) -> None:
    first, second = synthetic(task)[0], synthetic(task)[0]
    second[11]
    assert all(same(first[i], second[i]) for i in range(16))


@pytest.mark.parametrize("task", Task.heads())
def test_another_seed_gives_other_samples(task: Task) -> None:
    first, second = synthetic(task)[0], synthetic(task, seed=7)[0]
    assert not all(same(first[i], second[i]) for i in range(16))


@pytest.mark.parametrize("task", Task.heads())
def test_labels_are_int64(task: Task) -> None:
    data, _ = synthetic(task)
    assert data[0]["labels"].dtype is torch.int64


@pytest.mark.parametrize("task", Task.heads())
def test_samples_and_collator_can_be_pickled(task: Task) -> None:
    data, collator = synthetic(task)
    again, collator_again = pickle.loads(pickle.dumps((data, collator)))
    assert same(collator([data[3]]), collator_again([again[3]]))


@pytest.mark.parametrize("task", Task.heads())
def test_a_model_trains_on_a_synthetic_batch(task: Task) -> None:
    data, collator = synthetic(task)
    assert loss_of(task, USUAL_MODEL[task], collator([data[i] for i in range(4)])) > 0


@pytest.mark.parametrize("task", TEXT_TASKS)
def test_synthetic_texts_have_the_length_of_the_workload(task: Task) -> None:
    data, _ = synthetic(task, sequence_length=17)
    assert {len(data[i]["input_ids"]) for i in range(16)} == {17}


@pytest.mark.parametrize("task", TEXT_TASKS)
def test_synthetic_texts_have_no_attention_mask(task: Task) -> None:
    data, collator = synthetic(task)
    assert collator([data[0], data[1]]).keys() == {"input_ids", "labels"}


@pytest.mark.parametrize("model_type", ["llama", "bert", "gpt2", "t5", "bart"])
def test_synthetic_ids_are_ordinary_ones_of_the_vocabulary(model_type: str) -> None:
    config = config_of(model_type)
    data, _ = synthetic(Task.CAUSAL_LM, model_type, samples=SYNTHETIC_SAMPLES)
    ids = torch.stack([data[i]["input_ids"] for i in range(SYNTHETIC_SAMPLES)])[:, :-1]
    special = {getattr(config, f"{name}_token_id", None) for name in ("pad", "eos", "bos")}
    assert ids.max() < VOCABULARY
    assert not special & set(ids.unique().tolist())


def test_synthetic_texts_end_with_the_end_token() -> None:
    data, _ = synthetic(Task.SEQ2SEQ_LM, "t5", target_length=9)
    assert (data[0]["input_ids"][-1], data[0]["labels"][-1]) == (1, 1)


def test_the_first_of_several_end_tokens_is_used() -> None:
    config = config_of("llama", eos_token_id=[7, 8])
    data, _ = training_data(workload_of(), config, samples=4, directory=None)
    assert data[0]["input_ids"][-1] == 7
    assert 8 not in data[0]["input_ids"]


def test_causal_labels_are_the_inputs() -> None:
    data, _ = synthetic(Task.CAUSAL_LM)
    assert torch.equal(data[0]["input_ids"], data[0]["labels"])


def test_targets_have_the_target_length() -> None:
    data, _ = synthetic(Task.SEQ2SEQ_LM, target_length=9)
    assert len(data[0]["labels"]) == 9


def test_targets_are_as_long_as_the_sequence_by_default() -> None:
    data, _ = synthetic(Task.SEQ2SEQ_LM, sequence_length=13)
    assert len(data[0]["labels"]) == 13


def test_fifteen_percent_of_the_positions_are_masked() -> None:
    data, _ = synthetic(Task.MASKED_LM, sequence_length=100)
    assert {int((data[i]["labels"] != IGNORED).sum()) for i in range(16)} == {15}


def test_masked_labels_are_the_ids_at_their_positions() -> None:
    data, _ = synthetic(Task.MASKED_LM)
    labelled = data[0]["labels"] != IGNORED
    assert torch.equal(data[0]["labels"][labelled], data[0]["input_ids"][labelled])


def test_a_single_token_is_masked() -> None:
    data, _ = synthetic(Task.MASKED_LM, sequence_length=1)
    assert (data[0]["labels"] != IGNORED).all()


def test_classes_are_those_of_the_head() -> None:
    config = config_of("bert", num_labels=5)
    data, _ = training_data(workload_of(Task.SEQUENCE_CLASSIFICATION), config, samples=200, directory=None)
    assert {int(data[i]["labels"]) for i in range(200)} == set(range(5))


def test_images_have_the_shape_of_the_config() -> None:
    config = config_of("vit", image_size=(32, 48), num_channels=2)
    data, _ = training_data(workload_of(Task.IMAGE_CLASSIFICATION), config, samples=1, directory=None)
    assert (data[0]["pixel_values"].shape, data[0]["pixel_values"].dtype) == ((2, 32, 48), torch.float32)


def test_imagegpt_reads_the_clusters_of_its_pixels_colours() -> None:
    config = transformers.ImageGPTConfig(vocab_size=9, n_positions=16)
    data, _ = training_data(workload_of(Task.IMAGE_CLASSIFICATION), config, samples=8, directory=None)
    ids = torch.stack([data[i]["input_ids"] for i in range(8)])
    assert ids.shape == (8, 16)
    assert set(ids.unique().tolist()) == set(range(8))  # the ninth starts a sequence


def test_images_are_224_pixels_wide_when_the_config_has_no_size() -> None:
    data, _ = synthetic(Task.IMAGE_CLASSIFICATION, "resnet")
    assert data[0]["pixel_values"].shape == (1, 224, 224)


def test_recordings_have_the_length_that_gives_so_many_frames() -> None:
    data, _ = synthetic(Task.SPEECH_CTC, sequence_length=24)
    assert data[0]["input_values"].shape == (23 * 320 + 400,)  # a stride of 20 ms and a window of 25, at 16 kHz


def test_transcripts_are_shorter_than_the_recording_and_hold_no_blank() -> None:
    data, _ = synthetic(Task.SPEECH_CTC, sequence_length=24, samples=200)
    assert {len(data[i]["labels"]) for i in range(200)} == {6}
    assert all((data[i]["labels"] != 0).all() for i in range(200))


def test_a_spectrogram_has_the_size_of_the_config_whatever_the_length() -> None:
    data, _ = synthetic(Task.SPEECH_SEQ2SEQ, sequence_length=10, target_length=9)
    assert data[0]["input_features"].shape == (4, 48)
    assert len(data[0]["labels"]) == 9


def test_images_are_reused() -> None:
    data, _ = synthetic(Task.IMAGE_CLASSIFICATION, samples=100)
    first, again = data[1]["pixel_values"], data[1 + IMAGES]["pixel_values"]
    assert first.data_ptr() == again.data_ptr()


# --- real samples -------------------------------------------------------------------------------------------


def test_synthetic_data_need_no_preparation(tmp_path: Path) -> None:
    assert prepare(workload_of(), tmp_path) is None
    assert not list(tmp_path.iterdir())


def test_rows_hold_the_texts(tmp_path: Path) -> None:
    data, _ = real(workload_of(dataset=texts(tmp_path / "a.jsonl", "one", "zwölf")), tmp_path / "run")
    assert [decoded(data[i]["input_ids"]) for i in range(3)] == ["one", "zwölf", "one"]


@pytest.mark.parametrize("task", TEXT_TASKS)
def test_a_model_trains_on_a_real_batch(task: Task, tmp_path: Path) -> None:
    dataset = texts(tmp_path / "a.jsonl", "a", "a longer one", "the longest of the three")
    data, collator = real(workload_of(task, dataset=dataset), tmp_path / "run")
    assert loss_of(task, USUAL_MODEL[task], collator([data[i] for i in range(3)])) > 0


def test_heads_that_look_for_the_end_token_find_it(tmp_path: Path) -> None:
    task, dataset = Task.SEQUENCE_CLASSIFICATION, texts(tmp_path / "a.jsonl", "a", "a longer one")
    data, collator = real(workload_of(task, "bart", dataset=dataset), tmp_path / "run")
    assert loss_of(task, "bart", collator([data[0], data[1]])) > 0


@pytest.mark.parametrize("task", TEXT_TASKS)
def test_batches_are_as_long_as_their_longest_text(task: Task, tmp_path: Path) -> None:
    dataset = texts(tmp_path / "a.jsonl", "abc", "abcdef", "abcdefghi")
    data, collator = real(workload_of(task, dataset=dataset), tmp_path / "run")
    assert collator([data[0], data[1]])["input_ids"].shape == (2, 7)


def test_padding_is_masked_and_has_no_labels(tmp_path: Path) -> None:
    data, collator = real(workload_of(dataset=texts(tmp_path / "a.jsonl", "ab", "abcd")), tmp_path / "run")
    batch = collator([data[0], data[1]])
    assert batch["attention_mask"].tolist() == [[1, 1, 1, 0, 0], [1] * 5]
    assert batch["labels"][0, 3:].tolist() == [IGNORED] * 2


def test_padding_is_the_pad_token_of_the_config(tmp_path: Path) -> None:
    workload = workload_of(dataset=texts(tmp_path / "a.jsonl", "ab", "abcd"))
    prepared(workload, tmp_path / "run")
    config = config_of("llama", pad_token_id=9)
    data, collator = training_data(workload, config, samples=2, directory=tmp_path / "run")
    assert collator([data[0], data[1]])["input_ids"][0, 3:].tolist() == [9, 9]


def test_masks_of_real_texts_depend_on_the_sample(tmp_path: Path) -> None:
    dataset = texts(tmp_path / "a.jsonl", "the very same text", "the very same text")
    data, _ = real(workload_of(Task.MASKED_LM, dataset=dataset), tmp_path / "run")
    assert same(data[0], data[2])
    assert not same(data[0], data[1])


def test_data_loader_workers_give_what_the_main_process_gives(tmp_path: Path) -> None:
    dataset = texts(tmp_path / "a.jsonl", *(f"text number {i}" for i in range(9)))
    data, collator = real(workload_of(Task.MASKED_LM, dataset=dataset), tmp_path / "run")
    alone = DataLoader(data, batch_size=4, collate_fn=collator)
    forked = DataLoader(data, batch_size=4, collate_fn=collator, num_workers=2, multiprocessing_context="fork")
    assert all(same(a, b) for a, b in zip(alone, forked, strict=True))


def test_real_samples_can_be_pickled(tmp_path: Path) -> None:
    data, _ = real(workload_of(dataset=texts(tmp_path / "a.jsonl", "one", "two")), tmp_path / "run")
    assert same(data[1], pickle.loads(pickle.dumps(data))[1])


def test_a_trainer_accepts_samples_and_collator(tmp_path: Path) -> None:
    workload = workload_of(dataset=texts(tmp_path / "a.jsonl", *(f"text number {i}" for i in range(5))))
    data, collator = real(workload, tmp_path / "run", samples=8)
    arguments = transformers.TrainingArguments(
        str(tmp_path / "out"), max_steps=2, per_device_train_batch_size=2, report_to="none", use_cpu=True,
        save_strategy="no", disable_tqdm=True, remove_unused_columns=False,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config_of("llama"))
    trainer = transformers.Trainer(model, arguments, train_dataset=data, data_collator=collator)
    assert trainer.train().global_step == 2


def test_missing_rows_are_an_error_of_the_run_directory(tmp_path: Path) -> None:
    with pytest.raises(RunDirectoryError, match="no tokenized data"):
        training_data(workload_of(dataset="a.jsonl"), config_of("llama"), samples=1, directory=tmp_path)


# --- the profile and the notes ------------------------------------------------------------------------------


def test_the_profile_tells_the_lengths(tmp_path: Path) -> None:
    dataset = texts(tmp_path / "a.jsonl", *("x" * n for n in range(1, 12)))
    lengths = prepared(workload_of(dataset=dataset), tmp_path / "run").lengths
    assert (lengths.samples, lengths.minimum, lengths.median, lengths.maximum) == (11, 2, 7, 12)
    assert lengths.mean == pytest.approx(7)
    assert lengths.p95 in (11, 12)


def test_long_texts_are_cut(tmp_path: Path) -> None:
    dataset = texts(tmp_path / "a.jsonl", "x" * 100_000, "ü" * 30)
    assert prepared(workload_of(dataset=dataset), tmp_path / "run").lengths.minimum == 24


def test_rows_without_text_are_left_out_and_counted(tmp_path: Path) -> None:
    corpus = prepared(workload_of(dataset=texts(tmp_path / "a.jsonl", "a", None, "", " \t", "b")), tmp_path / "run")
    assert corpus.lengths.samples == 2
    assert any("3 of 5 rows are left out" in note for note in corpus.notes)


def test_a_large_file_is_sampled(tmp_path: Path) -> None:
    dataset = texts(tmp_path / "a.jsonl", *(f"{i}" for i in range(MAX_SAMPLES + 5)))
    corpus = prepared(workload_of(dataset=dataset), tmp_path / "run")
    assert corpus.lengths.samples == MAX_SAMPLES
    assert any("10,000 of 10,005 rows" in note for note in corpus.notes)


def test_special_tokens_written_in_a_text_are_text(tmp_path: Path) -> None:
    text = "<pad></s> <extra_id_0>"
    data, _ = real(workload_of(dataset=texts(tmp_path / "a.jsonl", text)), tmp_path / "run")
    assert decoded(data[0]["input_ids"]) == text


def test_a_target_column_is_used(tmp_path: Path) -> None:
    dataset = jsonl(tmp_path / "a.jsonl", [{"document": "a long text", "target": "short"}])
    data, _ = real(workload_of(Task.SEQ2SEQ_LM, dataset=dataset, target_length=4), tmp_path / "run")
    assert decoded(data[0]["input_ids"]) == "a long text"
    assert decoded(data[0]["labels"]) == "sho"


def test_without_a_target_column_the_text_is_its_own_target(tmp_path: Path) -> None:
    workload = workload_of(Task.SEQ2SEQ_LM, dataset=texts(tmp_path / "a.jsonl", "a text"), target_length=4)
    data, _ = real(workload, tmp_path / "run")
    assert decoded(data[0]["labels"]) == "a t"
    assert any("the target is the text itself" in note for note in prepared(workload, tmp_path / "run").notes)


@pytest.mark.parametrize("classes", [["no", "yes", "no"], [3, 5, 3], [False, True, False]])
def test_classes_are_numbered(classes: list[Any], tmp_path: Path) -> None:
    dataset = jsonl(tmp_path / "a.jsonl", [{"sentence": "s", "label": value} for value in classes])
    data, _ = real(workload_of(Task.SEQUENCE_CLASSIFICATION, dataset=dataset), tmp_path / "run")
    assert [int(data[i]["labels"]) for i in range(3)] == [0, 1, 0]


def test_classes_with_gaps_in_a_csv_file_are_classes(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("text,label\na,1\nb,\nc,0\n")
    workload = workload_of(Task.SEQUENCE_CLASSIFICATION, dataset=str(tmp_path / "a.csv"))
    data, _ = real(workload, tmp_path / "run")
    assert [(decoded(data[i]["input_ids"]), int(data[i]["labels"])) for i in range(2)] == [("a", 1), ("c", 0)]


def test_more_classes_than_the_head_has_are_folded(tmp_path: Path) -> None:
    dataset = jsonl(tmp_path / "a.jsonl", [{"text": "s", "label": value} for value in range(5)])
    workload = workload_of(Task.SEQUENCE_CLASSIFICATION, dataset=dataset)
    data, _ = real(workload, tmp_path / "run")
    assert {int(data[i]["labels"]) for i in range(5)} == {0, 1}
    assert any("5 classes are folded into the 2" in note for note in prepared(workload, tmp_path / "run").notes)


@pytest.mark.parametrize("labels", [[None, None], [0.5, 1.5], [["a"], ["b"]], [1, "a"]])
def test_labels_that_are_no_classes_are_drawn_at_random(labels: list[Any], tmp_path: Path) -> None:
    dataset = jsonl(tmp_path / "a.jsonl", [{"text": "s", "label": value} for value in labels])
    workload = workload_of(Task.SEQUENCE_CLASSIFICATION, dataset=dataset)
    corpus = prepared(workload, tmp_path / "run")
    assert corpus.lengths.samples == 2
    assert any("labels are random" in note for note in corpus.notes)


# --- tokenizers ---------------------------------------------------------------------------------------------


def word_tokenizer(directory: Path, words: list[str]) -> str:
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace

    tokenizer = Tokenizer(WordLevel({word: i for i, word in enumerate(["?", *words])}, unk_token="?"))
    tokenizer.pre_tokenizer = Whitespace()
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(str(directory))
    config_of("llama").save_pretrained(directory)
    return str(directory)


def test_the_tokenizer_of_the_model_is_used(tmp_path: Path) -> None:
    path = word_tokenizer(tmp_path / "model", ["alpha", "beta"])
    workload = workload_of(dataset=texts(tmp_path / "a.jsonl", "beta alpha beta"), path=path)
    data, _ = real(workload, tmp_path / "run")
    assert data[0]["input_ids"].tolist() == [2, 1, 2]
    corpus = prepared(workload, tmp_path / "run")
    assert (corpus.tokenizer, corpus.notes) == (path, ())


def test_texts_of_one_token_teach_a_causal_model_nothing(tmp_path: Path) -> None:
    path = word_tokenizer(tmp_path / "model", ["alpha"])
    workload = workload_of(dataset=texts(tmp_path / "a.jsonl", "alpha", "alpha alpha"), path=path)
    assert prepared(workload, tmp_path / "run").lengths.samples == 1


@pytest.mark.parametrize("model_type", ["gpt2", "bert"])
def test_a_directory_without_vocabulary_gives_bytes(model_type: str, tmp_path: Path) -> None:
    config_of(model_type).save_pretrained(tmp_path / "model")
    dataset = texts(tmp_path / "a.jsonl", "some text")
    workload = workload_of(Task.CAUSAL_LM, model_type, dataset=dataset, path=str(tmp_path / "model"))
    corpus = prepared(workload, tmp_path / "run")
    assert corpus.tokenizer == BYTE_LEVEL
    assert any("every byte counts as a token" in note for note in corpus.notes)


def test_a_broken_tokenizer_is_named(tmp_path: Path) -> None:
    path = word_tokenizer(tmp_path / "model", ["alpha"])
    (tmp_path / "model" / "tokenizer.json").write_text("{")
    message = refusal(workload_of(dataset=texts(tmp_path / "a.jsonl", "a b"), path=path), tmp_path / "run")
    assert message.startswith(path)
    assert "tokenizer can't be loaded" in message


def test_a_tokenizer_of_the_hub_cache_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    cache = tmp_path / "hub"
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
    repository = cache / "models--tiny--llama"
    word_tokenizer(repository / "snapshots" / "abc", ["alpha"])
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("abc")
    workload = workload_of(dataset=texts(tmp_path / "a.jsonl", "alpha alpha"))
    assert prepared(workload, tmp_path / "run").tokenizer == "tiny/llama"


def test_ids_beyond_the_vocabulary_are_refused(tmp_path: Path) -> None:
    workload = workload_of(dataset=texts(tmp_path / "a.jsonl", "zzz"), changes={"vocab_size": 100})
    message = refusal(workload, tmp_path / "run")
    assert "makes token id 125, but the model's vocabulary ends at 99" in message


def test_sequences_may_be_shorter_than_what_a_tokenizer_adds(tmp_path: Path) -> None:
    workload = workload_of(Task.MASKED_LM, dataset=texts(tmp_path / "a.jsonl", "abc"), sequence_length=1)
    assert prepared(workload, tmp_path / "run").lengths.maximum == 1


# --- files --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.jsonl", '{"text": "one"}\n\n{"text": "two"}\n'),
        ("a.JSONL", '{"text": "one"}\r\n{"text": "two"}'),
        ("a.json", '[{"text": "one"}, {"text": "two"}]'),
        ("a.json", '{"text": "one"}\n{"text": "two"}\n'),
        ("a.csv", 'text,n\none,1\n"two",2\n'),
        ("a.tsv", "text\tn\none\t1\ntwo\t2\n"),
        ("a.txt", "one\n\ntwo\n"),
        ("a.text", "one\ntwo"),
    ],
)
@pytest.mark.parametrize("mark", ["", "\ufeff"], ids=["plain", "BOM"])
def test_kinds_of_files(name: str, content: str, mark: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(mark + content, encoding="utf-8")
    data, _ = real(workload_of(dataset=str(tmp_path / name)), tmp_path / "run")
    assert [decoded(data[i]["input_ids"]) for i in range(2)] == ["one", "two"]


def test_parquet_files(tmp_path: Path) -> None:
    from datasets import Dataset

    Dataset.from_dict({"text": ["one", "two"]}).to_parquet(tmp_path / "a.parquet")
    data, _ = real(workload_of(dataset=str(tmp_path / "a.parquet")), tmp_path / "run")
    assert decoded(data[1]["input_ids"]) == "two"


@pytest.mark.parametrize("name", ["a b.jsonl", "größe 漢字.jsonl", "a[1]*?.jsonl", "hf:::a#b.jsonl", "-a'\".jsonl"])
def test_file_names_are_taken_literally(name: str, tmp_path: Path) -> None:
    dataset = texts(tmp_path / name, "one")
    data, _ = real(workload_of(dataset=dataset), tmp_path / "run [*] ü")
    assert decoded(data[0]["input_ids"]) == "one"


def test_links_are_read_by_their_own_name(tmp_path: Path) -> None:
    texts(tmp_path / "0a1b2c", "one")
    (tmp_path / "a.jsonl").symlink_to("0a1b2c")
    data, _ = real(workload_of(dataset=str(tmp_path / "a.jsonl")), tmp_path / "run")
    assert decoded(data[0]["input_ids"]) == "one"


def test_relative_names_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    texts(tmp_path / "a.jsonl", "one")
    monkeypatch.chdir(tmp_path)
    assert prepared(workload_of(dataset="a.jsonl"), Path("run")).lengths.samples == 1


def test_the_only_column_of_strings_is_the_text(tmp_path: Path) -> None:
    dataset = jsonl(tmp_path / "a.jsonl", [{"id": 1, "body": "one"}])
    data, _ = real(workload_of(dataset=dataset), tmp_path / "run")
    assert decoded(data[0]["input_ids"]) == "one"


def test_the_named_column_is_the_text(tmp_path: Path) -> None:
    dataset = jsonl(tmp_path / "a.jsonl", [{"text": "one", "body": "two"}])
    data, _ = real(workload_of(dataset=dataset, text_field="body"), tmp_path / "run")
    assert decoded(data[0]["input_ids"]) == "two"


def test_nothing_but_the_rows_stays_behind(tmp_path: Path) -> None:
    prepared(workload_of(dataset=texts(tmp_path / "a.jsonl", "one")), tmp_path / "run")
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["tokens"]


def test_nothing_stays_behind_after_an_error(tmp_path: Path) -> None:
    refusal(workload_of(dataset=texts(tmp_path / "a.jsonl", "")), tmp_path / "run")
    assert not list((tmp_path / "run").iterdir())


def test_preparing_again_replaces_the_rows(tmp_path: Path) -> None:
    workload = workload_of(dataset=texts(tmp_path / "a.jsonl", "one"))
    real(workload, tmp_path / "run")
    texts(tmp_path / "a.jsonl", "two")
    data, _ = real(workload, tmp_path / "run")
    assert decoded(data[0]["input_ids"]) == "two"


def test_reading_draws_and_logs_nothing(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    prepared(workload_of(dataset=texts(tmp_path / "a.jsonl", "one")), tmp_path / "run")
    (tmp_path / "b.csv").write_text("text\na\nb,c,d\n")
    refusal(workload_of(dataset=str(tmp_path / "b.csv")), tmp_path / "run")
    assert capfd.readouterr() == ("", "")


# --- files that can't be used -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("a.jsonl", b"", "is empty"),
        ("a.csv", b"", "is empty"),
        ("a.jsonl", b"\n \n", "holds no rows"),
        ("a.csv", b"text\n", "holds no rows"),
        ("a.txt", b"\n\n", "no row holds any text"),
        (
            "a.jsonl",
            b'{"text": "a"}\n{"text": "b\n{"text": "c"}\n',
            "line 2: not valid JSON (Invalid control character at column 12)",
        ),
        ("a.jsonl", b'{"text": "a"}\n\n["b"]\n', "line 3: not an object"),
        ("a.jsonl", b'"a"\n"b"\n', "line 1: not an object"),
        ("a.jsonl", '{"text": "ä"}\n'.encode("latin-1"), "is not UTF-8 text"),
        ("a.csv", "text\nä\n".encode("latin-1"), "is not UTF-8 text"),
        ("a.txt", "ä\n".encode("latin-1"), "is not UTF-8 text"),
        ("a.json", b'[{"text": "a"}, {"text"', "is not a list of objects"),
        ("a.csv", b"text\na\nb,c,d\n", "in line 3, saw 3"),
        ("a.csv", b"id,score\n1,2\n", "no column of strings; the columns are id, score"),
        ("a.jsonl", b'{"a": "x", "b": "y"}\n', "several columns of strings"),
        ("a.jsonl", b'{"text": 3}\n', "column 'text' holds int64, not strings"),
        ("a.jsonl", b'{"text": ["a"]}\n', "column 'text' holds list, not strings"),
        ("a.jsonl", b'{"text": "a"}\n{"text": 3}\n', "column 'text' holds json, not strings"),
        ("a.jsonl", b'{"text": null}\n', "column 'text' holds null, not strings"),
        ("a.parquet", b"nonsense", "can't be read as PARQUET (Parquet magic bytes not found"),
        ("a.pdf", b"%PDF", "unknown kind of file; give one that ends in .jsonl, .json, .csv"),
        ("a", b"text", "unknown kind of file"),
    ],
)
def test_unusable_files_are_named_with_the_reason(name: str, content: bytes, expected: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(content)
    message = refusal(workload_of(dataset=str(tmp_path / name)), tmp_path / "run")
    assert message.startswith(f"{tmp_path / name}: ")
    assert expected in message


def test_a_missing_file_gets_a_suggestion(tmp_path: Path) -> None:
    texts(tmp_path / "train.jsonl", "one")
    message = refusal(workload_of(dataset=str(tmp_path / "trian.jsonl")), tmp_path / "run")
    assert "no such file (did you mean 'train.jsonl'?)" in message


@pytest.mark.parametrize("name", ["data", "data.jsonl"])
def test_a_directory_is_refused(name: str, tmp_path: Path) -> None:
    (tmp_path / name).mkdir()
    assert "is a directory" in refusal(workload_of(dataset=str(tmp_path / name)), tmp_path / "run")


@pytest.mark.parametrize("name", ["x" * 5000, "x" * 5000 + ".jsonl", "nul\0.jsonl", "~nobody-here/a.jsonl"])
def test_impossible_names_are_refused(name: str, tmp_path: Path) -> None:
    assert refusal(workload_of(dataset=name), tmp_path / "run")


def test_a_pipe_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "a.jsonl")
    assert "not a regular file" in refusal(workload_of(dataset=str(tmp_path / "a.jsonl")), tmp_path / "run")


def test_an_unknown_column_gets_a_suggestion(tmp_path: Path) -> None:
    dataset = jsonl(tmp_path / "a.jsonl", [{"sentence": "one", "id": 1}])
    message = refusal(workload_of(dataset=dataset, text_field="sentense"), tmp_path / "run")
    assert "no column 'sentense' (did you mean 'sentence'?); the columns are sentence, id" in message


def test_compressed_content_is_read_as_what_it_is(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(gzip.compress(b'{"text": "one"}\n'))
    data, _ = real(workload_of(dataset=str(tmp_path / "a.jsonl")), tmp_path / "run")
    assert decoded(data[0]["input_ids"]) == "one"


def test_recordings_are_not_read_from_files(tmp_path: Path) -> None:
    workload = workload_of(Task.SPEECH_CTC, dataset="speech.parquet")
    assert "recordings are not read from files" in refusal(workload, tmp_path)


def test_images_are_not_read_from_files(tmp_path: Path) -> None:
    workload = workload_of(Task.IMAGE_CLASSIFICATION, dataset="images.parquet")
    assert "images are not read from files" in refusal(workload, tmp_path)


def test_a_directory_that_cannot_be_made_is_an_error_of_the_run_directory(tmp_path: Path) -> None:
    dataset = texts(tmp_path / "a.jsonl", "one")
    with pytest.raises(RunDirectoryError, match="can't be written"):
        prepare(workload_of(dataset=dataset), tmp_path / "a.jsonl" / "run")


# --- the example --------------------------------------------------------------------------------------------


def make_texts(path: Path, monkeypatch: pytest.MonkeyPatch, *options: str) -> str:
    monkeypatch.setattr(sys, "argv", [str(EXAMPLE), str(path), *options])
    runpy.run_path(str(EXAMPLE), run_name="__main__")
    return str(path)


def test_the_example_makes_texts_of_varied_length(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dataset = make_texts(tmp_path / "texts.jsonl", monkeypatch)
    lengths = prepared(workload_of(dataset=dataset, sequence_length=512), tmp_path / "run").lengths
    assert lengths.samples == 1000
    assert lengths.minimum < 40 < lengths.median < 200 < lengths.p95


def test_the_example_is_deterministic(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = make_texts(tmp_path / "a.jsonl", monkeypatch, "--count", "50")
    second = make_texts(tmp_path / "b.jsonl", monkeypatch, "--count", "50")
    assert Path(first).read_bytes() == Path(second).read_bytes()


def loss_of(task: Task, model_type: str, batch: dict[str, torch.Tensor]) -> float:
    """Return the loss of a tiny model on `batch` after a backward pass."""
    heads = {
        Task.CAUSAL_LM: transformers.AutoModelForCausalLM,
        Task.SEQ2SEQ_LM: transformers.AutoModelForSeq2SeqLM,
        Task.MASKED_LM: transformers.AutoModelForMaskedLM,
        Task.SEQUENCE_CLASSIFICATION: transformers.AutoModelForSequenceClassification,
        Task.IMAGE_CLASSIFICATION: transformers.AutoModelForImageClassification,
        Task.SPEECH_CTC: transformers.AutoModelForCTC,
        Task.SPEECH_SEQ2SEQ: transformers.AutoModelForSpeechSeq2Seq,
        Task.AUDIO_CLASSIFICATION: transformers.AutoModelForAudioClassification,
    }
    loss = heads[task].from_config(config_of(model_type))(**batch).loss
    loss.backward()
    assert torch.isfinite(loss)
    return float(loss.detach())


def test_the_longest_rows_can_come_first_and_the_rest_is_shuffled_by_the_seed_alone(tmp_path: Path) -> None:
    workload = workload_of(dataset=texts(tmp_path / "a.jsonl", *("x" * (2 + i % 7) for i in range(40))))
    prepared(workload, tmp_path / "run")

    def lengths(longest_first: int) -> list[int]:
        config = config_of("llama")
        directory = tmp_path / "run"
        data, _ = training_data(workload, config, samples=44, directory=directory, longest_first=longest_first)
        return [len(data[i]["input_ids"]) for i in range(44)]

    assert lengths(4)[:4] == [max(lengths(0))] * 4
    assert lengths(4)[4:] == lengths(0)[:40]
    assert lengths(0)[:40] != sorted(lengths(0)[:40])


def test_targets_count_among_the_tokens_of_a_sample(tmp_path: Path) -> None:
    rows = [{"text": "x" * 9, "target": "y" * 3}, {"text": "x" * 9, "target": "y" * 5}]
    workload = workload_of(Task.SEQ2SEQ_LM, dataset=jsonl(tmp_path / "a.jsonl", rows), target_length=24)
    lengths = prepared(workload, tmp_path / "run").lengths
    assert (lengths.mean, lengths.mean_target) == (10, 5)  # an end token each
    assert workload.model_copy(update={"lengths": lengths}).tokens_per_sample == 15


def test_an_end_token_beyond_the_vocabulary_is_left_out() -> None:
    workload = workload_of(Task.CAUSAL_LM, "llama")
    config = config_of("llama", eos_token_id=10**6)
    data, _ = training_data(workload, config, samples=2, directory=None)
    assert int(data[0]["input_ids"].max()) < config.vocab_size
