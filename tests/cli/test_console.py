"""Completion in a real shell: a Tab after a few letters, and what stands there then."""

import json
import shutil
import sys
from pathlib import Path

import pexpect
import pytest
from typer.testing import CliRunner

from autotune.cli.main import app
from autotune.errors import InputError

PROGRAM = Path(sys.executable).with_name("autotune")


@pytest.fixture(scope="module")
def bash(tmp_path_factory):
    """A bash that has read `autotune --show-completion`."""
    if not PROGRAM.exists():
        pytest.skip("the command isn't installed beside this Python")
    folder = tmp_path_factory.mktemp("shell")
    (folder / "mine.jsonl").touch()
    shell = pexpect.spawn(
        shutil.which("bash"),
        ["--norc", "--noprofile"],
        cwd=folder,
        env={"PATH": f"{PROGRAM.parent}:/usr/bin:/bin", "TERM": "dumb", "PS1": "ready>", "INPUTRC": "/dev/null"},
        encoding="utf-8",
        timeout=60,
        dimensions=(24, 200),
    )
    shell.sendline('eval "$(autotune --show-completion)"; echo sourced')
    shell.expect("\nsourced")
    yield shell
    shell.close(force=True)


def completed(bash, typed: str) -> str:
    """What the line is after a Tab; a marker typed behind it shows where it ends."""
    bash.send(f"{typed}\t#here")
    bash.expect("#here")
    line = bash.before.rpartition("ready>")[2]
    bash.sendcontrol("u")
    bash.sendline("echo cleared")
    bash.expect("\ncleared")
    return line


@pytest.mark.parametrize(
    ("typed", "expected"),
    [
        ("autotune estim", "autotune estimate "),
        pytest.param("autotune find --check-l", "autotune find --check-loss ", marks=pytest.mark.slow),
        pytest.param("autotune find --data mine", "autotune find --data mine.jsonl ", marks=pytest.mark.slow),
    ],
    ids=["a command", "an option", "a file"],
)
def test_a_tab_completes(bash, typed, expected):
    assert completed(bash, typed) == expected


@pytest.fixture
def asked(tmp_path, monkeypatch):
    """Return a function that runs a command in a project, and gives what it asks `autotune.api` for, and its result."""
    (tmp_path / "pyproject.toml").write_text(
        '[tool.autotune]\nmodel = "gpt2"\neffort = "quick"\nmax-time = "90s"\nfix = {bf16 = true}\nrecord = false\n'
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("signal.signal", lambda *_: None)
    seen = {}

    def taken(**given):
        seen.update(given)
        raise InputError("seen")

    monkeypatch.setattr("autotune.api.find", taken)
    return lambda *words: (CliRunner().invoke(app, [*words]), seen)


def test_a_project_gives_defaults_which_the_command_line_overrides(asked):
    done, given = asked("find", "--effort", "thorough")
    assert (given["model"], given["effort"], given["max_time"]) == ("gpt2", "thorough", "90.0")
    assert (given["fix"], given["record"], given["seed"]) == (["precision=bf16"], False, "42")
    assert "from pyproject.toml: --model, --max-time, --fix, --record\n" in done.stderr
    assert asked("find", "--no-record", "--fix", "tf32=on")[1]["fix"] == ["tf32=on"]


def test_a_script_takes_those_of_a_project_that_it_does_not_decide(asked, tmp_path):
    (tmp_path / "train.py").touch()
    done, given = asked("script", "--", "python", "train.py")
    assert (given["effort"], given["script"]) == ("quick", ["python", "train.py"])
    assert "model" not in given
    assert "from pyproject.toml: --effort, --max-time, --fix, --record\n" in done.stderr


def test_a_broken_project_stops_a_search_and_not_its_help(asked, tmp_path):
    (tmp_path / "pyproject.toml").write_text("[tool.autotune]\neffrt = 3\n")
    done, given = asked("find", "--model", "gpt2", "--json")
    assert (done.exit_code, given) == (2, {})
    assert json.loads(done.stdout)["error"]["message"].startswith("pyproject.toml: [tool.autotune] effrt: no such opt")
    assert asked("find", "--help")[0].exit_code == 0
