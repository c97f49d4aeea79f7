"""Completion in a real shell: a Tab after a few letters, and what stands there then."""

import shutil
import sys
from pathlib import Path

import pexpect
import pytest

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
