"""Jobs of the launcher: whatever their processes do, it answers, and nothing of them is left. Without any library."""

import json
import os
import secrets
import signal
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from benches import Asked, is_running, left_behind, light_command
from misbehaving import FLOOD_BYTES
from running import printed

from autotune.execution import job as jobs
from autotune.execution.guard import CpuGuard
from autotune.execution.job import HEAD_BYTES, MARK_VARIABLE, TAIL_BYTES, BoundedLog, end_marked, marked
from autotune.execution.launch import _failure
from autotune.execution.outcome import Ending

WELL = Ending(returncodes=[0], failed_at=[None])
KILLED = Ending(returncodes=[-signal.SIGKILL], failed_at=[None], timed_out=True)


def started(directory: Path, *devices: str, forks: bool = True) -> Iterator[Asked]:
    """Yield a launcher, whose ranks get a moment that is shorter than usual."""

    def command(*arguments: str, **_: str) -> list[str]:
        *python, code = light_command()
        hurried = "from autotune.execution import job; job._GRACE_S = 0.3; job._OUTCOMES_EVERY_S = 0.1; "
        keeps = f"import tempfile; kept = tempfile.TemporaryDirectory('-launchers', dir={str(directory)!r}); "
        return [*python, hurried + keeps + code.replace("True", str(forks)), *arguments]

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("autotune.execution.launch.launch_command", command)
        asked = Asked(directory, *devices)
    yield asked
    asked.launcher.end()


@pytest.fixture(scope="module")
def forking(tmp_path_factory) -> Iterator[Asked]:
    yield from started(tmp_path_factory.mktemp("jobs"), "cuda:3", "cuda:1")


@pytest.fixture(scope="module", params=[True, False], ids=["forked", "fresh"])
def asked(request, tmp_path_factory) -> Iterator[Asked]:
    for one in started(tmp_path_factory.mktemp("jobs"), forks=request.param):
        assert one.launcher.forkable == request.param
        yield one


@pytest.fixture(scope="module")
def hindered(tmp_path_factory) -> Iterator[Asked]:
    """A launcher as a search starts it, for a CUDA device that can't be used, and without bitsandbytes."""
    startup = tmp_path_factory.mktemp("startup")
    (startup / "sitecustomize.py").write_text("import sys; sys.modules['bitsandbytes'] = None  # not installed")
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(sys, "path", [str(startup), *sys.path])
        patched.setenv("CUDA_VISIBLE_DEVICES", "-1")
        asked = Asked(tmp_path_factory.mktemp("jobs"), "cuda:0")
    yield asked
    asked.launcher.end()
    assert not jobs.temporary_folder(asked.launcher._mark).exists()


def log_of(directory: Path, name: str = "log.txt") -> str:
    return (directory / name).read_text(errors="replace")


def processes_of(directory: Path) -> dict:
    return json.loads((directory / "process.json").read_text())


@pytest.mark.parametrize(
    ("name", "returncode", "logged"),
    [
        ("print_and_end", 0, "on stdout"), ("print_and_end", 0, "on stderr"),
        ("crash_by_null_pointer", -signal.SIGSEGV, "before the crash\nFatal Python error: Segmentation fault"),
        ("kill_itself", -signal.SIGKILL, "before the kill"), ("exit_from_a_library", 1, "SystemExit: 3"),
        ("raise_an_error", 1, "ZeroDivisionError: planted"), ("no_such_function", 1, "AttributeError"),
    ],
)  # fmt: skip
def test_a_childs_end_is_told_by_exit_code_and_log_and_removes_its_temporary_folders(asked, name, returncode, logged):
    ending, directory = asked.run(f"misbehaving:{name}")
    if name == "exit_from_a_library" and not asked.launcher.forkable:
        returncode, logged = 3, ""  # an interpreter's own way to end
    assert ending == Ending(returncodes=[returncode], failed_at=[None])
    assert logged in log_of(directory)
    assert not [path for path in directory.iterdir() if path.is_dir()]  # temporary ones, as the first two make
    assert list(directory.parent.glob("*-launchers"))  # where that of the launcher stays


