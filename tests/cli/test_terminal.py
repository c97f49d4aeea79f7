"""A search on a real terminal: what stands on the screen while it runs, and what is left of it."""

import os
import re
import sys
import time
from pathlib import Path
from typing import Any

import pexpect
import pyte
import pytest

TESTS = Path(__file__).parents[1]


class Terminal:
    """A terminal in which a command runs, and its screen."""

    def __init__(self, command: list[str], *, columns: int = 80, **environment: str) -> None:
        inherited = {k: v for k, v in os.environ.items() if k not in ("NO_COLOR", "COLUMNS", "TERM", "CI")}
        own = {**inherited, "TERM": "xterm-256color", **environment}
        how: dict[str, Any] = {"dimensions": (24, columns), "encoding": "utf-8", "timeout": 200}
        self._child = pexpect.spawn(command[0], command[1:], env=own, **how)
        self.raw = ""
        self._screen = pyte.HistoryScreen(columns, 24, history=1000)
        self._stream = pyte.Stream(self._screen)

    @property
    def lines(self) -> list[str]:
        """What has scrolled away and what is on the screen, without empty lines."""
        gone = ["".join(row[x].data for x in range(self._screen.columns)) for row in self._screen.history.top]
        return [line.rstrip() for line in (*gone, *self._screen.display) if line.strip()]

    @property
    def is_cursor_hidden(self) -> bool:
        return bool(self._screen.cursor.hidden)

    def read_until(self, text: str) -> None:
        """Take in what is written until `text` stands there, or is the window's title."""
        ends = time.monotonic() + 120
        while text not in "\n".join([self._screen.title, *self.lines]):
            assert time.monotonic() < ends, f"{text!r} never came: {self.lines}"
            self._feed(self._child.read_nonblocking(size=4096, timeout=120))

    def read_to_the_end(self) -> int:
        """Take in all that is written, and return the exit code."""
        self._feed(self._child.read())
        self._child.wait()
        return self._child.exitstatus

    def interrupt(self) -> None:
        self._child.sendintr()

    def close(self) -> None:
        self._child.close(force=True)

    def _feed(self, written: str) -> None:
        self.raw += written
        self._stream.feed(written)


@pytest.fixture
def terminal():
    """Return a function that starts a command in a terminal."""
    started = []

    def start(*command: object, **options) -> Terminal:
        started.append(Terminal([str(word) for word in command], **options))
        return started[-1]

    yield start
    for each in started:
        each.close()


@pytest.fixture
def shown(terminal):
    """Return a function that shows a search of a few events in a terminal."""
    path = os.pathsep.join([str(TESTS.parent), str(TESTS), *filter(None, sys.path)])
    return lambda *words, **options: terminal(
        sys.executable, TESTS / "terminal_search.py", *words, PYTHONPATH=path, **options
    )


LOGGED = "trial 6: precision bf16, micro-batch 16: completed, 34.2 samples/s ± 2%, peak 1.00 GiB, 10 s"


def test_the_display_stands_below_what_has_happened_and_ctrl_c_leaves_the_lines_and_a_cursor(shown):
    screen = shown()
    screen.read_until("waiting")
    assert screen.lines[0] == "tuning for the CPU"
    assert "".join(screen.lines[1:3]) == LOGGED
    assert [line.partition(" · ")[0] for line in screen.lines[3:]] == ["searching", "trial 7", "best"]
    assert screen.is_cursor_hidden
    screen.interrupt()
    assert screen.read_to_the_end() == 0
    left = ["tuning for the CPU", LOGGED[:80], LOGGED[80:], "interrupted", "the answer"]
    assert [line for line in screen.lines if line != "^C"] == left
    assert not screen.is_cursor_hidden


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "escapes"), [({}, True), ({"columns": 40}, True), ({"TERM": "dumb"}, False)], ids=["wide", "narrow", "dumb"]
)
def test_a_terminal_gets_what_it_can_draw(shown, how, escapes):
    screen = shown("ends", **how)
    assert screen.read_to_the_end() == 0
    assert screen.lines[-1] == "the answer"
    assert ("\x1b" in screen.raw) == escapes
    if not escapes:
        assert screen.raw.splitlines()[:2] == ["tuning for the CPU", LOGGED]


@pytest.mark.slow
def test_a_real_search_shows_its_phases_and_then_the_answer(terminal, tiny_llama, tmp_path):
    options = ("--effort", "quick", "--device", "cpu", "--seq-len", "32", "--global-batch", "4", "--max-trials", "2")
    words = ("-m", "autotune", "find", "--model", tiny_llama, *options, "--run-dir", tmp_path / "run")
    screen = terminal(sys.executable, *words)
    screen.read_until("searching · at most")
    assert screen.lines[-1].startswith("best · ")
    assert screen.read_to_the_end() == 0
    drawn = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", screen.raw)
    for phase in ("looking at the machine and the model", "predicting", "baseline", "searching", "checking"):
        assert f"{phase} · " in drawn
    text = "\n".join(screen.lines)
    assert "written:" in text
    assert "searching · " not in text
    assert not screen.is_cursor_hidden
