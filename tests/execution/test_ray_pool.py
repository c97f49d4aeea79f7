"""Trials on a Ray cluster of two nodes, both of them this machine: what arrives, what dies, what is refused."""

import contextlib
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from benches import is_running, misbehaviour
from factories import (
    SEPARABLE,
    SEPARABLE_BEST,
    make_budget,
    make_limits,
    make_plan,
    make_request,
    make_space_file,
    make_workload,
)
from misbehaving import MISBEHAVIOURS
from ray_makers import NOTES, nodes_of_trials
from running import until, wait_for

from autotune.errors import InfrastructureError
from autotune.execution.cluster import Cluster, joined
from autotune.execution.outcome import read_tail
from autotune.execution.ray_pool import RayPool
from autotune.execution.runner import trial_directory
from autotune.search.tuner import Tuner
from autotune.storage.run_directory import RunDirectory
from autotune.value import read_value
from autotune.values.problem import Fleet, TrialEnded
from autotune.values.trial import Purpose, TrialResult, TrialStatus

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def cluster(machines, tmp_path_factory) -> Iterator[Cluster]:
    with contextlib.chdir(tmp_path_factory.mktemp("project")), joined(machines.address) as made:
        made.allotment(Fleet(engine="ray"), "cpu", None)
        yield made


@pytest.fixture
def make_pool(cluster, tmp_path):
    made = []

    def make(maker: str) -> RayPool:
        (tmp_path / "run").mkdir(exist_ok=True)
        made.append(RayPool(tmp_path / "run", cluster, maker=f"ray_makers:{maker}"))
        return made[-1]

    yield make
    for pool in made:
        pool.__exit__(None, None, None)


def noting(folder: Path, number: int, name: str | None = None):
    folder.mkdir(exist_ok=True)
    arguments = {NOTES: str(folder)} | ({"misbehaviour": name} if name else {})
    return make_request(number=number, workload=make_workload(fixed_arguments=arguments))


def test_workers_import_no_module_of_the_working_directory(cluster):
    paths = cluster.ray.get(cluster.ray.remote(num_cpus=0)(lambda: list(sys.path)).remote())
    assert str(Path.cwd()) not in paths


def test_trials_are_measured_or_fail_as_on_this_machine(make_pool, bench):
    pool = make_pool("behaving")
    starved = {"config": {"per_device_train_batch_size": 256}, "limits": {"memory_bytes": 20 << 20}}
    hurried = {"workload": misbehaviour("ignore_sigterm"), "limits": {"timeout_s": 1}}
    for fields, status in ((starved, "out of memory"), (hurried, "timed out"), ({}, "completed")):
        request = bench.request(**fields)
        result = pool.run(request)
        assert (result.request, result.status) == (request, status), result.outcome
    assert result.measurement.memory.peak_bytes <= request.limits.memory_bytes


def test_misbehaving_trials_have_the_same_status_cause_and_log_as_on_this_machine(make_pool, bench, tmp_path):
    pool, cases = make_pool("light"), {}
    for case in MISBEHAVIOURS:
        request = bench.request(workload=misbehaviour(case.name), limits={"timeout_s": 60})
        cases[request.number] = case
        pool.begin(request)
    for _ in MISBEHAVIOURS:
        result = pool.wait()
        case = cases[result.request.number]
        assert result.status == case.status
        assert result.outcome.cause.startswith(case.cause)
        log = trial_directory(tmp_path / "run", result.request.number) / "log.txt"
        assert case.logged in read_tail(log, lines=15)


def test_trials_run_on_both_nodes_at_once_in_workers_that_stay_and_their_files_come_back(make_pool, tmp_path):
    pool = make_pool("light")
    requests = [noting(tmp_path / "notes", number, "print_and_end") for number in range(2)]
    assert pool.free() == 2
    for request in requests:
        pool.begin(request)
    assert pool.free() == 0
    results = [pool.wait(), pool.wait()]
    assert len({r.place for r in results}) == 2
    for result in results:
        directory = trial_directory(tmp_path / "run", result.request.number)
        assert read_value(TrialResult, directory / "result.json") == result
        assert "on stdout" in (directory / "log.txt").read_text()
    assert pool.run(noting(tmp_path / "notes", 2, "print_and_end")).place in {r.place for r in results}
    *workers, again = ((tmp_path / "notes" / f"worker-{number}").read_text() for number in range(3))
    assert again in workers


