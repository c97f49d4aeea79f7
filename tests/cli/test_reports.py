"""`autotune report` and `autotune explain` from the command line: files, formats, exit codes."""

import json
import os
import signal
from concurrent.futures import ThreadPoolExecutor

import pytest
from finished_searches import make_search, nothing_helps
from typer.testing import CliRunner

from autotune.cli.main import app
from autotune.values.result import RunReport


@pytest.fixture
def command(monkeypatch):
    """Return a function that runs a command in this process."""
    monkeypatch.setattr(signal, "signal", lambda *_: None)  # this process keeps its handlers
    return lambda *words: CliRunner().invoke(app, [str(w) for w in words])


@pytest.fixture
def run(tmp_path):
    make_search(tmp_path / "run")
    return tmp_path / "run"


def test_a_report_is_written_beside_the_search(command, run):
    done = command("report", run)
    assert done.exit_code == 0
    assert done.stdout.splitlines()[-1] == f"written: {run / 'report.html'}"
    assert (run / "report.html").read_text().startswith("<!DOCTYPE html>")


@pytest.mark.parametrize(("form", "start"), [("html", "<!DOCTYPE html>"), ("json", "{")])
def test_formats_have_files_of_their_own(command, run, form, start):
    assert command("report", run, "--format", form).exit_code == 0
    assert (run / f"report.{form}").read_text().startswith(start)


def test_json_is_the_whole_report(command, run):
    command("report", run, "--format", "json")
    assert RunReport.model_validate_json((run / "report.json").read_bytes()).result is not None


def test_a_name_says_the_format(command, run, tmp_path):
    assert command("report", run, "--out", tmp_path / "my.json").exit_code == 0
    assert (tmp_path / "my.json").read_text().startswith("{")


def test_what_was_written_is_told_as_json(command, run):
    told = json.loads(command("report", run, "--json").stdout)
    assert told["file"] == str(run / "report.html")
    assert told["format"] == "html"
    assert told["answer"].startswith("1.98 x as fast as your baseline (")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--out", "report.pdf"], "its name doesn't say the format; add --format html|json"),
        (["--out", "no/such/place.html"], "can't be written: No such file or directory"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(command, run, words, said):
    done = command("report", run, *words)
    assert done.exit_code == 2
    assert said in done.stderr
    assert done.stderr.count("\n") == 1


def test_no_search_is_exit_code_2(command, tmp_path):
    for name in ("report", "explain"):
        done = command(name, tmp_path)
        assert done.exit_code == 2
        assert "holds no search" in done.stderr


def test_nothing_to_explain_is_exit_code_2(command, tmp_path):
    make_search(tmp_path / "run", nothing_helps)
    done = command("explain", tmp_path / "run")
    assert done.exit_code == 2
    assert "the baseline itself is the best" in done.stderr


def test_a_time_that_is_none_is_refused(command, run):
    done = command("explain", run, "--max-time", "soon")
    assert done.exit_code == 2
    assert "--max-time soon" in done.stderr


def test_a_pipe_and_a_link_that_are_named_stay_what_they_are(command, run, tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link.json").symlink_to(tmp_path / "target.json")
    with ThreadPoolExecutor() as others:
        read = others.submit((tmp_path / "pipe").read_text)
        assert command("report", run, "--format", "json", "-o", tmp_path / "pipe").exit_code == 0
        assert (tmp_path / "pipe").is_fifo()
        assert read.result().startswith("{")
    assert command("report", run, "-o", tmp_path / "link.json").exit_code == 0
    assert (tmp_path / "link.json").is_symlink()
    assert (tmp_path / "target.json").read_text().startswith("{")


def test_the_usual_name_in_a_run_directory_leads_nowhere_else(command, run, tmp_path):
    (tmp_path / "mine").write_text("mine")
    (run / "report.html").symlink_to(tmp_path / "mine")
    assert command("report", run).exit_code == 2
    assert (tmp_path / "mine").read_text() == "mine"
