"""The command line in this process."""

import signal

import pytest
from typer.testing import CliRunner

from autotune.cli.main import app


@pytest.fixture
def command(monkeypatch, tmp_path):
    """Return a function that runs the command line as the fixture `autotune` does, but in this process."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(signal, "signal", lambda *_: None)  # this process keeps its handlers
    return lambda *arguments: CliRunner().invoke(app, [*map(str, arguments)], env={"COLUMNS": "200"})
