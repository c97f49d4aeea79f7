"""Runners for tests of trials that need one of their own, and a look at what trials leave behind."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import benches
import psutil
import pytest
from benches import Bench

from autotune.training.resolve import resolve
from autotune.values.model import ModelSpec


@pytest.fixture
def misbehaviour() -> Callable[[str], dict[str, Any]]:
    return benches.misbehaviour


@pytest.fixture
def left_behind() -> Callable[[Path], list[int]]:
    """Return a function that tells the processes that a misbehaving trial has started to outlive it."""
    return lambda directory: [int(line) for line in (directory / "left.txt").read_text().split()]


@pytest.fixture
def is_running() -> Callable[[int], bool]:
    def running(pid: int) -> bool:
        try:
            return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return False

    return running


@pytest.fixture(scope="session")
def model(tiny_llama: Path) -> ModelSpec:
    return resolve(str(tiny_llama))


@pytest.fixture(scope="module")
def cuda(model: ModelSpec, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    """What runs trials on a CUDA device, or the stand-in for one."""
    made = Bench(model, tmp_path_factory.mktemp("run"), device="cuda:0")
    with made.runner:
        yield made


@pytest.fixture
def own_bench(model: ModelSpec, tmp_path: Path, light_launchers: None) -> Iterator[Bench]:
    """A launcher that this test may kill, for trials that train nothing."""
    made = Bench(model, tmp_path / "run")
    with made.runner:
        yield made


@pytest.fixture(scope="session")
def light_command() -> Callable[..., list[str]]:
    return benches.light_command


@pytest.fixture
def light_launchers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("autotune.execution.launch.launch_command", benches.light_command)
