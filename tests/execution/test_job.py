"""Several ranks in one job of the launcher: how they meet, and how the first to fail ends all. Without any library."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from autotune.execution.environment import launcher_environment
from autotune.execution.outcome import Ending

# The launcher's own code without the import of torch, and a moment that is shorter.
LIGHT = (
    "from autotune.execution import job, launch; launch._preload = lambda device: True; job._GRACE_S = 0.3; "
    "job._OUTCOMES_EVERY_S = 0.1; launch.main()"
)

Run = Callable[..., tuple[Ending, Path]]


@pytest.fixture(scope="module", params=["forked", "fresh"])
def both(request, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    """Both ways to make a trial's processes."""
    yield from launched(tmp_path_factory.mktemp("jobs"), *(["--fresh"] if request.param == "fresh" else []))


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    yield from launched(tmp_path_factory.mktemp("jobs"))


def launched(folder: Path, *options: str) -> Iterator[Run]:
    """Yield what runs a function of `misbehaving_ranks` in ranks and gives their end and their directory."""
    read_end, write_end = os.pipe()
    present = {**os.environ, "CUDA_VISIBLE_DEVICES": "4,5,6"}
    process = subprocess.Popen(
        [sys.executable, "-P", "-c", LIGHT, "--replies", str(write_end), *options],
        stdin=subprocess.PIPE,
        pass_fds=(write_end,),
        env=launcher_environment("cuda:0", {}, present, others=("cuda:1", "cuda:2")),
        start_new_session=True,
    )
    os.close(write_end)
    with os.fdopen(read_end) as lines:
        lines.readline()

        def run(name: str, *, ranks: int = 2, timeout_s: float = 60) -> tuple[Ending, Path]:
            directory = folder / f"{len(list(folder.iterdir()))}"
            directory.mkdir()
            entry = f"misbehaving_ranks:{name}"
            job = {"directories": [str(directory)], "entry": entry, "timeout_s": timeout_s, "ranks": ranks}
            process.stdin.write(json.dumps(job).encode() + b"\n")
            process.stdin.flush()
            return Ending(**json.loads(lines.readline())), directory

        yield run
        process.stdin.close()
        assert process.wait(timeout=60) == 0


def logs_of(directory: Path) -> list[str]:
    return [(directory / name).read_text() for name in ("log.txt", "log-1.txt")]


def processes_of(directory: Path) -> dict:
    return json.loads((directory / "process.json").read_text())


def test_each_rank_has_what_torchrun_gives_it_and_a_log_of_its_own(both):
    ending, directory = both("tell_its_rank")
    assert (list(ending.returncodes), list(ending.failed_at)) == ([0, 0], [None, None])
    for rank, log in enumerate(logs_of(directory)):
        assert f"RANK='{rank}' LOCAL_RANK='{rank}' WORLD_SIZE='2' LOCAL_WORLD_SIZE='2' MASTER_ADDR='127.0.0.1'" in log


def test_ranks_see_as_many_devices_as_they_are(run):
    _, directory = run("tell_its_rank", ranks=2)
    assert all("CUDA_VISIBLE_DEVICES='4,5'" in log for log in logs_of(directory))
    _, directory = run("tell_its_rank", ranks=1)
    assert "CUDA_VISIBLE_DEVICES='4'" in (directory / "log.txt").read_text()


def test_the_first_rank_has_the_port_from_the_beginning(both):
    ending, directory = both("meet_at_the_port")
    assert list(ending.returncodes) == [0, 0]
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
def test_the_first_rank_to_fail_ends_all_and_nothing_is_left(run, name, codes, is_running):
    ending, directory = run(name)
    assert (list(ending.returncodes), ending.timed_out, ending.unkillable) == (codes, False, 0)
    assert ending.failed_at[0] is None  # killed while it waited
    assert ending.failed_at[1] is not None
    left = processes_of(directory)
    assert [pid for pid in left["pids"] if is_running(pid)] == []
    with socket.create_server(("127.0.0.1", left["port"])):
        pass  # the port is free


def test_who_fails_of_the_first_ones_end_fails_later(run):
    ending, _ = run("rank_1_fails_and_rank_0_loses_its_peer")
    assert list(ending.returncodes) == [0, 0]
    assert ending.failed_at[1] <= ending.failed_at[0]


def test_at_the_time_limit_each_rank_says_where_it_stands(run):
    ending, directory = run("rank_1_sleeps", timeout_s=1)
    assert ending.timed_out
    assert list(ending.failed_at) == [None, None]
    for log, place in zip(logs_of(directory), ("wait_for_ever", "sleep_in_a_corner"), strict=True):
        assert f"in {place}\n" in log


def test_the_launcher_serves_on_after_all_that(run):
    assert list(run("tell_its_rank", ranks=3)[0].returncodes) == [0, 0, 0]
