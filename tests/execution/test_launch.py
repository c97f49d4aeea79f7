"""The launcher by its protocol: whatever a child does, it answers, and nothing of the child is left."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from misbehaving import FLOOD_BYTES

from autotune.execution.environment import launcher_environment
from autotune.execution.failures import HEAD_BYTES, TAIL_BYTES
from autotune.execution.launch import launch_command


class Launcher:
    def __init__(
        self,
        directory: Path,
        command: Callable[..., list[str]],
        *options: str,
        device: str = "cpu",
        environment: dict[str, str] | None = None,
    ) -> None:
        self._directory = directory
        read_end, write_end = os.pipe()
        self.replies_inode = os.fstat(read_end).st_ino
        self._process = subprocess.Popen(
            command("--replies", str(write_end), *options),
            stdin=subprocess.PIPE,
            pass_fds=(write_end,),
            env={**launcher_environment(device, {}), **(environment or {})},
            start_new_session=True,
        )
        os.close(write_end)
        self._lines = os.fdopen(read_end)
        self.ready = json.loads(self._lines.readline())
        self.pid = self._process.pid
        self.jobs = 0

    def run(
        self, name: str, *, timeout_s: float = 60, module: str = "misbehaving", ranks: int | None = None
    ) -> tuple[dict, Path]:
        """Run the function `name` of `misbehaving`; return the reply and the trial's directory."""
        self.jobs += 1
        directory = self._directory / f"{self.jobs:03d}"
        directory.mkdir()
        job = {"directories": [str(directory)], "entry": f"{module}:{name}", "timeout_s": timeout_s, "ranks": ranks}
        self._process.stdin.write(json.dumps(job).encode() + b"\n")
        self._process.stdin.flush()
        return json.loads(self._lines.readline()), directory

    def close(self) -> int:
        self._process.stdin.close()
        returncode = self._process.wait(timeout=60)
        self._lines.close()
        return returncode


@pytest.fixture(scope="module")
def forking(light_command, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Launcher]:
    made = Launcher(tmp_path_factory.mktemp("jobs"), light_command)
    yield made
    made.close()


@pytest.fixture(scope="module", params=["forked", "fresh"])
def launcher(request, light_command, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Launcher]:
    """Both ways to make a trial's process."""
    options = ["--fresh"] if request.param == "fresh" else []
    made = Launcher(tmp_path_factory.mktemp("jobs"), light_command, *options)
    yield made
    made.close()


def log_of(directory: Path) -> str:
    return (directory / "log.txt").read_text(errors="replace")


def test_it_says_whether_it_forks(launcher, request):
    assert launcher.ready["forkable"] == ("forked" in request.node.callspec.id)


def test_a_child_that_ends_well_returns_0_and_both_its_streams_are_in_the_log(launcher):
    reply, directory = launcher.run("print_and_end")
    assert reply == {"returncodes": [0], "failed_at": [None], "timed_out": False, "unkillable": 0}
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
def test_a_childs_end_is_told_by_exit_code_and_log(launcher, name, returncode, logged):
    reply, directory = launcher.run(name)
    if name == "exit_from_a_library" and not launcher.ready["forkable"]:
        returncode, logged = 3, ""  # an interpreter's own way to end
    assert (reply["returncodes"], reply["timed_out"]) == ([returncode], False)
    assert logged in log_of(directory)


@pytest.mark.parametrize("name", ["hang", "ignore_sigterm"])
def test_a_child_that_hangs_is_killed_at_its_time_limit(launcher, name, is_running):
    reply, directory = launcher.run(name, timeout_s=1)
    assert reply == {"returncodes": [-signal.SIGKILL], "failed_at": [None], "timed_out": True, "unkillable": 0}
    assert not is_running(json.loads((directory / "process.json").read_text())["pid"])


@pytest.mark.parametrize("name", ["leave_a_child", "leave_a_session", "leave_a_child_holding_the_pipe"])
def test_grandchildren_end_with_the_child(launcher, name, left_behind, is_running):
    reply, directory = launcher.run(name)
    assert reply == {"returncodes": [0], "failed_at": [None], "timed_out": False, "unkillable": 0}
    assert [pid for pid in left_behind(directory) if is_running(pid)] == []


