"""Jobs of the launcher: whatever their processes do, it answers, and nothing of them is left. Without any library."""

from __future__ import annotations

import json
import os
import secrets
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from benches import Asked
from misbehaving import FLOOD_BYTES

from autotune.execution.job import HEAD_BYTES, MARK_VARIABLE, TAIL_BYTES, BoundedLog, end_marked, marked
from autotune.execution.outcome import Ending

WELL = Ending(returncodes=[0], failed_at=[None])
KILLED = Ending(returncodes=[-signal.SIGKILL], failed_at=[None], timed_out=True)


def made(directory: Path, light_command, *options: str) -> Iterator[Asked]:
    """Yield a launcher, whose ranks get a moment that is shorter than usual."""

    def command(*arguments: str) -> list[str]:
        *python, code = light_command()
        hurried = "from autotune.execution import job; job._GRACE_S = 0.3; job._OUTCOMES_EVERY_S = 0.1; "
        return [*python, hurried + code, *arguments, *options]

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("autotune.execution.launch.launch_command", command)
        asked = Asked(directory)
    yield asked
    asked.launcher.end()


@pytest.fixture(scope="module")
def forking(light_command, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Asked]:
    yield from made(tmp_path_factory.mktemp("jobs"), light_command)


@pytest.fixture(scope="module", params=["forked", "fresh"])
def asked(request, light_command, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Asked]:
    """Both ways to make a trial's processes."""
    options = ["--fresh"] if request.param == "fresh" else []
    for one in made(tmp_path_factory.mktemp("jobs"), light_command, *options):
        assert one.launcher.forkable == (not options)
        yield one


def log_of(directory: Path, name: str = "log.txt") -> str:
    return (directory / name).read_text(errors="replace")


def processes_of(directory: Path) -> dict:
    return json.loads((directory / "process.json").read_text())


def test_a_child_that_ends_well_returns_0_and_both_its_streams_are_in_the_log(asked):
    ending, directory = asked.run("misbehaving:print_and_end")
    assert ending == WELL
    assert {"on stdout", "on stderr"} <= set(log_of(directory).splitlines())


@pytest.mark.parametrize(
    ("name", "returncode", "logged"),
    [
        ("crash_by_null_pointer", -signal.SIGSEGV, "before the crash\nFatal Python error: Segmentation fault"),
        ("kill_itself", -signal.SIGKILL, "before the kill"),
        ("exit_without_a_word", 0, ""),
        ("exit_from_a_library", 1, "SystemExit: 3"),
        ("raise_an_error", 1, "ZeroDivisionError: planted"),
        ("no_such_function", 1, "AttributeError"),
    ],
)
def test_a_childs_end_is_told_by_exit_code_and_log(asked, name, returncode, logged):
    ending, directory = asked.run(f"misbehaving:{name}")
    if name == "exit_from_a_library" and not asked.launcher.forkable:
        returncode, logged = 3, ""  # an interpreter's own way to end
    assert (ending.returncodes, ending.timed_out) == ([returncode], False)
    assert logged in log_of(directory)


@pytest.mark.parametrize("name", ["hang", "ignore_sigterm"])
def test_a_child_that_hangs_is_killed_at_its_time_limit(asked, name, is_running):
    ending, directory = asked.run(f"misbehaving:{name}", timeout_s=1)
    assert ending == KILLED
    assert not is_running(processes_of(directory)["pid"])


@pytest.mark.parametrize("name", ["leave_a_child", "leave_a_session", "leave_a_child_holding_the_pipe"])
def test_grandchildren_end_with_the_child(asked, name, left_behind, is_running):
    ending, directory = asked.run(f"misbehaving:{name}")
    assert ending == WELL
    assert [pid for pid in left_behind(directory) if is_running(pid)] == []


def test_grandchildren_of_a_child_that_hangs_end_too_and_none_of_another_job(forking, left_behind, is_running):
    other = forking.send("misbehaving:hang_with_children", place=1, timeout_s=9)
    ending, directory = forking.run("misbehaving:hang_with_children", timeout_s=3)
    assert ending == KILLED
    left, others = left_behind(directory), left_behind(other)
    assert len(left) == len(others) == 3
    assert [pid for pid in left if is_running(pid)] == []
    assert [pid for pid in others if not is_running(pid)] == []
    assert forking.launcher.reply(60) == (1, KILLED)
    assert [pid for pid in others if is_running(pid)] == []


def test_a_flood_leaves_a_log_of_bounded_size_with_its_first_and_last_line(asked):
    ending, directory = asked.run("misbehaving:flood")
    assert ending == WELL
    assert HEAD_BYTES + TAIL_BYTES <= (directory / "log.txt").stat().st_size <= HEAD_BYTES + TAIL_BYTES + 100
    lines = log_of(directory).splitlines()
    assert (lines[0], lines[-1]) == ("the first line", "the last line")
    left_out = next(line for line in lines if "bytes left out" in line)
    assert int(left_out.split()[1]) > FLOOD_BYTES - HEAD_BYTES - TAIL_BYTES


