"""The user's file of texts: which kinds are read, which column is the text, how long it is, and what is refused."""

import gzip
import os
from pathlib import Path

import pytest
from corpora import config_of, jsonl, save_tokenizer, texts, workload_of
from factories import make_spec
from plans import planned

from autotune.errors import InputError, RunDirectoryError
from autotune.training.dataset import training_data
from autotune.training.texts import BYTE_LEVEL, MAX_SAMPLES, load_tokenizer, prepare, text_lengths
from autotune.values.model import Task

RUN = Path("run [*] ü")


@pytest.fixture(autouse=True)
def _here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def prepared(dataset, task=Task.CAUSAL_LM, **fields):
    """Return the profile of a file's texts, and what is said of them."""
    profile, notes = prepare(workload_of(task, dataset=dataset, **fields), RUN)
    return profile, "\n".join(notes)


def tokens(dataset, task=Task.CAUSAL_LM, **fields):
    """Return the lengths of the texts of a file in bytes, without their end."""
    prepared(dataset, task, **fields)
    return [int(length) - 1 for length in text_lengths(RUN)[:, 0]]


def refusal(dataset, task=Task.CAUSAL_LM, **fields):
    with pytest.raises(InputError) as caught:
        prepared(dataset, task, **fields)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.jsonl", '{"text": "one"}\n\n{"text": "three"}\n'), ("a.JSONL", '{"text": "one"}\r\n{"text": "three"}'),
        ("a.json", '[{"text": "one"}, {"text": "three"}]'), ("a.json", '{"text": "one"}\n{"text": "three"}\n'),
        ("a.csv", 'text,n\none,1\n"three",2\n'), ("a.tsv", "text\tn\none\t1\nthree\t2\n"), ("a.txt", "one\n\nthree\n"),
        ("a.text", "one\nthree"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("mark", ["", "\ufeff"], ids=["plain", "BOM"])
def test_kinds_of_files(name, content, mark):
    Path(name).write_text(mark + content, encoding="utf-8")
    assert tokens(name) == [3, 5]


def test_parquet_and_compressed_files():
    from datasets import Dataset

    Dataset.from_dict({"text": ["one", "three"]}).to_parquet("a.parquet")
    assert tokens("a.parquet") == [3, 5]
    Path("a.jsonl").write_bytes(gzip.compress(b'{"text": "one"}\n'))
    assert tokens("a.jsonl") == [3]


@pytest.mark.parametrize("name", ["a b.jsonl", "größe 漢字.jsonl", "a[1]*?.jsonl", "hf:::a#b.jsonl", "-a'\".jsonl"])
def test_file_names_are_taken_literally(name):
    assert tokens(texts(name, "one")) == [3]


def test_a_link_is_read_by_its_own_name(tmp_path):
    texts("0a1b2c", "one")
    Path("a.jsonl").symlink_to("0a1b2c")
    assert tokens(str(tmp_path / "a.jsonl")) == [3]
    assert planned(data="a.jsonl").workload.dataset == str(tmp_path / "a.jsonl")


def test_reading_draws_and_logs_nothing(capfd):
    prepared(texts("a.jsonl", "one"))
    Path("b.csv").write_text("text\na\nb,c,d\n")
    refusal("b.csv")
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("a.jsonl", b"", "is empty"),
        ("a.jsonl", b"\n \n", "holds no rows"),
        ("a.csv", b"text\n", "holds no rows"),
        ("a.txt", b"\n\n", "no row holds enough text"),
        ("a.jsonl", b'{"text": "a"}\n{"text": "b\n{"text": "c"}\n', "line 2: not a JSON object"),
        ("a.jsonl", b'{"text": "a"}\n\n["b"]\n', "line 3: not a JSON object"),
        ("a.jsonl", b'"a"\n"b"\n', "line 1: not a JSON object"),
        ("a.jsonl", '{"text": "ä"}\n'.encode("latin-1"), "is not UTF-8 text"),
        ("a.csv", "text\nä\n".encode("latin-1"), "is not UTF-8 text"),
        ("a.txt", "ä\n".encode("latin-1"), "is not UTF-8 text"),
        ("a.json", b'[{"text": "a"}, {"text"', "line 1: not a JSON object"),
        ("a.csv", b"text\na\nb,c,d\n", "in line 3, saw 3"),
        ("a.csv", b"id,score\n1,2\n", "no column of strings (--recipe?); the columns are id, score"),
        ("a.jsonl", b'{"a": "x", "b": "y"}\n', "several columns of strings; say --text-field"),
        ("a.jsonl", b'{"text": 3}\n', "column 'text' holds int64, not strings"),
        ("a.jsonl", b'{"text": ["a"]}\n', "column 'text' holds list, not strings"),
        ("a.jsonl", b'{"text": "a"}\n{"text": 3}\n', "column 'text' holds json, not strings"),
        ("a.jsonl", b'{"text": null}\n', "column 'text' holds null, not strings"),
        ("a.parquet", b"nonsense", "can't be read as PARQUET (Parquet magic bytes not found"),
        ("a.pdf", b"%PDF", "unknown kind of file; give one that ends in .jsonl, .json, .csv"),
        ("a", b"text", "unknown kind of file"),
    ],
)
def test_unusable_files_are_named_with_the_reason(name, content, expected):
    Path(name).write_bytes(content)
    message = refusal(name)
    assert message.startswith(f"{name}: ")
    assert expected in message
    assert not RUN.exists() or not list(RUN.iterdir())


