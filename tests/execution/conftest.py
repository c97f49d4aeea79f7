"""Runners for tests of trials that need one of their own."""

from collections.abc import Iterator
from pathlib import Path

import benches
import pytest
from benches import Bench

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
