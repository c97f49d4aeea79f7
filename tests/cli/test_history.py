"""`autotune history`: what is recorded, listed and forgotten."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from factories import OUT_OF_MEMORY, make_config
from recorded_searches import keep, recorded_search, recorded_trial
from typer.testing import CliRunner

from autotune.cli.main import app
from autotune.storage.record import RECORD_FILE, VARIABLE, Record
from autotune.storage.recorded import Key

BEST = make_config(16, precision="bf16")
GPT2 = recorded_search(
    recorded_trial(BEST, 25.0), recorded_trial(make_config(4), OUT_OF_MEMORY),
    id="a", model="openai-community/gpt2", host="node7", verdict="faster", best_config_id=BEST.config_id, speedup=2.5,
)  # fmt: skip
AGAIN = GPT2.model_copy(update={"id": "b", "started": "2026-11-19T12:00:00+00:00", "verdict": None, "speedup": None})
T5 = recorded_search(id="c", model="google-t5/t5-small", key=Key(model="t", workload="w", hardware="h", versions="v"))


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


def run(*arguments: str, code: int = 0, answer: str | None = None):
    done = CliRunner().invoke(app, ["history", *arguments], input=answer, env={"COLUMNS": "200"})
    assert done.exit_code == code, done.output
    return done


def line_of(done) -> str:
    (line,) = done.stderr.strip().splitlines()
    return line


def test_nothing_recorded_is_said(path):
    assert f"nothing is recorded in {path}" in run().stdout.replace("\n", "")
    assert json.loads(run("--json").stdout) == []
    assert not path.exists()


def test_searches_are_listed_by_key_with_the_best_of_all(filled):
    output = run().stdout
    for text in (GPT2.key.short, "2026-11-20 12:00", "openai-community/gpt2", "causal-lm, sequence 128", "a CPU"):
        assert text in output
    gpt2, t5 = json.loads(run("--json").stdout)
    assert (gpt2["key"], gpt2["searches"], gpt2["trials"]) == (GPT2.key.short, 2, 6)
    assert gpt2["best_samples_per_second"] == 25.0
    assert (t5["model"], t5["trials"]) == ("google-t5/t5-small", 1)
    assert run("--quiet").stdout.split() == [GPT2.key.short, T5.key.short]
    assert [group["model"] for group in json.loads(run("--model", "GPT", "--json").stdout)] == [GPT2.model]


@pytest.mark.parametrize("columns", ["60", "80"])
def test_no_name_is_broken_in_a_narrow_terminal(filled, columns):
    shown = CliRunner().invoke(app, ["history"], env={"COLUMNS": columns}).stdout
    assert max(map(len, shown.splitlines())) <= int(columns)
    assert all(name in shown for name in (GPT2.model, T5.model))


@pytest.mark.parametrize(
    ("arguments", "left"),
    [
        ((GPT2.key.short,), {"c"}),
        (("--model", "google-t5/T5-small"), {"a", "b"}),
        (("--all",), set()),
    ],
)
def test_what_is_named_is_forgotten(filled, arguments, left):
    assert "forgotten: " in run("forget", *arguments, "--yes").stdout
    assert {search.id for search in filled.searches()} == left


@pytest.mark.parametrize(("answer", "code", "left"), [("y\n", 0, 0), ("n\n", 0, 3), ("", 2, 3)])
def test_it_asks_first_and_forgets_nothing_where_nobody_answers(filled, answer, code, left):
    said = run("forget", "--all", answer=answer, code=code).stderr
    assert "forget 3 searches, 7 trials?" in said
    assert ("--yes" in said) == (code == 2)
    assert len(filled.searches()) == left


def test_what_is_forgotten_can_be_counted(filled):
    assert json.loads(run("forget", "--all", "--yes", "--json").stdout) == {"searches": 3, "trials": 7}
    assert json.loads(run("forget", "--all", "--json").stdout) == {"searches": 0, "trials": 0}


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--model", "bloom"], "--model bloom: nothing is recorded"),
        (["forget", "", "--yes"], "nothing is recorded under this key"),
        (["forget", "--yes"], "name what to forget"),
        (["forget", "--all", "--model", "gpt2", "--yes"], "name what to forget"),
        (["forget", "zzz", "--yes"], "history zzz"),
        (["forget", "--model", "google-t5/t5-smal", "--yes"], "did you mean 'google-t5/t5-small'"),
    ],
    ids=str,
)
def test_bad_input_is_one_line(filled, arguments, said):
    done = run(*arguments, code=2)
    assert said in line_of(done)
    assert len(filled.searches()) == 3


def test_a_beginning_that_several_keys_have_is_not_enough(filled):
    searches = {}
    for length in range(1, 40):  # two keys that begin alike
        other = recorded_search(id=f"n{length}", key=Key(model=str(length), workload="", hardware="", versions=""))
        searches.setdefault(other.key.short[0], []).append(other)
    alike = next(found for found in searches.values() if len(found) > 1)[:2]
    for search in alike:
        filled.write(search, [])
    assert "could be" in line_of(run("forget", alike[0].key.short[0], "--yes", code=2))


def test_a_record_that_is_off_or_damaged_is_one_line(path, monkeypatch):
    path.write_bytes(b"no journal" * 100)
    assert "damaged" in line_of(run(code=2))
    monkeypatch.setenv(VARIABLE, "off")
    assert line_of(run(code=2)) == "autotune: AUTOTUNE_RECORD is off: there is no record"