@pytest.mark.parametrize(
    ("make", "name", "said"),
    [
        (lambda: texts("train.jsonl", "one"), "trian.jsonl", "no such file (did you mean 'train.jsonl'?)"),
        (lambda: Path("data").mkdir(), "data", "unknown kind of file"),
        (lambda: Path("data.jsonl").mkdir(), "data.jsonl", "not a regular file"),
        (lambda: os.mkfifo("a.jsonl"), "a.jsonl", "not a regular file"),
        (lambda: None, "x" * 5000, ""),
        (lambda: None, "x" * 5000 + ".jsonl", ""),
        (lambda: None, "nul\0.jsonl", ""),
        (lambda: None, "~nobody-here/a.jsonl", ""),
    ],
    ids=["misspelt", "folder", "folder.jsonl", "pipe", "long", "long.jsonl", "nul", "nobody"],
)
def test_a_name_that_leads_to_no_file_is_refused(make, name, said):
    make()
    assert said in refusal(name)


@pytest.mark.parametrize("task", [Task.SPEECH_CTC, Task.IMAGE_CLASSIFICATION, Task.IMAGE_TEXT_TO_TEXT])
def test_images_and_recordings_are_not_read_from_files(task):
    said = f"{'recordings' if task is Task.SPEECH_CTC else 'images'} are not read from files"
    assert said in refusal("a.parquet", task)


@pytest.mark.parametrize(
    ("task", "row", "field", "length"),
    [
        (Task.CAUSAL_LM, {"id": 1, "body": "four"}, None, 4),
        (Task.CAUSAL_LM, {"text": "one", "body": "three"}, "body", 5),
        (Task.SEQUENCE_CLASSIFICATION, {"sentence": "four", "label": "positive"}, None, 4),
        (Task.SEQ2SEQ_LM, {"document": "four", "target": "one"}, None, 4),
    ],
)
def test_the_only_column_of_strings_or_the_named_one_is_the_text(task, row, field, length):
    assert tokens(jsonl("a.jsonl", [row]), task, text_field=field) == [length]


def test_an_unknown_column_gets_a_suggestion():
    message = refusal(jsonl("a.jsonl", [{"sentence": "one", "id": 1}]), text_field="sentense")
    assert "no column 'sentense' (did you mean 'sentence'?); the columns are sentence, id" in message


@pytest.mark.parametrize(
    ("rows", "target_length", "means", "is_own"),
    [
        ([{"text": "x" * 9, "target": "y" * 3}, {"text": "x" * 9, "target": "y" * 5}], 24, (10, 5), False),
        ([{"text": "a text"}], 4, (7, 4), True),
    ],
)
def test_a_target_column_counts_among_the_tokens_and_without_one_the_text_is_its_own_target(
    rows, target_length, means, is_own
):
    workload = workload_of(Task.SEQ2SEQ_LM, dataset=jsonl("a.jsonl", rows), target_length=target_length)
    lengths, notes = prepare(workload, RUN)
    assert (lengths.mean, lengths.mean_target) == means  # an end token each
    assert workload.model_copy(update={"lengths": lengths}).tokens_per_sample == sum(means)
    assert any("the target is the text itself" in note for note in notes) is is_own


def test_synthetic_data_need_no_preparation(tmp_path):
    assert prepare(workload_of(), tmp_path) == (None, ())
    assert not list(tmp_path.iterdir())


def test_the_profile_tells_the_lengths():
    lengths, said = prepared(texts("a.jsonl", *("x" * n for n in range(1, 12))))
    assert (lengths.samples, lengths.minimum, lengths.median, lengths.maximum) == (11, 2, 7, 12)
    assert lengths.mean == pytest.approx(7)
    assert lengths.p95 in (11, 12)
    assert said.startswith("11 samples of 2 to 12 tokens, 7 on average, of column text (tokenizer: byte-level ByT5)")
    assert "are cut" not in said


