"""The user's file of texts: which kinds are read, which column is the text, how long it is, and what is refused."""

from __future__ import annotations

import gzip
import os
from pathlib import Path

import pytest
import transformers
from corpora import config_of, jsonl, prepared, refusal, texts, tokens, workload_of
from factories import make_spec

from autotune.errors import RunDirectoryError
from autotune.training.dataset import training_data
from autotune.training.texts import BYTE_LEVEL, MAX_SAMPLES, load_tokenizer, prepare
from autotune.values.model import Task

# The file


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.jsonl", '{"text": "one"}\n\n{"text": "three"}\n'),
        ("a.JSONL", '{"text": "one"}\r\n{"text": "three"}'),
        ("a.json", '[{"text": "one"}, {"text": "three"}]'),
        ("a.json", '{"text": "one"}\n{"text": "three"}\n'),
        ("a.csv", 'text,n\none,1\n"three",2\n'),
        ("a.tsv", "text\tn\none\t1\nthree\t2\n"),
        ("a.txt", "one\n\nthree\n"),
        ("a.text", "one\nthree"),
    ],
)
@pytest.mark.parametrize("mark", ["", "\ufeff"], ids=["plain", "BOM"])
def test_kinds_of_files(name: str, content: str, mark: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(mark + content, encoding="utf-8")
    assert tokens(workload_of(dataset=str(tmp_path / name)), tmp_path / "run") == [3, 5]


def test_parquet_and_compressed_files(tmp_path: Path) -> None:
    from datasets import Dataset

    Dataset.from_dict({"text": ["one", "three"]}).to_parquet(tmp_path / "a.parquet")
    assert tokens(workload_of(dataset=str(tmp_path / "a.parquet")), tmp_path / "run") == [3, 5]
    (tmp_path / "a.jsonl").write_bytes(gzip.compress(b'{"text": "one"}\n'))
    assert tokens(workload_of(dataset=str(tmp_path / "a.jsonl")), tmp_path / "run") == [3]


@pytest.mark.parametrize("name", ["a b.jsonl", "größe 漢字.jsonl", "a[1]*?.jsonl", "hf:::a#b.jsonl", "-a'\".jsonl"])
def test_file_names_are_taken_literally(name: str, tmp_path: Path) -> None:
    assert tokens(workload_of(dataset=texts(tmp_path / name, "one")), tmp_path / "run [*] ü") == [3]


def test_links_are_read_by_their_own_name_and_relative_ones_are_found(tmp_path, monkeypatch) -> None:
    texts(tmp_path / "0a1b2c", "one")
    (tmp_path / "a.jsonl").symlink_to("0a1b2c")
    assert tokens(workload_of(dataset=str(tmp_path / "a.jsonl")), tmp_path / "run") == [3]
    monkeypatch.chdir(tmp_path)
    assert tokens(workload_of(dataset="a.jsonl"), Path("run")) == [3]


def test_reading_draws_and_logs_nothing(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    prepared(workload_of(dataset=texts(tmp_path / "a.jsonl", "one")), tmp_path / "run")
    (tmp_path / "b.csv").write_text("text\na\nb,c,d\n")
    refusal(workload_of(dataset=str(tmp_path / "b.csv")), tmp_path / "run")
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("a.jsonl", b"", "is empty"),
        ("a.jsonl", b"\n \n", "holds no rows"),
        ("a.csv", b"text\n", "holds no rows"),
        ("a.txt", b"\n\n", "no row holds any text"),
        ("a.jsonl", b'{"text": "a"}\n{"text": "b\n{"text": "c"}\n', "line 2: not a JSON object"),
        ("a.jsonl", b'{"text": "a"}\n\n["b"]\n', "line 3: not a JSON object"),
        ("a.jsonl", b'"a"\n"b"\n', "line 1: not a JSON object"),
        ("a.jsonl", '{"text": "ä"}\n'.encode("latin-1"), "is not UTF-8 text"),
        ("a.csv", "text\nä\n".encode("latin-1"), "is not UTF-8 text"),
        ("a.txt", "ä\n".encode("latin-1"), "is not UTF-8 text"),
        ("a.json", b'[{"text": "a"}, {"text"', "line 1: not a JSON object"),
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
    assert not (tmp_path / "run").exists() or not list((tmp_path / "run").iterdir())


@pytest.mark.parametrize(
    ("make", "name", "said"),
    [
        (
            lambda folder: texts(folder / "train.jsonl", "one"),
            "trian.jsonl",
            "no such file (did you mean 'train.jsonl'?)",
        ),
        (lambda folder: (folder / "data").mkdir(), "data", "unknown kind of file"),
        (lambda folder: (folder / "data.jsonl").mkdir(), "data.jsonl", "not a regular file"),
        (lambda folder: os.mkfifo(folder / "a.jsonl"), "a.jsonl", "not a regular file"),
        (lambda folder: None, "x" * 5000, ""),
        (lambda folder: None, "x" * 5000 + ".jsonl", ""),
        (lambda folder: None, "nul\0.jsonl", ""),
        (lambda folder: None, "~nobody-here/a.jsonl", ""),
    ],
    ids=["misspelt", "folder", "folder.jsonl", "pipe", "long", "long.jsonl", "nul", "nobody"],
)
def test_a_name_that_leads_to_no_file_is_refused(make, name: str, said: str, tmp_path: Path, monkeypatch) -> None:
    make(tmp_path)
    monkeypatch.chdir(tmp_path)
    assert said in refusal(workload_of(dataset=name), tmp_path / "run")


@pytest.mark.parametrize("task", [Task.SPEECH_CTC, Task.IMAGE_CLASSIFICATION, Task.IMAGE_TEXT_TO_TEXT])
def test_images_and_recordings_are_not_read_from_files(tmp_path: Path, task: Task) -> None:
    said = f"{'recordings' if task is Task.SPEECH_CTC else 'images'} are not read from files"
    assert said in refusal(workload_of(task, dataset="a.parquet"), tmp_path)


# The columns


@pytest.mark.parametrize(
    ("task", "row", "field", "length"),
    [
        (Task.CAUSAL_LM, {"id": 1, "body": "four"}, None, 4),
        (Task.CAUSAL_LM, {"text": "one", "body": "three"}, "body", 5),
        (Task.SEQUENCE_CLASSIFICATION, {"sentence": "four", "label": "positive"}, None, 4),
        (Task.SEQ2SEQ_LM, {"document": "four", "target": "one"}, None, 4),
    ],
)
def test_the_only_column_of_strings_or_the_named_one_is_the_text(
    task: Task, row: dict[str, object], field: str | None, length: int, tmp_path: Path
) -> None:
    workload = workload_of(task, dataset=jsonl(tmp_path / "a.jsonl", [row]), text_field=field)
    assert tokens(workload, tmp_path / "run") == [length]


def test_an_unknown_column_gets_a_suggestion(tmp_path: Path) -> None:
    dataset = jsonl(tmp_path / "a.jsonl", [{"sentence": "one", "id": 1}])
    message = refusal(workload_of(dataset=dataset, text_field="sentense"), tmp_path / "run")
    assert "no column 'sentense' (did you mean 'sentence'?); the columns are sentence, id" in message


@pytest.mark.parametrize(
    ("rows", "target_length", "means", "is_own"),
    [
        ([{"text": "x" * 9, "target": "y" * 3}, {"text": "x" * 9, "target": "y" * 5}], 24, (10, 5), False),
        ([{"text": "a text"}], 4, (7, 4), True),
    ],
)
def test_a_target_column_counts_among_the_tokens_and_without_one_the_text_is_its_own_target(
    tmp_path, rows, target_length, means, is_own
):
    dataset = jsonl(tmp_path / "a.jsonl", rows)
    workload = workload_of(Task.SEQ2SEQ_LM, dataset=dataset, target_length=target_length)
    lengths, said = prepared(workload, tmp_path / "run")
    assert (lengths.mean, lengths.mean_target) == means  # an end token each
    assert workload.model_copy(update={"lengths": lengths}).tokens_per_sample == sum(means)
    assert ("the target is the text itself" in said) is is_own


# The lengths


def test_synthetic_data_need_no_preparation(tmp_path: Path) -> None:
    assert prepare(workload_of(), tmp_path) == (None, ())
    assert not list(tmp_path.iterdir())


def test_the_profile_tells_the_lengths(tmp_path: Path) -> None:
    dataset = texts(tmp_path / "a.jsonl", *("x" * n for n in range(1, 12)))
    lengths, said = prepared(workload_of(dataset=dataset), tmp_path / "run")
    assert (lengths.samples, lengths.minimum, lengths.median, lengths.maximum) == (11, 2, 7, 12)
    assert lengths.mean == pytest.approx(7)
    assert lengths.p95 in (11, 12)
    assert said.startswith("11 samples of 2 to 12 tokens, 7 on average (tokenizer: byte-level ByT5)")


def test_long_texts_are_cut_rows_without_text_left_out_and_a_large_file_is_sampled(tmp_path: Path) -> None:
    dataset = texts(tmp_path / "long.jsonl", "x" * 100_000, "ü" * 30)
    assert tokens(workload_of(dataset=dataset), tmp_path / "run") == [23, 23]
    lengths, said = prepared(
        workload_of(dataset=texts(tmp_path / "a.jsonl", "a", None, "", " \t", "b")), tmp_path / "run"
    )
    assert lengths.samples == 2
    assert "3 of 5 rows are left out" in said
    dataset = texts(tmp_path / "large.jsonl", *(f"{i}" for i in range(MAX_SAMPLES + 5)))
    lengths, said = prepared(workload_of(dataset=dataset), tmp_path / "run")
    assert lengths.samples == MAX_SAMPLES
    assert "10,000 of 10,005 rows" in said


def test_nothing_but_the_lengths_stays_behind_and_they_are_replaced(tmp_path: Path) -> None:
    for text in ("one", "three"):
        assert tokens(workload_of(dataset=texts(tmp_path / "a.jsonl", text)), tmp_path / "run") == [len(text)]
        assert [path.name for path in (tmp_path / "run").iterdir()] == ["lengths.npy"]


def test_lengths_that_are_missing_or_can_not_be_written_are_errors_of_the_run_directory(tmp_path: Path) -> None:
    with pytest.raises(RunDirectoryError, match="no tokenized data"):
        training_data(workload_of(dataset="a.jsonl"), config_of("llama"), samples=1, directory=tmp_path)
    dataset = texts(tmp_path / "a.jsonl", "one")
    with pytest.raises(RunDirectoryError, match="can't be written"):
        prepare(workload_of(dataset=dataset), tmp_path / "a.jsonl" / "run")


# The tokenizer


def word_tokenizer(directory: Path, words: list[str]) -> str:
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace

    tokenizer = Tokenizer(WordLevel({word: i for i, word in enumerate(["?", *words])}, unk_token="?"))
    tokenizer.pre_tokenizer = Whitespace()
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(str(directory))
    config_of("llama").save_pretrained(directory)
    return str(directory)


def test_the_tokenizer_of_the_model_is_used_and_texts_of_one_token_teach_a_causal_model_nothing(tmp_path: Path) -> None:
    path = word_tokenizer(tmp_path / "model", ["alpha", "beta"])
    workload = workload_of(dataset=texts(tmp_path / "a.jsonl", "beta alpha beta"), path=path)
    lengths, said = prepared(workload, tmp_path / "run")
    assert (lengths.maximum, said) == (3, f"1 samples of 3 to 3 tokens, 3 on average (tokenizer: {path})")
    dataset = texts(tmp_path / "a.jsonl", "alpha", "alpha alpha")
    assert prepared(workload_of(dataset=dataset, path=path), tmp_path / "run")[0].samples == 1


def test_a_tokenizer_of_the_hub_cache_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    cache = tmp_path / "hub"
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
    repository = cache / "models--tiny--llama"
    word_tokenizer(repository / "snapshots" / "abc", ["alpha"])
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("abc")
    workload = workload_of(dataset=texts(tmp_path / "a.jsonl", "alpha alpha"))
    assert "(tokenizer: tiny/llama)" in prepared(workload, tmp_path / "run")[1]


@pytest.mark.parametrize("model_type", ["gpt2", "bert"])
def test_a_directory_without_vocabulary_gives_bytes(model_type: str, tmp_path: Path) -> None:
    config_of(model_type).save_pretrained(tmp_path / "model")
    dataset = texts(tmp_path / "a.jsonl", "some text")
    workload = workload_of(Task.CAUSAL_LM, model_type, dataset=dataset, path=str(tmp_path / "model"))
    _, said = prepared(workload, tmp_path / "run")
    assert BYTE_LEVEL in said
    assert "every byte counts as a token" in said


def test_special_tokens_written_in_a_text_are_text(tmp_path: Path) -> None:
    text = "<pad></s> <extra_id_0>"
    assert tokens(workload_of(dataset=texts(tmp_path / "a.jsonl", text)), tmp_path / "run") == [len(text)]


def test_ids_that_are_no_bytes_are_no_text() -> None:
    """A model generates any id of its vocabulary, which has thousands."""
    tokenizer, name = load_tokenizer(make_spec(), [])
    assert name == BYTE_LEVEL
    assert tokenizer.decode([*tokenizer("Ab").input_ids[:2], 5_000, 40_000]) == "Ab"


def test_a_broken_tokenizer_and_ids_beyond_the_vocabulary_are_named(tmp_path: Path) -> None:
    path = word_tokenizer(tmp_path / "model", ["alpha"])
    (tmp_path / "model" / "tokenizer.json").write_text("{")
    message = refusal(workload_of(dataset=texts(tmp_path / "a.jsonl", "a b"), path=path), tmp_path / "run")
    assert message.startswith(path)
    assert "tokenizer can't be loaded" in message
    workload = workload_of(dataset=texts(tmp_path / "a.jsonl", "zzz"), changes={"vocab_size": 100})
    assert "makes token id 125, but the model's vocabulary ends at 99" in refusal(workload, tmp_path / "run")


def test_sequences_may_be_shorter_than_what_a_tokenizer_adds(tmp_path: Path) -> None:
    workload = workload_of(Task.MASKED_LM, dataset=texts(tmp_path / "a.jsonl", "abc"), sequence_length=1)
    assert prepared(workload, tmp_path / "run")[0].maximum == 1
