"""Commands that list: models, GPUs, search spaces, earlier searches, the doctor's findings, the version."""

from __future__ import annotations

import io
import json
from pathlib import Path
from unittest.mock import Mock

import pytest
from factories import OUT_OF_MEMORY, make_config
from recorded_searches import keep, recorded_search, recorded_trial

from autotune import __version__
from autotune.storage.record import RECORD_FILE, VARIABLE, Record


def test_models_can_be_searched_and_have_sources(command):
    models = json.loads(command("models", "--json").stdout)
    assert len(models) >= 60
    assert all(m["source"].startswith("https://") for m in models)
    shown = command("models", "t5-small").stdout
    assert "google-t5/t5-small" in shown
    assert "gpt2" not in shown


def test_the_version_is_told(command):
    assert command("--version").stdout == f"autotune {__version__}\n"


def test_spaces_have_a_description(command):
    found = {space["name"]: space["description"] for space in json.loads(command("spaces", "--json").stdout)}
    assert found.keys() >= {"adapters", "cpu", "default", "exact", "full", "lora", "moe", "qlora", "speech", "vision"}
    assert all(found.values())
    assert "cpu" in command("spaces", env={"COLUMNS": "0"}).stdout  # as of a terminal without a size


@pytest.mark.slow
def test_doctor_tells_what_a_cpu_cannot_do(autotune):
    report = json.loads(autotune("doctor", "--device", "cpu", "--json").stdout)
    findings = {f["name"]: f for f in report["findings"]}
    assert not findings["fp16"]["available"]
    assert findings["memory budget"]["available"]
    assert findings["LoRA"]["available"]


BEST = make_config(16, precision="bf16")
GPT2 = recorded_search(
    recorded_trial(BEST, 25.0), recorded_trial(make_config(4), OUT_OF_MEMORY),
    id="a", model="openai-community/gpt2", verdict="faster", best_config_id=BEST.config_id,
)  # fmt: skip
AGAIN = GPT2.model_copy(update={"id": "b", "started": "2026-11-19T12:00:00+00:00", "verdict": None})
T5 = recorded_search(id="c", model="google-t5/t5-small", key="0123456789")


@pytest.fixture
def path(tmp_path, monkeypatch) -> Path:
    monkeypatch.delenv(VARIABLE)
    monkeypatch.setenv("AUTOTUNE_HOME", str(tmp_path))
    return tmp_path / RECORD_FILE


@pytest.fixture
def filled(path) -> Record:
    database = Record(path)
    keep(database, GPT2, AGAIN, T5)
    return database


@pytest.fixture
def run(command):
    def run(*arguments: str, code: int = 0, answer: str | None = None):
        done = command("history", *arguments, input=answer)
        assert done.exit_code == code, done.output
        return done

    return run


def test_nothing_recorded_is_said(run, path):
    assert f"nothing is recorded in {path}" in run().stdout.replace("\n", "")
    assert json.loads(run("--json").stdout) == []
    assert not path.exists()


def test_searches_are_listed_with_their_best(run, filled):
    output = run().stdout
    for text in (GPT2.key, "2026-11-20 12:00", "openai-community/gpt2", "causal-lm, sequence 128", "a CPU"):
        assert text in output
    told = {(row["model"], row["started"]): row for row in json.loads(run("--json").stdout)}
    assert told.keys() == {(search.model, search.started) for search in (GPT2, AGAIN, T5)}
    gpt2 = told[GPT2.model, GPT2.started]
    assert (gpt2["key"], gpt2["trials"], gpt2["best"]) == (GPT2.key, 3, 25.0)


@pytest.mark.parametrize(("arguments", "left"), [((GPT2.key,), {"c"}), (("--all",), set())])
def test_what_is_named_is_forgotten(run, filled, arguments, left):
    assert "forgotten: " in run("forget", *arguments, "--yes").stdout
    assert {search.id for search in filled.searches()} == left
    assert json.loads(run("forget", "--all", "--yes", "--json").stdout)["searches"] == len(left)
    assert json.loads(run("forget", "--all", "--json").stdout) == {"searches": 0, "trials": 0}


@pytest.mark.parametrize(("answer", "code", "left"), [("y\n", 0, 0), ("n\n", 0, 3), ("", 2, 3)])
def test_it_asks_first_and_forgets_nothing_where_nobody_answers(run, filled, answer, code, left):
    said = run("forget", "--all", answer=answer, code=code).stderr
    assert "forget 3 searches, 7 trials?" in said
    assert ("--yes" in said) == (code == 2)
    assert len(filled.searches()) == left


def test_ctrl_c_at_the_question_interrupts(run, filled, monkeypatch):
    interrupted = Mock(spec=io.BytesIO, closed=False, read1=Mock(side_effect=KeyboardInterrupt))
    monkeypatch.setattr("typer.testing.make_input_stream", lambda *_: interrupted)
    assert "autotune: interrupted" in run("forget", "--all", code=130).stderr
    assert len(filled.searches()) == 3


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([""], "nothing is recorded under this key"), ([], "name what to forget"),
        (["--all", "zzz"], "name what to forget"), (["zzz"], "history zzz"),
    ],
)  # fmt: skip
def test_what_can_not_be_forgotten_is_one_line(run, filled, arguments, said):
    (line,) = run("forget", *arguments, "--yes", code=2).stderr.splitlines()
    assert said in line
    assert len(filled.searches()) == 3


def test_a_record_that_is_off_or_damaged_is_one_line(run, path, monkeypatch):
    path.write_bytes(b"no journal" * 100)
    (line,) = run(code=2).stderr.splitlines()
    assert "damaged" in line
    monkeypatch.setenv(VARIABLE, "off")
    assert run(code=2).stderr == "autotune: AUTOTUNE_RECORD is off: there is no record\n"
