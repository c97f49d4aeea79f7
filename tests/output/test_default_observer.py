"""Who hears of a search that is started from Python."""

import io
import logging
import sys

import pytest
from search_events import Heard

from autotune.output.default_observer import heard_by
from autotune.values.events import Note, Phase, PhaseBegan, ignore

EVENTS = (PhaseBegan(phase=Phase.PREDICTING), Note(text="a line that is not wrapped, however long it is " * 4))


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def stderr(monkeypatch):
    """Return a function that puts another stderr in place."""

    def put(file):
        monkeypatch.setattr(sys, "stderr", file)
        return file

    return put


def tell(observer=None, **options):
    with heard_by(observer, **options) as heard:
        for event in EVENTS:
            heard(event)
    return heard


def test_an_observer_of_the_users_own_is_the_only_one(stderr):
    file, own = stderr(Terminal()), Heard()
    assert tell(own) is own
    assert own == list(EVENTS)
    assert file.getvalue() == ""


def test_at_a_terminal_it_is_shown_on_stderr_and_nothing_on_stdout(stderr, monkeypatch, capsys):
    monkeypatch.setenv("TERM", "xterm")
    file = stderr(Terminal())
    tell()
    assert EVENTS[1].text.strip() in file.getvalue().replace("\n", "")
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("file", [io.StringIO(), None], ids=["a file", "none at all"])
def test_where_nobody_sits_nothing_is_told(stderr, file, capsys):
    stderr(file)
    assert tell() is ignore
    assert capsys.readouterr().out == ""
    assert file is None or file.getvalue() == ""


def test_quiet_tells_nobody_but_an_observer(stderr):
    file = stderr(Terminal())
    assert tell(quiet=True) is ignore
    assert file.getvalue() == ""
    own = Heard()
    assert tell(own, quiet=True) is own


def test_a_program_that_logs_finds_it_in_its_log_line_by_line(stderr, caplog):
    file = stderr(Terminal())
    with caplog.at_level(logging.INFO, logger="autotune"):
        tell()
    assert [record.getMessage() for record in caplog.records] == ["predicting ...", EVENTS[1].text]
    assert {(record.name, record.levelno) for record in caplog.records} == {("autotune", logging.INFO)}
    assert file.getvalue() == ""


def test_in_a_notebook_lines_go_to_stderr(stderr, monkeypatch):
    file = stderr(io.StringIO())
    monkeypatch.setattr("rich.console._is_jupyter", lambda: True)
    tell()
    assert file.getvalue().splitlines() == ["predicting ...", EVENTS[1].text]
