"""The lock of a run directory: one search at a time, from its first moment on."""

import errno
import fcntl
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest
from factories import make_config, make_plan, make_result
from running import run_at_once
from typer.testing import CliRunner

from autotune.cli.main import app
from autotune.errors import InfrastructureError, InputError, RunDirectoryError
from autotune.storage.run_directory import EXPLAIN_FOLDER, RunDirectory, read_plan

IN_USE = "another search is running in it"
PLAN = json.loads(make_plan().model_dump_json())

# Holds a new run directory until a line comes.
HOLD = """
import sys
from pathlib import Path
from autotune.storage.run_directory import RunDirectory
with RunDirectory.create(Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.readline()
    if "keep" in sys.argv:
        Path(sys.argv[1], "search.json").write_text("{}")
"""

# Who wins keeps the directory until all have tried.
RACE = """
import sys, time
from pathlib import Path
from autotune.errors import RunDirectoryError
from autotune.storage.run_directory import RunDirectory
folder, name = Path(sys.argv[1]), sys.argv[2]
print("ready", flush=True)
sys.stdin.readline()
try:
    with RunDirectory.create(folder / "run"):
        (folder / name).write_text("won")
        while len(list(folder.glob("[0-9]*"))) < 2:
            time.sleep(0.001)
        (folder / "run" / "search.json").write_text("{}")
except RunDirectoryError as error:
    (folder / name).write_text(str(error))
    sys.exit(error.exit_code)
"""


@pytest.fixture
def hold():
    """Return a function that has another process hold a new run directory; it gives what ends that."""
    started = []

    def begin(path: Path, *words: str):
        command = [sys.executable, "-c", HOLD, str(path), *words]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        started.append(process)
        assert process.stdout.readline() == "held\n"
        return process

    yield begin
    for process in started:
        process.kill()
        process.communicate()


@pytest.mark.parametrize("attempt", range(2))
def test_of_two_at_once_exactly_one_gets_it(tmp_path, attempt):
    ended = run_at_once(RACE, str(tmp_path), ["1", "2"])
    assert sorted(code for code, _ in ended) == [0, 2], ended
    assert sorted(IN_USE in (tmp_path / name).read_text() for name in "12") == [False, True]
    assert (tmp_path / "run" / "search.json").exists()


def test_a_file_system_without_locks_has_searches_too(tmp_path, monkeypatch):
    monkeypatch.setattr(fcntl, "flock", Mock(side_effect=OSError(errno.ENOSYS, "Function not implemented")))
    with RunDirectory.create(tmp_path / "run") as directory:
        assert not directory.is_running()


def test_a_new_directory_is_held_at_once_and_removed_and_free_again_if_it_came_to_nothing(tmp_path, hold):
    first = hold(tmp_path / "run")
    with pytest.raises(RunDirectoryError, match=IN_USE), RunDirectory.create(tmp_path / "run"):
        pass
    assert (tmp_path / "run" / "lock").exists()
    first.communicate("\n", timeout=60)
    assert not (tmp_path / "run").exists()
    with RunDirectory.create(tmp_path / "run"):
        assert RunDirectory(tmp_path / "run").is_running()


def test_a_directory_that_an_error_names_is_left_there(tmp_path):
    log = tmp_path / "run" / "log.txt"

    def fail():
        log.write_text("why")
        raise InputError(f"it failed (its output: {log})")

    with pytest.raises(InputError), RunDirectory.create(tmp_path / "run"):
        fail()
    assert log.read_text() == "why"
    with RunDirectory.create(tmp_path / "run"):
        pass


def test_a_directory_removed_between_opening_and_locking_is_made_anew(tmp_path, monkeypatch):
    flock, path = fcntl.flock, tmp_path / "run"
    opened = []

    def remove_first(lock, how):
        if not opened:
            shutil.rmtree(path)
        opened.append(lock)
        flock(lock, how)

    directory = RunDirectory.create(path)
    monkeypatch.setattr("fcntl.flock", remove_first)
    with directory:
        monkeypatch.undo()
        assert len(opened) == 2  # the first was the lock of nothing
        assert RunDirectory(path).is_running()


