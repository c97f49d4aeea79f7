"""`autotune report` and `autotune explain` from the command line: files, formats, exit codes."""

import errno
import json
from unittest.mock import Mock

import pytest
from finished_searches import make_search, nothing_helps

from autotune.values.result import RunReport


@pytest.fixture
def run(tmp_path):
    make_search(tmp_path / "run")
    return tmp_path / "run"


def test_a_report_is_written_beside_the_search_or_under_a_name_that_says_the_format(command, run, tmp_path):
    done = command("report", run)
    assert done.exit_code == 0
    assert done.stdout.splitlines()[-1] == f"written: {run / 'report.html'}"
    assert (run / "report.html").read_text().startswith("<!DOCTYPE html>")
    assert command("report", run, "--out", tmp_path / "my.json").exit_code == 0
    assert RunReport.model_validate_json((tmp_path / "my.json").read_bytes()).result is not None
    told = json.loads(command("report", run, "--format", "json", "--json").stdout)
    assert (told["file"], told["format"]) == (str(run / "report.json"), "json")
    assert told["answer"].startswith("1.98 x as fast as your baseline (")
    assert (run / "report.json").read_text().startswith("{")
    piped = command("report", run, "--format", "json", "--out", "/dev/null")  # as into a pipe
    assert (piped.exit_code, piped.stdout) == (0, "")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("report run --out report.pdf", "its name doesn't say the format; add --format html|json"),
        ("report run --out no/such/place.html", "can't be written: No such file or directory"),
        ("explain nothing", "the baseline itself is the best"),
        ("explain run --max-time soon", "--max-time soon"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(command, run, tmp_path, words, said):
    make_search(tmp_path / "nothing", nothing_helps)
    done = command(*words.split())
    assert (done.exit_code, done.stderr.count("\n")) == (2, 1)
    assert said in done.stderr


def test_a_link_that_is_named_is_followed_and_one_in_the_place_of_the_usual_name_refused(command, run, tmp_path):
    (tmp_path / "link.json").symlink_to(tmp_path / "target.json")
    assert command("report", run, "-o", tmp_path / "link.json").exit_code == 0
    assert (tmp_path / "link.json").is_symlink()
    assert (tmp_path / "target.json").read_text().startswith("{")
    (tmp_path / "mine").write_text("mine")
    (run / "report.html").symlink_to(tmp_path / "mine")
    assert command("report", run).exit_code == 2
    assert (tmp_path / "mine").read_text() == "mine"


def test_a_full_disk_is_no_bad_input(command, run, monkeypatch):
    monkeypatch.setattr("os.fsync", Mock(side_effect=OSError(errno.ENOSPC, "No space left on device")))
    done = command("report", run)
    assert (done.exit_code, done.stderr.count("\n")) == (4, 1)
    assert "report.html: can't be written: No space left on device" in done.stderr