def test_a_trial_whose_worker_dies_runs_again_and_says_so_and_is_a_crash_the_second_time(make_pool, tmp_path):
    result = make_pool("dying").run(noting(tmp_path / "notes", 0))
    assert result.status is TrialStatus.COMPLETED
    assert "it ran again" in result.warnings[0]
    result = make_pool("dying").run(make_request())
    assert result.status is TrialStatus.CRASHED
    assert "its worker died 2 times" in result.outcome.cause


def test_a_trial_that_waits_for_its_turn_in_the_cluster_has_not_crashed(make_pool, cluster, caplog):
    busy = cluster.ray.remote(num_cpus=1)(lambda seconds: time.sleep(seconds))
    others = [busy.options(scheduling_strategy=cluster.pinned(node.id)).remote(20.0) for node in cluster.nodes()]
    result = make_pool("scripted").run(make_request(limits=make_limits(timeout_s=1.0)))
    assert result.status is TrialStatus.COMPLETED, result.outcome
    assert result.warnings == ()
    assert "waiting for 1 CPU on each of 1 node(s) to be free" in caplog.text
    cluster.ray.get(others)


@pytest.mark.parametrize(("name", "is_killed"), [("hang_with_children", True), ("ignore_sigterm", False)])
def test_a_killed_worker_or_leaving_the_pool_ends_what_runs(make_pool, tmp_path, name, is_killed):
    pool, notes = make_pool("light"), tmp_path / "notes"
    pool.begin(noting(notes, 0, name))
    worker = psutil.Process(int(wait_for(notes / "worker-0")))
    launcher = until(worker.children)[0]
    started = [launcher, *until(launcher.children)]  # what a trial has cut loose ends when its slot is used again
    worker.kill() if is_killed else pool.__exit__(None, None, None)
    until(lambda: not any(is_running(process.pid) for process in started))


def test_nodes_that_can_run_no_trial_end_the_search(make_pool):
    with pytest.raises(InfrastructureError, match="no trial can be run here"):
        make_pool("broken").run(make_request())


def search(cluster: Cluster, directory: Path, when: dict[int, Any]):
    """Run a search of 40 trials; return the answer and all trials. `when`: what is done after so many."""
    directory.mkdir()
    hardware = cluster.allotment(Fleet(engine="ray"), "cpu", None).hardware
    plan = make_plan(space=make_space_file(SEPARABLE), hardware=hardware, budget=make_budget(max_trials=40))
    ended = []

    def listen(event) -> None:
        if isinstance(event, TrialEnded):
            ended.append(event.result)
            when.get(len(ended), lambda: None)()

    with RayPool(directory, cluster, maker="ray_makers:scripted") as pool:
        return Tuner(plan, RunDirectory(directory), pool, listen).run(), ended


def test_a_search_loses_nothing_when_a_node_is_killed(machines, cluster, tmp_path):
    usual, _ = search(cluster, tmp_path / "usual", {})
    third, killed = machines.add_node(num_cpus=1), []

    def kill() -> None:
        if not killed and third.node_id in nodes_of_trials():
            killed.append(third)
            third.kill_raylet()  # as a power cut does

    result, ended = search(cluster, tmp_path / "killed", dict.fromkeys(range(8, 40), kill))
    explored = [r.request.config for r in ended if r.request.purpose.explores]
    assert len(set(explored)) == len(explored) == 41
    assert {r.status for r in ended} == {TrialStatus.COMPLETED}
    assert killed
    assert sum("it ran again" in w for r in ended for w in r.warnings) <= 1
    assert result.best.config == usual.best.config == SEPARABLE_BEST
    assert RunDirectory(tmp_path / "killed").results() == sorted(ended, key=lambda r: r.request.number)


def test_a_node_that_joins_is_used(machines, cluster, tmp_path):
    """Three trials run at a time after it has come."""
    new = []
    _, ended = search(cluster, tmp_path / "joined", {5: lambda: new.append(machines.add_node(num_cpus=1))})
    new[0].kill_raylet()
    spans = [(r.began, r.began + r.duration_s) for r in ended if r.request.purpose is Purpose.SEARCH]
    assert max(sum(b <= began < e for b, e in spans) for began, _ in spans) == 3
