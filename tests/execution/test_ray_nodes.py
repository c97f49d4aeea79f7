"""Which nodes of a cluster a search uses: those of one kind, with what they say of themselves; the engine is a fake.

And how a cluster is joined.
"""

import json
import os
import socket
import sys
import tempfile
from types import SimpleNamespace
from typing import Any

import pytest
from factories import make_gpu, make_hardware

from autotune import __version__
from autotune.errors import InfrastructureError, InputError, MachineError
from autotune.execution.cluster import Cluster, joined
from autotune.execution.places import kind_of
from autotune.execution.ray_pool import scratch
from autotune.units import GIB
from autotune.values.problem import Fleet

A, B = make_gpu(name="NVIDIA A100"), make_gpu(name="NVIDIA H100", capability=(9, 0))


class FakeRay:
    """Nodes that answer at once, unless they are silent."""

    def __init__(self) -> None:
        self.there: dict[str, dict[str, Any]] = {}
        self.answers: dict[str, str | Exception | None] = {}

    def add(self, id_: str, *devices, cpus: float = 8.0, gpus: int = 0, version: str = __version__) -> None:
        resources = {"CPU": cpus, **({"GPU": float(gpus)} if gpus else {})}
        self.there[id_] = {"NodeID": id_, "Alive": True, "NodeManagerAddress": f"10.0.0.{id_}", "Resources": resources}
        self.answers[id_] = json.dumps([version, *(device.model_dump(mode="json") for device in devices)])

    def nodes(self) -> list[dict[str, Any]]:
        return list(self.there.values())

    def remote(self, **options: Any):
        return lambda function: _Task()

    def wait(self, tasks, num_returns: int, timeout: float):
        ready = [task for task in tasks if self.answers[task] is not None]
        return ready, [task for task in tasks if task not in ready]

    def get(self, task: str) -> str:
        answer = self.answers[task]
        if isinstance(answer, Exception):
            raise answer
        return answer

    def cancel(self, task: str, force: bool) -> None:
        pass


class _Task:
    """Known by the node that it is pinned to."""

    def __init__(self, node: str = "") -> None:
        self._node = node

    def options(self, scheduling_strategy: str):
        return _Task(scheduling_strategy)

    def remote(self, kind: str) -> str:
        return self._node


@pytest.fixture
def ray(monkeypatch) -> FakeRay:
    monkeypatch.setattr(Cluster, "pinned", lambda self, node_id: node_id)
    return FakeRay()


def allotted(ray: FakeRay, device: str = "auto", planned=None, **fleet):
    cluster = Cluster(ray)
    return cluster, cluster.allotment(Fleet(engine="ray", **fleet), device, planned)


def test_each_gpu_of_the_nodes_is_a_place(ray):
    ray.add("1", A, A, gpus=2)
    ray.add("2", A.model_copy(update={"free_bytes": GIB}), gpus=1, cpus=0.5)
    cluster, allotment = allotted(ray)
    assert [n.slots for n in cluster.nodes()] == [2, 1]
    assert [n.demand for n in cluster.nodes()] == [(1.0, 1.0), (0.5, 1.0)]
    assert allotment.hardware.free_bytes == GIB
    assert "up to 3 trials at a time on 2 nodes of the cluster with NVIDIA A100" in allotment.notes[0]


def test_a_trial_of_several_gpus_has_them_on_one_node(ray):
    ray.add("1", *[A] * 5, gpus=5, cpus=40.0)
    ray.add("2", A, gpus=1)
    cluster, allotment = allotted(ray, devices=2)
    assert [(n.id, n.slots) for n in cluster.nodes()] == [("1", 2)]
    assert cluster.nodes()[0].demand == (2.0, 2.0)
    assert "1 node(s) of the cluster are not used: it has 1 GPU, fewer than the 2 of --devices" in allotment.notes


def test_a_mixed_fleet_is_searched_on_the_kind_with_most_places_and_the_rest_is_told(ray):
    ray.add("1", A, gpus=1)
    ray.add("2", B, B, gpus=2)
    ray.add("3", A.model_copy(update={"versions": {**A.versions, "torch": "2.12.0"}}), gpus=1)  # another kind
    cluster, allotment = allotted(ray)
    assert allotment.hardware.name == "NVIDIA H100"
    assert [n.id for n in cluster.nodes()] == ["2"]
    told = allotment.notes[1]
    assert "not used" in told
    assert "1 x NVIDIA A100 (10.0.0.1)" in told
    assert f"--kind {kind_of(A)} searches for those" in told


@pytest.mark.parametrize(
    "asked",
    [{"kind": "a100"}, {"kind": "NVIDIA A"}, {"kind": kind_of(A)}, {"planned": A}],
    ids=["part", "beginning", "digest", "planned"],
)
def test_a_kind_is_asked_for_by_part_of_its_name_by_its_digest_or_by_the_search_that_goes_on(ray, asked):
    ray.add("1", A, gpus=1)
    ray.add("2", B, B, gpus=2)
    cluster, allotment = allotted(ray, **asked)
    assert allotment.hardware.name == "NVIDIA A100"
    assert [n.id for n in cluster.nodes()] == ["1"]
    with pytest.raises(InputError, match=r"--kind T4: the cluster has NVIDIA A100 \("):
        allotted(ray, kind="T4")
    with pytest.raises(MachineError, match=r"the search was begun on another \(.*; the cluster has NVIDIA A100"):
        allotted(ray, planned=A.model_copy(update={"name": "another"}))