def test_the_temporary_folders_of_a_killed_child_go_with_the_launcher(hindered):
    _, directory = hindered.run("misbehaving:be_killed_with_temporary_files")
    left = Path(json.loads((directory / "seen.json").read_text()))
    assert left.parent == jobs.temporary_folder(hindered.launcher._mark)


def test_a_child_that_hangs_is_killed_at_its_time_limit(asked):
    ending, directory = asked.run("misbehaving:ignore_sigterm", timeout_s=1)
    assert ending == KILLED
    assert not is_running(processes_of(directory)["pid"])


@pytest.mark.parametrize("name", ["leave_a_child", "leave_a_session", "leave_a_child_holding_the_pipe"])
def test_grandchildren_end_with_the_child(asked, name):
    ending, directory = asked.run(f"misbehaving:{name}")
    assert ending == WELL
    assert not any(map(is_running, left_behind(directory)))


def test_grandchildren_of_a_child_that_hangs_end_too_and_none_of_another_job(forking):
    other = forking.send("misbehaving:hang_with_children", place=1, timeout_s=6)
    ending, directory = forking.run("misbehaving:hang_with_children", timeout_s=2)
    assert ending == KILLED
    left, others = left_behind(directory), left_behind(other)
    assert len(left) == len(others) == 3
    assert not any(map(is_running, left))
    assert all(map(is_running, others))
    assert forking.launcher.reply(60) == (1, KILLED)
    assert not any(map(is_running, others))


def test_a_flood_leaves_a_log_of_bounded_size_with_its_first_and_last_line(asked):
    ending, directory = asked.run("misbehaving:flood")
    assert ending == WELL
    assert HEAD_BYTES + TAIL_BYTES <= (directory / "log.txt").stat().st_size <= HEAD_BYTES + TAIL_BYTES + 100
    lines = log_of(directory).splitlines()
    assert (lines[0], lines[-1]) == ("the first line", "the last line")
    left_out = next(line for line in lines if "bytes left out" in line)
    assert int(left_out.split()[1]) > FLOOD_BYTES - HEAD_BYTES - TAIL_BYTES


@pytest.mark.parametrize(("excess", "left_out"), [(0, b""), (1, b"\n[... 1 bytes left out ...]\n")])
def test_a_log_leaves_out_all_between_its_head_and_its_tail(tmp_path, excess, left_out):
    (tmp_path / "written").write_bytes(b"h" * HEAD_BYTES + b"m" * excess + b"t" * TAIL_BYTES)
    with (tmp_path / "written").open("rb") as file:
        log = BoundedLog(tmp_path / "log.txt")
        while log.copy_from(file.fileno()):
            pass
        log.close()
    assert (tmp_path / "log.txt").read_bytes() == b"h" * HEAD_BYTES + left_out + b"t" * TAIL_BYTES


def logs_of(directory: Path) -> list[str]:
    return [log_of(directory, name) for name in ("log.txt", "log-1.txt")]


def test_each_rank_has_what_torchrun_gives_it_and_a_log_of_its_own_and_writes_no_core_file(asked):
    ending, directory = asked.run("misbehaving:tell", ranks=2)
    assert ending == Ending(returncodes=[0, 0], failed_at=[None, None])
    for rank, log in enumerate(logs_of(directory)):
        assert f"RANK={rank} LOCAL_RANK={rank} WORLD_SIZE=2 LOCAL_WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 " in log
        assert "core files of 0" in log


def test_a_child_sees_only_the_devices_of_its_job_and_can_not_reach_the_connection(forking):
    """A grandchild that outlives a killed launcher would otherwise keep the parent waiting."""
    log = log_of(forking.run("misbehaving:tell", visible="1")[1])
    assert "CUDA_VISIBLE_DEVICES=1 " in log
    assert "pipe" in log
    assert "socket" not in log


