"""The user's file of texts: which kinds are read, which column is the text, and what is wrong with a file."""

from __future__ import annotations

import gzip
import os
from pathlib import Path

import pytest
from corpora import decoded, jsonl, prepared, real, refusal, texts, workload_of


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


def test_reading_draws_and_logs_nothing(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    prepared(workload_of(dataset=texts(tmp_path / "a.jsonl", "one")), tmp_path / "run")
    (tmp_path / "b.csv").write_text("text\na\nb,c,d\n")
    refusal(workload_of(dataset=str(tmp_path / "b.csv")), tmp_path / "run")
    assert capfd.readouterr() == ("", "")


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