def test_grandchildren_of_a_child_that_hangs_end_too(forking, left_behind, is_running):
    reply, directory = forking.run("hang_with_children", timeout_s=5)
    assert reply == {"returncodes": [-signal.SIGKILL], "failed_at": [None], "timed_out": True, "unkillable": 0}
    left = left_behind(directory)
    assert len(left) == 3
    assert [pid for pid in left if is_running(pid)] == []


def test_a_flood_leaves_a_log_of_bounded_size_with_its_first_and_last_line(launcher):
    reply, directory = launcher.run("flood")
    assert reply["returncodes"] == [0]
    log = directory / "log.txt"
    assert HEAD_BYTES + TAIL_BYTES <= log.stat().st_size <= HEAD_BYTES + TAIL_BYTES + 100
    lines = log_of(directory).splitlines()
    assert (lines[0], lines[-1]) == ("the first line", "the last line")
    left_out = next(line for line in lines if "bytes left out" in line)
    assert int(left_out.split()[1]) > FLOOD_BYTES - HEAD_BYTES - TAIL_BYTES


def test_a_core_file_is_never_written(launcher):
    _, directory = launcher.run("tell_the_limits")
    assert "core 0" in log_of(directory)


def test_it_answers_after_everything_that_went_wrong(launcher):
    reply, _ = launcher.run("print_and_end")
    assert reply["returncodes"] == [0]
    assert launcher.jobs > 1


def test_a_kernel_that_does_not_tell_of_exits_is_asked(tmp_path, light_command):
    """As before Linux 5.3."""

    def without_pidfd(*arguments: str) -> list[str]:
        python, safe, option, code, *rest = light_command(*arguments)
        return [python, safe, option, f"import os; os.pidfd_open = lambda pid: os.open('/none', 0); {code}", *rest]

    made = Launcher(tmp_path, without_pidfd)
    assert made.run("print_and_end")[0] == {
        "returncodes": [0],
        "failed_at": [None],
        "timed_out": False,
        "unkillable": 0,
    }
    assert made.run("hang", timeout_s=1)[0]["timed_out"]
    made.close()


def test_it_ends_when_its_parent_closes_its_stdin(tmp_path, light_command):
    assert Launcher(tmp_path, light_command).close() == 0


def test_a_child_sees_only_the_device_of_the_search(tmp_path, light_command):
    made = Launcher(tmp_path, light_command, device="cuda:3")
    _, directory = made.run("tell_the_environment")
    made.close()
    assert "CUDA_VISIBLE_DEVICES='3'" in log_of(directory)


def test_a_child_cannot_reach_the_pipe_of_the_replies(tmp_path, light_command):
    """A grandchild that outlives a killed launcher would otherwise keep the parent waiting."""
    made = Launcher(tmp_path, light_command)
    _, directory = made.run("tell_its_open_files")
    made.close()
    assert "pipe" in log_of(directory)
    assert f"pipe:[{made.replies_inode}]" not in log_of(directory)


@pytest.fixture(scope="module")
def hindered(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Launcher]:
    """A launcher as a search starts it, for a CUDA device that can't be used, and without bitsandbytes."""
    startup = tmp_path_factory.mktemp("startup")
    (startup / "sitecustomize.py").write_text("import sys; sys.modules['bitsandbytes'] = None  # not installed")
    path = os.pathsep.join([str(startup), *sys.path])
    made = Launcher(
        tmp_path_factory.mktemp("jobs"),
        launch_command,
        "--device",
        "cuda:0",
        device="cuda:0",
        environment={"PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": "-1"},
    )
    yield made
    made.close()


def test_a_missing_library_that_only_some_trials_need_stops_none_of_the_others(hindered):
    assert hindered.ready["ready"]
    assert hindered.run("print_and_end")[0]["returncodes"] == [0]


def test_where_a_forked_child_cannot_use_the_device_every_trial_is_a_fresh_interpreter(hindered):
    assert hindered.ready["forkable"] is False
    _, directory = hindered.run("tell_what_is_imported")
    assert log_of(directory).strip() == "torch was imported before: False"
