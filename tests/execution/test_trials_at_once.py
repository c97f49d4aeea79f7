"""Trials at several places of one machine at once: each for itself, and none left when the pool is."""

import itertools
import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from benches import is_running, misbehaviour
from factories import make_config, make_gpu, make_limits, make_request, make_workload
from running import wait_for

from autotune.execution.job import marked
from autotune.execution.launch import MARK_FILE
from autotune.execution.places import Place
from autotune.execution.runner import LocalRunner, trial_directory
from autotune.values.config import Parallelism
from autotune.values.hardware import detect
from autotune.values.trial import TrialRequest, TrialStatus

DIED = "the process that runs trials died with it"


@pytest.fixture
def pool(tmp_path, light_launchers) -> Iterator[LocalRunner]:
    (tmp_path / "run").mkdir()
    two = [Place(shown=f"place {number}", devices=("cpu",)) for number in range(2)]
    with LocalRunner(tmp_path / "run", detect("cpu"), places=two, entry="misbehaving:behave") as made:
        yield made


@pytest.fixture
def begin(pool):
    """Return a function that begins misbehaving trials, and returns their requests."""
    numbers = itertools.count()

    def begun(*names: str, timeout_s: float = 600) -> list[TrialRequest]:
        limits = make_limits(timeout_s=timeout_s)
        workloads = [make_workload(**misbehaviour(name)) for name in names]
        requests = [make_request(number=next(numbers), workload=each, limits=limits) for each in workloads]
        for request in requests:
            pool.begin(request)
        return requests

    return begun


def running(run: Path) -> list[int]:
    return marked(json.loads((run / MARK_FILE).read_text())["mark"])


def process_of(run: Path, request: TrialRequest) -> int:
    return json.loads(wait_for(trial_directory(run, request.number) / "process.json"))["pid"]


def test_trials_run_at_the_same_time_forked_from_one_launcher(pool, begin, tmp_path):
    assert pool.free()
    begin("tell")
    assert pool.free()
    begin("tell")
    assert pool.free() == 0
    results = [pool.wait(), pool.wait()]
    assert len({r.place for r in results}) == 2
    assert pool.free() == 2
    (launcher,) = running(tmp_path / "run")
    assert psutil.Process(launcher).ppid() == os.getpid()


def test_when_a_launcher_dies_its_trials_run_again_and_one_that_dies_twice_costs_them(pool, begin):
    requests = begin("hang", "kill_the_launcher")
    results = [pool.wait(), pool.wait()]
    assert [r.request for r in results] == requests
    assert {(r.status, r.outcome.cause) for r in results} == {(TrialStatus.CRASHED, DIED)}
    assert {r.warnings for r in results} == {("it ran again: the process that runs trials had died",)}
    assert pool.free() == 2
    begin("refuse")
    assert pool.wait().outcome.cause == "planted"


def test_a_trial_ends_at_its_own_time_limit_whatever_runs_beside_it_and_results_come_as_trials_end(
    pool, begin, tmp_path
):
    (hanging,), (children,) = begin("hang"), begin("hang_with_children", timeout_s=1)
    assert pool.wait().request == children
    os.kill(process_of(tmp_path / "run", hanging), signal.SIGKILL)
    assert pool.wait().request == hanging


def test_leaving_the_pool_ends_trials_that_run_and_they_have_no_result(pool, begin, tmp_path):
    pids = [process_of(tmp_path / "run", request) for request in begin("hang_with_children", "ignore_sigterm")]
    pool.__exit__(None, None, None)
    assert not any(map(is_running, pids))
    assert running(tmp_path / "run") == []
    assert not list(tmp_path.rglob("result.json"))


def test_ranks_see_as_many_devices_of_their_place_as_they_are(tmp_path, light_launchers, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7,8")
    monkeypatch.setattr("autotune.execution.places.cuda_used_bytes", lambda device: None)
    monkeypatch.setattr(LocalRunner, "_fault_of", lambda *_: "")  # there is no device to try after them
    places = (Place(devices=("cuda:0",)), Place(devices=("cuda:1", "cuda:2", "cuda:3")))
    (tmp_path / "run").mkdir()
    with LocalRunner(tmp_path / "run", make_gpu(), entry="misbehaving:tell", places=places) as pool:
        for number, ranks in enumerate((1, 2)):
            config = make_config(parallelism=Parallelism(world_size=ranks)) if ranks > 1 else make_config()
            pool.begin(make_request(config, number=number, device="cuda:0", limits=make_limits(timeout_s=60)))
        for _ in range(2):
            pool.wait()
    for number, seen in enumerate(("4", "5,6")):
        log = trial_directory(tmp_path / "run", number) / "log.txt"
        assert f"CUDA_VISIBLE_DEVICES={seen} " in log.read_text()
