"""`autotune resume`: what it asks for, and where the answer is said to be."""

import signal

import pytest
from exporting import answer_of
from factories import make_config, make_plan
from typer.testing import CliRunner

from autotune.cli.main import app
from autotune.search.tuner import SearchInterrupted
from autotune.storage.run_directory import RunDirectory


@pytest.fixture
def resume(tmp_path, monkeypatch):
    """Return a function that resumes a search whose answer is there at once; it gives the output and what was asked."""
    monkeypatch.setattr(signal, "signal", lambda *_: None)  # this process keeps its handlers
    directory = RunDirectory.create(tmp_path / "run")
    directory.write_plan(make_plan(output=str(tmp_path / "wanted.json")))

    def run(*options: str, interrupted: bool = False):
        asked = {}

        def answer(run_dir, **given):
            asked.update(given)
            result = answer_of(make_config(16))
            path = directory.write_answer(result)
            if interrupted:
                raise SearchInterrupted(result, path)
            return result

        monkeypatch.setattr("autotune.api.resume", answer)
        return CliRunner().invoke(app, ["resume", str(tmp_path / "run"), *options]), asked

    return run


def test_limits_are_passed_on(resume):
    done, asked = resume("--max-time", "20m", "--max-trials", "60", "--effort", "thorough")
    assert done.exit_code == 0
    assert (asked["max_time"], asked["max_trials"], asked["effort"]) == ("20m", 60, "thorough")


def test_without_any_the_search_goes_on_within_its_own(resume):
    _, asked = resume()
    assert {asked[name] for name in ("max_time", "max_trials", "effort", "output")} == {None}


@pytest.mark.parametrize("interrupted", [False, True])
def test_the_answer_is_said_to_be_where_find_was_told_to_write_it(resume, tmp_path, interrupted):
    done, _ = resume(interrupted=interrupted)
    assert f"written: {tmp_path / 'wanted.json'}" in done.stdout
    assert done.exit_code == (130 if interrupted else 0)


def test_or_where_it_is_wanted_now(resume):
    done, asked = resume("-o", "elsewhere.json")
    assert str(asked["output"]) == "elsewhere.json"
    assert "written: elsewhere.json" in done.stdout
