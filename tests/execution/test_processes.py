"""Processes are ended by what they carry, whoever their parents are, and leave nothing in shared memory."""

from __future__ import annotations

import mmap
import os
import secrets
import subprocess
import sys
from collections.abc import Iterator

import pytest

from autotune.execution.processes import MARK_VARIABLE, end_marked, marked, remove_orphans, shared_files

# A process that leaves a daemon behind: its own session, its parent gone. It prints the daemon's id.
DAEMON = (
    "import subprocess; print(subprocess.Popen(['sleep', '600'], start_new_session=True, stdout=-3, stderr=-3).pid)"
)


@pytest.fixture
def mark() -> Iterator[str]:
    made = secrets.token_hex(8)
    yield made
    end_marked(made, limit_s=10)


def start_daemon(environment: dict[str, str]) -> int:
    done = subprocess.run([sys.executable, "-c", DAEMON], env={**os.environ, **environment}, capture_output=True)
    return int(done.stdout)


def test_a_daemon_is_known_by_its_mark_and_ended(mark, is_running):
    daemon = start_daemon({MARK_VARIABLE: mark})
    while not marked(mark):  # it has no environment while it becomes another program
        assert is_running(daemon)
    assert marked(mark) == [daemon]
    assert end_marked(mark, limit_s=10) == 0
    assert not is_running(daemon)


def test_processes_with_another_mark_or_none_are_left_alone(mark, is_running):
    other = secrets.token_hex(8)
    unmarked, differently_marked = start_daemon({}), start_daemon({MARK_VARIABLE: mark + other})
    try:
        end_marked(mark, limit_s=10)
        assert is_running(unmarked)
        assert is_running(differently_marked)
    finally:
        for pid in (unmarked, differently_marked):
            os.kill(pid, 9)


def test_a_process_never_ends_itself(mark):
    code = f"from autotune.execution.processes import end_marked; print(end_marked({mark!r}, limit_s=10))"
    done = subprocess.run([sys.executable, "-c", code], env={**os.environ, MARK_VARIABLE: mark}, capture_output=True)
    assert (done.returncode, done.stdout) == (0, b"0\n")


@pytest.mark.parametrize("how", ["is ending", "has ended"])
def test_a_child_dies_with_its_parent(how, is_running):
    """Whether the parent ends after the child has asked for it, or before."""
    wait = "" if how == "is ending" else "time.sleep(0.3)"
    child = f"""
import os, sys, time
from autotune.execution.processes import die_with_parent
parent = os.getppid()
print(os.getpid(), flush=True)
{wait}
die_with_parent(parent)
print("asked", flush=True)
time.sleep(600)
"""
    parent = f"""
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", {child!r}], stdout=subprocess.PIPE, text=True)
print(child.stdout.readline(), flush=True)
if {how == "is ending"}:
    child.stdout.readline()
"""
    done = subprocess.run([sys.executable, "-c", parent], capture_output=True, text=True, timeout=60)
    pid = int(done.stdout)
    while is_running(pid):  # the time limit of the test is the limit
        os.sched_yield()


@pytest.fixture
def folder(tmp_path):
    """In place of /dev/shm, with a file of an earlier process."""
    (tmp_path / "torch_1_old_0").write_bytes(b"x")
    return tmp_path


def test_new_files_that_nobody_uses_are_removed(folder):
    before = shared_files(folder)
    for name in ("torch_42_new_0", "nccl-AbCdEf", "deepspeed_allreduce_buffer_0"):
        (folder / name).write_bytes(b"x" * 8192)
    assert remove_orphans(before, folder) == ("deepspeed_allreduce_buffer_0", "nccl-AbCdEf", "torch_42_new_0")
    assert shared_files(folder) == before


def test_files_that_were_there_before_and_files_of_other_programs_stay(folder):
    before = shared_files(folder)
    (folder / "sem.mp-1").write_bytes(b"x")
    (folder / "torch_folder").mkdir()
    assert remove_orphans(before, folder) == ()
    assert shared_files(folder) == before | {"sem.mp-1", "torch_folder"}


def test_a_file_that_is_open_or_mapped_stays(folder):
    before = shared_files(folder)
    (folder / "torch_open").write_bytes(b"x" * 4096)
    (folder / "torch_mapped").write_bytes(b"x" * 4096)
    with (folder / "torch_mapped").open("r+b") as file:
        mapped = mmap.mmap(file.fileno(), 4096)
    with (folder / "torch_open").open("rb"), mapped:
        assert remove_orphans(before, folder) == ()
    assert remove_orphans(before, folder) == ("torch_mapped", "torch_open")


def test_a_file_stays_that_a_process_has_open_which_cannot_be_seen(folder, monkeypatch):
    before = shared_files(folder)
    (folder / "torch_open").write_bytes(b"x" * 4096)
    monkeypatch.setattr("psutil.pids", lambda: [])  # as from another container with the host's shared memory
    with (folder / "torch_open").open("r+b"):
        assert remove_orphans(before, folder) == ()
    assert remove_orphans(before, folder) == ("torch_open",)


def test_a_machine_without_shared_memory_has_nothing_to_remove(tmp_path):
    assert remove_orphans(shared_files(tmp_path / "none"), tmp_path / "none") == ()
