"""Runners for tests of trials that need one of their own."""

import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import benches
import pytest
from benches import Bench
from running import process

from autotune.training.resolve import resolve
from autotune.values.model import ModelSpec


@pytest.fixture(scope="session")
def model(tiny_llama: Path) -> ModelSpec:
    return resolve(str(tiny_llama))


@pytest.fixture(scope="module")
def cuda(model: ModelSpec, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    """A runner on a CUDA device, or the stand-in for one."""
    made = Bench(model, tmp_path_factory.mktemp("run"), device="cuda:0")
    with made.runner:
        yield made


@pytest.fixture
def own_bench(model: ModelSpec, tmp_path: Path, light_launchers: None) -> Iterator[Bench]:
    """A launcher that this test may kill, for trials that train nothing; its directory has an awkward name."""
    made = Bench(model, tmp_path / "a 'b' ü $x\n;")
    with made.runner:
        yield made


@pytest.fixture
def light_launchers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("autotune.execution.launch.launch_command", benches.light_command)


_TOKEN = secrets.token_hex(32)  # Ray keeps it for as long as the process lives


@pytest.fixture(scope="module")
def _ray_environment() -> Iterator[None]:
    """Token authentication as by default, with a token of the test's own; workers find the tests' modules."""
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("RAY_AUTH_MODE", "token")
        environment.setenv("RAY_AUTH_TOKEN", _TOKEN)
        environment.setenv("RAY_USAGE_STATS_ENABLED", "0")
        environment.setenv("PYTHONPATH", process()["env"]["PYTHONPATH"])
        pytest.importorskip("ray")  # it reads these when it is imported
        yield


@pytest.fixture(scope="module")
def machines(_ray_environment) -> Iterator[Any]:
    """A head that runs nothing, and two nodes."""
    from ray.cluster_utils import Cluster as Nodes

    made = Nodes(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
    made.add_node(num_cpus=1)
    made.add_node(num_cpus=1)
    yield made
    made.shutdown()
