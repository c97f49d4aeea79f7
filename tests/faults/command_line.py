"""The command line in this process: the child that looks at the model answers here, and no trial is run."""

from __future__ import annotations

import json
import os
import shutil
import signal
import time
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

from typer.testing import CliRunner

from autotune.cli.main import app
from autotune.execution.describe import run_describe
from autotune.execution.runner import LocalRunner
from autotune.value import Value, write_value


class Done(NamedTuple):
    """What a command left behind."""

    exit_code: int
    stdout: str
    stderr: str
    processor_s: float


class TrialBegan(BaseException):
    """The input was taken for good."""


def run(words: list[str], folder: Path, files: Mapping[str, Any], environment: Mapping[str, str]) -> Done:
    """Run a command in `folder`, in which `files` lie; a value that is neither text nor bytes is written as JSON."""
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if isinstance(content, bytes):
            path.write_bytes(content)
        elif isinstance(content, Path):
            shutil.copytree(content, path)
        else:
            path.write_text(content if isinstance(content, str) else json.dumps(content))
    before, started = Path.cwd(), time.process_time()
    os.chdir(folder)
    try:
        with (
            patch.object(signal, "signal", lambda *_: None),
            patch.object(LocalRunner, "begin", lambda self: None),
            patch.object(LocalRunner, "start", lambda self: None),
            patch.object(LocalRunner, "ask", _asked),
            patch.object(LocalRunner, "run", _began),
            warnings.catch_warnings(record=True) as caught,
        ):
            done = CliRunner().invoke(app, words, env={"COLUMNS": "200", **environment})
    finally:
        os.chdir(before)
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    said = done.stderr + "".join(f"{w.filename}: {w.message}\n" for w in caught)
    return Done(done.exit_code, done.stdout, said, time.process_time() - started)


def _asked(runner: Any, name: str, entry: str, request: Value, *, timeout_s: float) -> Path:
    """Answer as the child would."""
    if not entry.endswith(":run_describe"):
        raise TrialBegan
    directory: Path = runner._run_directory / name
    directory.mkdir(parents=True, exist_ok=True)
    write_value(request, directory / "request.json")
    run_describe(directory)
    return directory


def _began(runner: Any, request: Any) -> None:
    raise TrialBegan
