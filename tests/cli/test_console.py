"""Errors of commands: one line and an exit code, an object with --json, a traceback with --debug."""

import json
import logging
import signal

import pytest
import typer
from typer.testing import CliRunner

from autotune.cli.console import Verbose, guarded
from autotune.cli.main import app


@pytest.fixture
def command(monkeypatch, tmp_path):
    """Return a function that runs the command line as the fixture `autotune` does, but in this process."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(signal, "signal", lambda *_: None)  # this process keeps its handlers
    return lambda *arguments: CliRunner().invoke(app, [*map(str, arguments)], env={"COLUMNS": "200"})


def test_a_device_that_is_not_there_is_exit_code_3(command):
    done = command("find", "--model", "gpt2", "--device", "cuda:99")
    assert done.exit_code == 3
    assert "cuda:99" in done.stderr


def test_an_error_is_an_object_on_stdout_with_json(command):
    done = command("find", "--model", "t5-smal", "--json")
    assert done.exit_code == 2
    error = json.loads(done.stdout)["error"]
    assert error["kind"] == "UnknownModelError"
    assert error["exit_code"] == 2
    assert "t5-small" in error["message"]


def test_debug_shows_the_traceback(autotune):
    done = autotune("find", "--model", "t5-smal", "--debug")
    assert "Traceback" in done.stderr


def test_an_unwritable_run_directory_is_refused_first(command, tmp_path):
    (tmp_path / "file").write_text("in the way")
    done = command("find", "--model", "gpt2", "--run-dir", "file/run")
    assert done.exit_code == 2
    assert done.stderr.count("\n") == 1
    assert "file/run" in done.stderr


def test_quiet_and_verbose_contradict_each_other(command):
    done = command("find", "--model", "gpt2", "--quiet", "--verbose")
    assert done.exit_code == 2
    assert done.stderr == "autotune: --quiet and --verbose contradict each other; drop one of the two\n"


@pytest.mark.parametrize("options", [(), ("--verbose",)])
def test_what_bitsandbytes_lacks_on_a_processor_is_said_with_verbose_alone(caplog, options):
    """It says so at its import, on a processor with bfloat16 instructions, about a kernel for inference."""

    @guarded
    def imports(verbose: Verbose = False) -> None:
        logging.getLogger("bitsandbytes.backends.cpu.ops").warning("Failed to load CPU gemm_4bit_forward")

    program = typer.Typer()
    program.command()(imports)
    assert CliRunner().invoke(program, options).exit_code == 0
    assert len(caplog.records) == len(options)