def test_where_a_forked_child_cannot_use_the_device_every_trial_is_a_fresh_interpreter(hindered):
    """Here bitsandbytes is missing as well, which only some trials need."""
    assert hindered.launcher.forkable is False
    ending, directory = hindered.run("misbehaving:tell")
    assert ending.returncodes == [0]
    assert "torch was imported before: False" in log_of(directory)


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
def test_the_first_rank_to_fail_ends_all_and_nothing_is_left(forking, name, codes):
    ending, directory = forking.run(f"misbehaving_ranks:{name}", ranks=2)
    assert (ending.returncodes, ending.timed_out) == (codes, False)
    assert ending.failed_at[0] is None  # killed while it waited
    assert ending.failed_at[1] is not None
    left = processes_of(directory)
    assert not any(map(is_running, left["pids"]))
    with socket.create_server(("127.0.0.1", left["port"])):
        pass  # the port is free


def test_a_rank_that_fails_because_of_the_first_one_fails_later(forking):
    ending, _ = forking.run("misbehaving_ranks:rank_1_fails_and_rank_0_loses_its_peer", ranks=2)
    assert ending.returncodes == [0, 0]
    assert ending.failed_at[1] <= ending.failed_at[0]


def test_at_the_time_limit_each_rank_says_where_it_stands(forking):
    ending, directory = forking.run("misbehaving_ranks:rank_1_sleeps", ranks=2, timeout_s=1)
    assert ending.timed_out
    assert ending.failed_at == [None, None]
    for log, place in zip(logs_of(directory), ("wait_for_ever", "sleep_in_a_corner"), strict=True):
        assert f"in {place}\n" in log


def test_it_answers_after_everything_that_went_wrong_and_ends_when_its_parent_closes_the_connection(asked):
    assert asked.run("misbehaving:print_and_end")[0] == WELL
    asked.launcher._connection.close()
    assert asked.launcher._process.wait(timeout=60) == 0


# A process that leaves a daemon behind: its own session, its parent gone. It prints the daemon's id.
DAEMON = (
    "import subprocess; print(subprocess.Popen(['sleep', '600'], start_new_session=True, stdout=-3, stderr=-3).pid)"
)


@pytest.fixture
def mark() -> Iterator[str]:
    made = secrets.token_hex(8)
    yield made
    end_marked(made)


def test_daemons_of_a_mark_are_ended_not_those_with_another_or_none_nor_the_process_that_ends_them(mark):
    environments = ({}, {MARK_VARIABLE: mark + secrets.token_hex(8)}, {MARK_VARIABLE: mark})
    *others, daemon = (int(printed("-c", DAEMON, **environment)[0]) for environment in environments)
    try:
        while not marked(mark):  # it has no environment while it becomes another program
            assert is_running(daemon)
        assert marked(mark) == [daemon]
        code = f"from autotune.execution.job import end_marked; end_marked({mark!r}); print('alive')"
        assert printed("-c", code, **{MARK_VARIABLE: mark}) == ["alive"]
        assert not is_running(daemon)
        assert all(map(is_running, others))
    finally:
        for pid in others:
            os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize("how", ["is ending", "has ended"])
def test_a_child_dies_with_its_parent(how):
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
    pid = int(printed("-c", parent, timeout=60)[0])
    while is_running(pid):  # the time limit of the test is the limit
        os.sched_yield()


ILLEGAL, SHORT = "CUDA error: an illegal memory access was encountered", "CUDA error: out of memory"


@pytest.mark.parametrize(
    ("sticking", "status"), [(ILLEGAL, "crashed"), (SHORT, "out of memory"), (None, "out of memory")], ids=str
)
def test_a_handle_that_cannot_be_made_after_an_error_of_the_device_is_no_lack_of_memory(monkeypatch, sticking, status):
    def synchronize() -> None:
        if sticking is not None:
            raise RuntimeError(sticking)

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
    error = RuntimeError("CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`")
    failure = _failure(error, CpuGuard(1 << 30), 1 << 30)
    assert failure.status == status
    assert ("illegal" in failure.cause) is (sticking == ILLEGAL)