def test_processors_run_a_trial_each(ray):
    for number in "12":
        ray.add(number, make_hardware(cores=8), cpus=8.0)
    cluster, allotment = allotted(ray, workers=3)
    assert [(n.slots, n.demand) for n in cluster.nodes()] == [(1, (8.0, 0.0))] * 2
    assert allotment.hardware.cores == 8


def test_nodes_that_come_are_used_as_far_as_workers_are_asked_for_and_those_that_go_are_not(ray):
    ray.add("1", A, gpus=1)
    cluster, _ = allotted(ray, workers=3)
    ray.add("2", *[A] * 4, gpus=4)
    assert cluster.places(cluster.nodes()) == 3
    ray.there["1"]["Alive"] = False
    assert [(n.id, n.slots) for n in cluster.nodes()] == [("2", 4)]


def test_a_node_that_does_not_answer_or_can_not_be_used_is_left_out_with_the_reason(ray):
    ray.add("1", A, gpus=1)
    ray.add("2", A, gpus=1)
    ray.answers["2"] = None
    ray.add("3", A, gpus=1)
    ray.answers["3"] = ModuleNotFoundError("No module named 'autotune'")
    ray.add("4", A, gpus=1, version="0.0.1")
    ray.add("5", gpus=1)
    ray.add("6", A, B, gpus=2)
    cluster, allotment = allotted(ray)
    assert [n.id for n in cluster.nodes()] == ["1"]
    told = "\n".join(allotment.notes)
    version = f"it has autotune 0.0.1, the search {__version__}"
    none, unlike = "its NVIDIA driver shows no device", "its GPUs are not alike"
    for reason in ("it did not answer", "No module named 'autotune'", version, none, unlike):
        assert f"1 node(s) of the cluster are not used: {reason}" in told


@pytest.mark.parametrize(
    ("device", "error", "said"),
    [
        ("cuda", MachineError, "no node of the cluster can run trials on cuda"),
        ("cpu", MachineError, "no node of the cluster can run trials on cpu"),
        ("cuda:1", InputError, "--device cuda:1: on a cluster it is auto, cpu or cuda"),
    ],
)
def test_a_cluster_without_such_a_device_is_refused_at_once(ray, device, error, said):
    ray.add("1", make_hardware(), cpus=0.0)
    with pytest.raises(error, match=said):
        allotted(ray, device)


# Joining a cluster: what is refused at once, and the token.


@pytest.fixture
def _own_environment(monkeypatch, tmp_path):
    """No cluster and no token of whoever runs the tests; Ray is installed."""
    for name in ("RAY_ADDRESS", "RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH", "RAY_USAGE_STATS_ENABLED",
                 "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "RAY_DEDUP_LOGS_SKIP_REGEX",
                 "RAY_IGNORE_UNHANDLED_ERRORS"):  # fmt: skip
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(is_initialized=lambda: False))


@pytest.mark.usefixtures("_own_environment")
@pytest.mark.parametrize("address", ["ray://head:10001", "head", "head:port", ":6379"])
def test_an_address_that_is_none_or_where_nobody_listens_is_refused_at_once(address):
    with pytest.raises(InputError, match="expected auto, or host:port"), joined(address):
        pass
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))  # taken, and nobody listens
        address = f"127.0.0.1:{unused.getsockname()[1]}"
        with pytest.raises(InfrastructureError, match=f"the cluster at {address} can't be joined"), joined(address):
            pass


@pytest.mark.usefixtures("_own_environment")
def test_an_empty_address_is_none(monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", "")
    with pytest.raises(InfrastructureError, match="the cluster at this machine can't be joined"), joined(None):
        pass
    # Or Ray would print of a node that it loses before an answer as JSON.
    assert (os.environ["RAY_DEDUP_LOGS_SKIP_REGEX"], os.environ["RAY_IGNORE_UNHANDLED_ERRORS"]) == (".", "1")


@pytest.mark.usefixtures("_own_environment")
@pytest.mark.parametrize(
    ("given", "mode"),
    [
        ({}, None),
        ({"RAY_AUTH_TOKEN": "secret"}, "token"),
        ({"RAY_AUTH_TOKEN_PATH": "secret"}, "token"),
        ({"a file": "secret"}, "token"),
        ({"RAY_AUTH_TOKEN": "secret", "RAY_AUTH_MODE": "disabled"}, "disabled"),  # what the user says
    ],
)
def test_a_token_is_shown_where_there_is_one(tmp_path, monkeypatch, given, mode):
    monkeypatch.setitem(sys.modules, "ray", None)
    for name, value in given.items():
        if name == "a file":
            (tmp_path / ".ray").mkdir()
            (tmp_path / ".ray" / "auth_token").write_text(value)
        else:
            monkeypatch.setenv(name, value)
    with pytest.raises(MachineError, match=r"pip install 'autotune-train\[ray\]'"), joined(None):
        pass
    assert os.environ.get("RAY_AUTH_MODE") == mode


def test_a_node_keeps_trials_in_a_directory_of_this_user_alone(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    own = scratch("a").parent
    assert own.stat().st_mode & 0o777 == 0o700
    own.chmod(0o777)
    with pytest.raises(InfrastructureError, match="not a directory of this user alone"):
        scratch("a")
    own.rename(tmp_path / "theirs")
    own.symlink_to(tmp_path / "theirs")
    with pytest.raises(InfrastructureError, match="not a directory of this user alone"):
        scratch("a")
