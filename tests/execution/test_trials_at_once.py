"""Trials at several places of one machine at once: each for itself, and none left when the pool is."""

from __future__ import annotations

import itertools
import json
import os
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from factories import make_config, make_gpu, make_limits, make_request, make_workload
from misbehaviours import run_all

from autotune.errors import InfrastructureError
from autotune.execution.job import marked
from autotune.execution.launch import MARK_FILE
from autotune.execution.places import Place, core_sets
from autotune.execution.runner import LocalRunner, trial_directory
from autotune.values.config import Parallelism
from autotune.values.hardware import detect
from autotune.values.trial import TrialStatus

# A place needs a core of its own.
pytestmark = pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores")

DIED = "the process that runs trials died with it"


def make_pool(run_directory: Path) -> LocalRunner:
    run_directory.mkdir(exist_ok=True)
    return LocalRunner(run_directory, detect("cpu"), places=core_sets(2), entry="misbehaving:behave")


@pytest.fixture
def pool(tmp_path, light_launchers) -> Iterator[LocalRunner]:
    """Two places for trials that train nothing."""
    with make_pool(tmp_path / "run") as made:
        yield made


@pytest.fixture
def ask(light_launchers):
    """Return a function that makes the request for a misbehaviour."""
    numbers = itertools.count()

    def make(name: str, *, timeout_s: float = 600):
        workload = make_workload(fixed_arguments={"misbehaviour": name})
        return make_request(number=next(numbers), workload=workload, limits=make_limits(timeout_s=timeout_s))

    return make


def running(run: Path) -> list[int]:
    """The processes of a search that run."""
    return marked(json.loads((run / MARK_FILE).read_text())["mark"])


def process_of(run: Path, number: int) -> int:
    """Return the trial's process, once it runs."""
    path = trial_directory(run, number) / "process.json"
    while not path.exists() or not path.read_text():
        time.sleep(0.02)
    return json.loads(path.read_text())["pid"]


def test_trials_run_at_the_same_time_on_cores_of_their_own_forked_from_one_launcher(pool, ask, tmp_path):
    for _ in range(2):
        assert pool.free()
        pool.begin(ask("tell_its_cores"))
    assert pool.free() == 0
    results = [pool.wait(), pool.wait()]
    told = [re.search(r"cores \[(.*)\] threads (.*)", r.outcome.log_tail) for r in results]
    cores = [{int(core) for core in match[1].split(",")} for match in told]
    assert cores[0].isdisjoint(cores[1])
    assert len(cores[0]) == len(cores[1]) == len(os.sched_getaffinity(0)) // 2
    assert {match[2] for match in told} == {"1"}  # as tests ask for
    assert len({r.place for r in results}) == 2
    assert pool.free() == 2
    (launcher,) = running(tmp_path / "run")
    assert psutil.Process(launcher).ppid() == os.getpid()


def test_results_come_in_the_order_in_which_trials_end(pool, ask, tmp_path):
    hanging, quick = ask("hang"), ask("refuse")
    pool.begin(hanging)
    pool.begin(quick)
    assert pool.wait().request == quick
    os.kill(process_of(tmp_path / "run", hanging.number), signal.SIGKILL)
    assert pool.wait().request == hanging


def test_a_launcher_that_dies_costs_the_trials_that_run_and_is_replaced(pool, ask):
    requests = [ask("hang"), ask("kill_the_launcher")]
    for request in requests:
        pool.begin(request)
    results = [pool.wait(), pool.wait()]
    assert [r.request for r in results] == requests
    assert {(r.status, r.outcome.cause) for r in results} == {(TrialStatus.CRASHED, DIED)}
    assert pool.free() == 2
    assert pool.run(ask("refuse")).outcome.cause == "planted"


def test_a_trial_ends_at_its_own_time_limit_whatever_runs_beside_it(pool, ask):
    long, short = ask("hang", timeout_s=4), ask("hang_with_children", timeout_s=1)
    pool.begin(long)
    pool.begin(short)
    assert [pool.wait().request for _ in range(2)] == [short, long]


def test_leaving_the_pool_ends_trials_that_run_and_they_have_no_result(ask, tmp_path, is_running):
    run = tmp_path / "run"
    requests = [ask("hang_with_children"), ask("ignore_sigterm")]
    with make_pool(run) as pool:
        for request in requests:
            pool.begin(request)
        pids = [process_of(run, request.number) for request in requests]
    assert not any(map(is_running, pids))
    assert running(run) == []
    assert not list(run.rglob("result.json"))


def test_a_place_whose_launcher_cannot_start_is_an_infrastructure_error(tmp_path, ask, monkeypatch):
    monkeypatch.setattr("autotune.execution.launch.launch_command", lambda *arguments: ["false"])
    with make_pool(tmp_path / "run") as broken, pytest.raises(InfrastructureError, match="did not start"):
        broken.begin(ask("refuse"))


def test_ranks_see_as_many_devices_of_their_place_as_they_are(tmp_path, light_launchers, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7,8")
    monkeypatch.setattr("autotune.execution.places.cuda_used_bytes", lambda device: None)
    monkeypatch.setattr(LocalRunner, "_fault_of", lambda *_: "")  # there is no device to try after them
    places = (Place(devices=("cuda:0",)), Place(devices=("cuda:1", "cuda:2", "cuda:3")))
    (tmp_path / "run").mkdir()
    with LocalRunner(tmp_path / "run", make_gpu(), entry="misbehaving_ranks:tell_its_rank", places=places) as pool:
        for number, ranks in enumerate((1, 2)):
            config = make_config(parallelism=Parallelism(world_size=ranks)) if ranks > 1 else make_config()
            pool.begin(make_request(config, number=number, device="cuda:0", limits=make_limits(timeout_s=60)))
        for _ in range(2):
            pool.wait()
    for number, seen in enumerate(("4", "5,6")):
        log = trial_directory(tmp_path / "run", number) / "log.txt"
        assert f"CUDA_VISIBLE_DEVICES='{seen}'" in log.read_text()


@pytest.mark.slow
def test_misbehaving_trials_at_once_have_the_same_status_cause_and_log_as_alone(pool, bench, misbehaviour):
    run_all(pool, bench, misbehaviour)