def test_who_lost_the_directory_does_not_remove_that_of_another(tmp_path, hold):
    path = tmp_path / "run"
    with RunDirectory.create(path):
        shutil.rmtree(path)
        hold(path)
    assert RunDirectory(path).is_running()


def test_a_search_that_came_to_its_end_meanwhile_is_not_begun_again(tmp_path, hold):
    path = tmp_path / "run"
    first = hold(path, "keep")
    second = RunDirectory.create(path)
    first.communicate("\n", timeout=60)
    with pytest.raises(RunDirectoryError, match="holds a search already"), second:
        pass
    assert (path / "search.json").exists()


def test_what_can_not_be_made_is_refused(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(RunDirectoryError, match="can't be written: Not a directory"):
        RunDirectory.create(tmp_path / "file")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "lock").symlink_to(tmp_path / "nowhere" / "lock")
    with pytest.raises(RunDirectoryError, match="can't be written: a link"):
        RunDirectory.create(tmp_path / "run")


def test_temporary_files_of_a_search_that_was_killed_are_removed_and_others_stay(tmp_path):
    (tmp_path / "trials" / "0003").mkdir(parents=True)
    names = (".best-config.json", ".search.json", ".processes-1.json", "trials/0003/.result.json")
    left = [f"{name}.4f2a.tmp" for name in names]
    for name in (*left, ".report.html.4f2a.tmp", ".gitignore", "trials/0003/log.txt"):
        (tmp_path / name).touch()
    with RunDirectory.create(tmp_path):
        names = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()}
        assert names == {"lock", ".report.html.4f2a.tmp", ".gitignore", "trials/0003/log.txt"}


FULL = OSError(errno.ENOSPC, "No space left on device")


def fails(error):
    raise error


def test_a_disk_that_is_full_before_the_first_trial_leaves_no_directory(tmp_path):
    said = r"run: the disk is full \(\d+ KiB are free\): make room$"
    with pytest.raises(InfrastructureError, match=said), RunDirectory.create(tmp_path / "run"):
        fails(FULL)
    assert not list(tmp_path.iterdir())


MOVED = "run: was moved while the search ran; `autotune resume '{}/else where'` goes on"
FAULTS = {
    "full": (lambda run: fails(FULL), "finished trials are kept: `autotune resume"),
    "moved": (lambda run: run.rename(run.with_name("else where")), MOVED),
    "moved, and an error": (
        lambda run: run.rename(run.with_name("else where")) and fails(InfrastructureError("the place is gone")), MOVED
    ),
    "removed": (shutil.rmtree, "run: was removed while the search ran"),
    "denied": (lambda run: fails(PermissionError(errno.EACCES, "Permission denied", str(run / "search.json"))),
               "search.json: can't be written: Permission denied"),
}  # fmt: skip


@pytest.mark.parametrize(("fault", "said"), FAULTS.values(), ids=FAULTS)
def test_what_happens_to_a_directory_while_a_search_runs_is_said(tmp_path, fault, said):
    def search():
        with RunDirectory.create(tmp_path / "run") as directory:
            directory.write_plan(make_plan())
            directory.write_result(make_result())
            fault(directory.path)

    with pytest.raises(InfrastructureError, match=re.escape(said.format(tmp_path))):
        search()
    assert bool(list(tmp_path.glob("*/trials/0000/result.json"))) == ("removed" not in said)


def test_who_only_looks_whether_a_search_runs_keeps_none_from_it(tmp_path, monkeypatch):
    directory, flock = RunDirectory.create(tmp_path / "run"), fcntl.flock
    looking = (tmp_path / "run" / "lock").open()
    flock(looking, fcntl.LOCK_SH)

    def then_gone(lock, how):
        try:
            flock(lock, how)
        finally:
            looking.close()

    monkeypatch.setattr("fcntl.flock", then_gone)
    with directory:
        monkeypatch.undo()
        assert directory.is_running()