@pytest.mark.parametrize(("excess", "left_out"), [(0, b""), (1, b"\n[... 1 bytes left out ...]\n")])
def test_a_log_leaves_out_what_lies_between_its_head_and_its_tail(tmp_path, excess, left_out):
    (tmp_path / "written").write_bytes(b"h" * HEAD_BYTES + b"m" * excess + b"t" * TAIL_BYTES)
    with (tmp_path / "written").open("rb") as file:
        log = BoundedLog(tmp_path / "log.txt")
        while log.copy_from(file.fileno()):
            pass
        log.close()
    assert (tmp_path / "log.txt").read_bytes() == b"h" * HEAD_BYTES + left_out + b"t" * TAIL_BYTES


def test_a_core_file_is_never_written(asked):
    assert "core 0" in log_of(asked.run("misbehaving:tell_the_limits")[1])


def logs_of(directory: Path) -> list[str]:
    return [log_of(directory, name) for name in ("log.txt", "log-1.txt")]


def test_each_rank_has_what_torchrun_gives_it_and_a_log_of_its_own(asked):
    ending, directory = asked.run("misbehaving_ranks:tell_its_rank", ranks=2)
    assert ending == Ending(returncodes=[0, 0], failed_at=[None, None])
    for rank, log in enumerate(logs_of(directory)):
        assert f"RANK='{rank}' LOCAL_RANK='{rank}' WORLD_SIZE='2' LOCAL_WORLD_SIZE='2' MASTER_ADDR='127.0.0.1'" in log


def test_the_first_rank_has_the_port_from_the_beginning(asked):
    ending, directory = asked.run("misbehaving_ranks:meet_at_the_port", ranks=2)
    assert ending.returncodes == [0, 0]
    assert logs_of(directory)[1].strip() == "welcome"


@pytest.mark.parametrize(
    ("name", "codes"),
    [
        ("rank_1_fails_and_rank_0_waits_for_it", [-signal.SIGKILL, 0]),
        ("rank_1_fails_and_does_not_end", [-signal.SIGKILL, -signal.SIGKILL]),
        ("rank_1_is_killed_and_rank_0_waits_for_it", [-signal.SIGKILL, -signal.SIGKILL]),
        ("rank_1_ends_without_a_word", [-signal.SIGKILL, 0]),
    ],
)
def test_the_first_rank_to_fail_ends_all_and_nothing_is_left(forking, name, codes, is_running):
    ending, directory = forking.run(f"misbehaving_ranks:{name}", ranks=2)
    assert (ending.returncodes, ending.timed_out, ending.unkillable) == (codes, False, 0)
    assert ending.failed_at[0] is None  # killed while it waited
    assert ending.failed_at[1] is not None
    left = processes_of(directory)
    assert [pid for pid in left["pids"] if is_running(pid)] == []
    with socket.create_server(("127.0.0.1", left["port"])):
        pass  # the port is free


def test_who_fails_of_the_first_ones_end_fails_later(forking):
    ending, _ = forking.run("misbehaving_ranks:rank_1_fails_and_rank_0_loses_its_peer", ranks=2)
    assert ending.returncodes == [0, 0]
    assert ending.failed_at[1] <= ending.failed_at[0]


def test_at_the_time_limit_each_rank_says_where_it_stands(forking):
    ending, directory = forking.run("misbehaving_ranks:rank_1_sleeps", ranks=2, timeout_s=1)
    assert ending.timed_out
    assert ending.failed_at == [None, None]
    for log, place in zip(logs_of(directory), ("wait_for_ever", "sleep_in_a_corner"), strict=True):
        assert f"in {place}\n" in log


def test_it_answers_after_everything_that_went_wrong(asked):
    assert asked.run("misbehaving:print_and_end")[0] == WELL


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
    code = f"from autotune.execution.job import end_marked; print(end_marked({mark!r}, limit_s=10))"
    done = subprocess.run([sys.executable, "-c", code], env={**os.environ, MARK_VARIABLE: mark}, capture_output=True)
    assert (done.returncode, done.stdout) == (0, b"0\n")


@pytest.mark.parametrize("how", ["is ending", "has ended"])
def test_a_child_dies_with_its_parent(how, is_running):
    """Whether the parent ends after the child has asked for it, or before."""
    wait = "" if how == "is ending" else "time.sleep(0.3)"
    child = f"""
import os, sys, time
from autotune.execution.job import die_with_parent
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