def test_long_texts_are_cut_rows_without_text_left_out_and_a_large_file_is_sampled():
    assert tokens(texts("a.jsonl", "x" * 100_000, "ü" * 30)) == [23, 23]
    said = prepared(texts("a.jsonl", "x" * 50, "y" * 50, "z"))[1]
    assert "67% of the samples reach 24 tokens: they are cut" in said
    lengths, said = prepared(texts("a.jsonl", "a", None, "", " \t", "b"))
    assert lengths.samples == 2
    assert "3 of 5 rows are left out" in said
    lengths, said = prepared(texts("a.jsonl", *(f"{i}" for i in range(MAX_SAMPLES + 5))))
    assert lengths.samples == MAX_SAMPLES
    assert "10,000 of 10,005 rows" in said


def test_nothing_but_the_lengths_stays_behind_and_they_are_replaced():
    for text in ("one", "three"):
        assert tokens(texts("a.jsonl", text)) == [len(text)]
        assert [path.name for path in RUN.iterdir()] == ["lengths.npy"]


def test_lengths_that_are_missing_or_can_not_be_written_are_errors_of_the_run_directory():
    with pytest.raises(RunDirectoryError, match="no tokenized data"):
        training_data(workload_of(dataset="a.jsonl"), config_of("llama"), samples=1, directory=RUN)
    workload = workload_of(dataset=texts("a.jsonl", "one"))
    with pytest.raises(RunDirectoryError, match="can't be written"):
        prepare(workload, Path("a.jsonl/run"))


def word_tokenizer(directory, *words):
    save_tokenizer(directory, ["?", *words], "?")
    config_of("llama").save_pretrained(directory)
    return str(directory)


def test_the_tokenizer_of_the_model_is_used_and_texts_of_one_token_teach_a_causal_model_nothing(tmp_path):
    path = word_tokenizer(tmp_path / "model", "alpha", "beta")
    lengths, said = prepared(texts("a.jsonl", "beta alpha beta"), path=path)
    assert lengths.maximum == 3
    assert said == f"1 sample of 3 to 3 tokens, 3 on average, of column text (tokenizer: {path})"
    assert prepared(texts("a.jsonl", "alpha", "alpha alpha"), path=path)[0].samples == 1


def test_a_tokenizer_of_the_hub_cache_is_used(tmp_path, monkeypatch):
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    repository = tmp_path / "hub" / "models--tiny--llama"
    word_tokenizer(repository / "snapshots" / "abc", "alpha")
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("abc")
    assert "(tokenizer: tiny/llama)" in prepared(texts("a.jsonl", "alpha alpha"))[1]


@pytest.mark.parametrize("model_type", ["gpt2", "bert"])
def test_a_directory_without_vocabulary_gives_bytes(model_type, tmp_path):
    config_of(model_type).save_pretrained(tmp_path / "model")
    _, said = prepared(texts("a.jsonl", "some text"), model_type=model_type, path=str(tmp_path / "model"))
    assert BYTE_LEVEL in said
    assert "every byte counts as a token" in said


def test_special_tokens_written_in_a_text_are_text_and_ids_that_are_no_bytes_are_none():
    text = "<pad></s> <extra_id_0>"
    assert tokens(texts("a.jsonl", text)) == [len(text)]
    tokenizer, name = load_tokenizer(make_spec(), [])
    assert name == BYTE_LEVEL
    # A model generates any id of its vocabulary, which has thousands.
    assert tokenizer.decode([*tokenizer("Ab").input_ids[:2], 5_000, 40_000]) == "Ab"


def test_a_broken_tokenizer_and_ids_beyond_the_vocabulary_are_named(tmp_path):
    path = word_tokenizer(tmp_path / "model", "alpha")
    (tmp_path / "model" / "tokenizer.json").write_text("{")
    message = refusal(texts("a.jsonl", "a b"), path=path)
    assert message.startswith(path)
    assert "tokenizer can't be loaded" in message
    said = "makes token id 125, but the model's vocabulary ends at 99"
    assert said in refusal(texts("a.jsonl", "zzz"), changes={"vocab_size": 100})


def test_sequences_may_be_shorter_than_what_a_tokenizer_adds():
    assert prepared(texts("a.jsonl", "abc"), Task.MASKED_LM, sequence_length=1)[0].maximum == 1
