"""The user's texts are tokenized once: which rows are used, by which tokenizer, and what is said of them."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path
from typing import Any

import pytest
import transformers
from corpora import config_of, decoded, jsonl, prepared, real, refusal, texts, workload_of
from factories import make_spec

from autotune.errors import RunDirectoryError
from autotune.training.corpus import BYTE_LEVEL, MAX_SAMPLES, load_tokenizer, prepare
from autotune.training.dataset import training_data
from autotune.values.model import Task

EXAMPLE = Path(__file__).parents[2] / "examples" / "make_texts.py"


def test_synthetic_data_need_no_preparation(tmp_path: Path) -> None:
    assert prepare(workload_of(), tmp_path) is None
    assert not list(tmp_path.iterdir())


def test_rows_hold_the_texts(tmp_path: Path) -> None:
    data, _ = real(workload_of(dataset=texts(tmp_path / "a.jsonl", "one", "zwölf")), tmp_path / "run")
    assert [decoded(data[i]["input_ids"]) for i in range(3)] == ["one", "zwölf", "one"]


def test_missing_rows_are_an_error_of_the_run_directory(tmp_path: Path) -> None:
    with pytest.raises(RunDirectoryError, match="no tokenized data"):
        training_data(workload_of(dataset="a.jsonl"), config_of("llama"), samples=1, directory=tmp_path)


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


def test_ids_that_are_no_bytes_are_no_text() -> None:
    """A model generates any id of its vocabulary, which has thousands."""
    tokenizer, name = load_tokenizer(make_spec(), [])
    assert name == BYTE_LEVEL
    assert tokenizer.decode([*tokenizer("Ab").input_ids[:2], 5_000, 40_000]) == "Ab"


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


def test_recordings_are_not_read_from_files(tmp_path: Path) -> None:
    workload = workload_of(Task.SPEECH_CTC, dataset="speech.parquet")
    assert "recordings are not read from files" in refusal(workload, tmp_path)


@pytest.mark.parametrize("task", [Task.IMAGE_CLASSIFICATION, Task.IMAGE_TEXT_TO_TEXT])
def test_images_are_not_read_from_files(tmp_path: Path, task: Task) -> None:
    workload = workload_of(task, dataset="images.parquet")
    assert "images are not read from files" in refusal(workload, tmp_path)


def test_a_directory_that_cannot_be_made_is_an_error_of_the_run_directory(tmp_path: Path) -> None:
    dataset = texts(tmp_path / "a.jsonl", "one")
    with pytest.raises(RunDirectoryError, match="can't be written"):
        prepare(workload_of(dataset=dataset), tmp_path / "a.jsonl" / "run")


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


def test_targets_count_among_the_tokens_of_a_sample(tmp_path: Path) -> None:
    rows = [{"text": "x" * 9, "target": "y" * 3}, {"text": "x" * 9, "target": "y" * 5}]
    workload = workload_of(Task.SEQ2SEQ_LM, dataset=jsonl(tmp_path / "a.jsonl", rows), target_length=24)
    lengths = prepared(workload, tmp_path / "run").lengths
    assert (lengths.mean, lengths.mean_target) == (10, 5)  # an end token each
    assert workload.model_copy(update={"lengths": lengths}).tokens_per_sample == 15