def test_a_copy_of_a_trial_and_a_damaged_one_count_nothing(tmp_path):
    directory = RunDirectory.create(tmp_path)
    directory.write_result(make_result(make_config(4)))
    for name in ("0000-old", "0007", "trials", "12a4"):
        shutil.copytree(tmp_path / "trials" / "0000", tmp_path / "trials" / name)
    (tmp_path / "trials" / "0000-old" / "result.json").write_text("{")
    assert RunDirectory(tmp_path).restore() == ["trial 7: result.json can't be read; its measurement counts no more"]
    assert [result.request.number for result in directory.results()] == [0]


def test_a_directory_is_private_and_so_is_what_is_written_there(tmp_path):
    umask = os.umask(0o022)
    try:
        directory = RunDirectory.create(tmp_path / "runs" / "one")
        directory.write_plan(make_plan())
    finally:
        os.umask(umask)
    modes = {path.name: path.stat().st_mode & 0o777 for path in tmp_path.rglob("*")}
    assert modes == {"runs": 0o755, "one": 0o700, "lock": 0o600, "search.json": 0o600}


@pytest.mark.parametrize(
    ("name", "to"),
    [
        *((name, "../target") for name in ("lock", "launcher.log", "trials", "data")),
        *((f"trials/{name}", f"../../{up}target") for name, up in (("0000", ""), ("0001/log.txt", "../"))),
        ("report.html", "../new"),
        ("table.jsonl", None),
    ],
)
@pytest.mark.parametrize("command", ["resume", "explain", "report", "find"])
def test_a_link_out_of_the_directory_or_a_pipe_is_refused(tmp_path, command, name, to):
    directory = RunDirectory.create(tmp_path / "run")
    if command != "find":
        directory.write_plan(make_plan())
    directory.path.joinpath("lock").unlink()
    (tmp_path / "target").mkdir()
    (tmp_path / "target" / "file").write_text("mine")
    path = directory.path / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.symlink_to(to) if to is not None else os.mkfifo(path)
    words = ["--run-dir", str(directory.path), "--model", "gpt2"] if command == "find" else [str(directory.path)]
    done = CliRunner().invoke(app, [command, *words])
    assert (done.exit_code, done.stderr.count("\n")) == (2, 1), done.stderr
    assert "a link" in done.stderr or "a pipe" in done.stderr
    assert (tmp_path / "target" / "file").read_text() == "mine"


def test_links_within_the_directory_stay(tmp_path):
    directory = RunDirectory.create(tmp_path / "run")
    directory.write_plan(make_plan())
    (directory.path / "data").mkdir()
    (directory.path / "data" / "tokens").write_text("rows")
    explaining = directory.inside(EXPLAIN_FOLDER)
    assert (explaining.path / "data" / "tokens").read_text() == "rows"
    (directory.path / "wandb").mkdir()
    (directory.path / "wandb" / "core.log").symlink_to(tmp_path / "cache.log")  # as its library has it
    with RunDirectory.existing(directory.path), explaining:
        assert directory.inside(EXPLAIN_FOLDER).path == explaining.path


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ({**PLAN, "memory_bytes": "much"}, "memory_bytes: expected a whole number; it was changed by hand"),
        ({**PLAN, "schema_version": 3},
         "schema_version: expected 2; it was changed by hand or by another version: start a new search"),
        ({**PLAN, "nonsense": 1}, "nonsense: is unknown; it was changed by hand"),
        ("{", ""),
        ([], ""),
        ({"schema_version": 2}, ""),
    ],
    ids=["a value", "another version", "a field", "cut short", "no object", "a field alone"],
)  # fmt: skip
def test_a_plan_that_does_not_validate_names_file_and_field(tmp_path, content, said):
    (tmp_path / "search.json").write_text(content if isinstance(content, str) else json.dumps(content))
    with pytest.raises(RunDirectoryError, match=f"{tmp_path}: search.json can't be read: {said}") as caught:
        read_plan(tmp_path)
    assert "\n" not in str(caught.value)
