"""One launcher for all tests of trials: its start takes seconds, a trial of a tiny model one or two."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from autotune.architecture import ModelSpec, Task
from autotune.config import TrainConfig, Workload
from autotune.execution.runner import LocalRunner, trial_directory
from autotune.hardware import detect
from autotune.resolving import resolve
from autotune.trial import Limits, Purpose, TrialRequest, TrialResult

MIB = 1 << 20

# Measuring ends after two steps: the interval is always narrow enough.
LIMITS = Limits(
    memory_bytes=1 << 30,
    timeout_s=120,
    discarded_steps=1,
    measure_steps=2,
    measure_time_s=60,
    relative_interval=1e9,
)


class Bench:
    """A runner with a launcher of its own, and trials as short as can be."""

    def __init__(self, model: ModelSpec, run_directory: Path, *, device: str = "cpu") -> None:
        self.runner = LocalRunner(run_directory, detect(device), entry="misbehaving:behave")
        self._device = device
        run_directory.mkdir(exist_ok=True)
        self.run_directory = run_directory
        self._model = model
        self._numbers = itertools.count()

    def request(
        self,
        *,
        config: dict[str, Any] | None = None,
        workload: dict[str, Any] | None = None,
        limits: dict[str, Any] | None = None,
        accumulation_steps: int | None = None,
    ) -> TrialRequest:
        """Return a request for a trial of the tiny model; the arguments are fields that differ from the usual."""
        made_config = TrainConfig(
            **{
                "per_device_train_batch_size": 2,
                "attn_implementation": "sdpa",
                "dataloader_pin_memory": False,
                **(config or {}),
            }
        )
        made_workload = Workload(
            **{
                "model": self._model,
                "task": Task.CAUSAL_LM,
                "sequence_length": 16,
                "global_batch_size": None,
                **(workload or {}),
            }
        )
        return TrialRequest(
            number=next(self._numbers),
            purpose=Purpose.SEARCH,
            config=made_config,
            workload=made_workload,
            device=self._device,
            accumulation_steps=accumulation_steps or made_workload.accumulation_steps(made_config),
            limits=LIMITS.model_copy(update=limits or {}),
        )

    def run(self, **fields: Any) -> TrialResult:
        """Run a trial; the arguments are those of `request`."""
        return self.runner.run(self.request(**fields))

    def misbehave(self, name: str, *, timeout_s: float = 60, **limits: Any) -> TrialResult:
        """Run a trial that does what the function `name` of `misbehaving` does."""
        return self.run(workload=_misbehaviour(name), limits={"timeout_s": timeout_s, **limits})

    def directory(self, result: TrialResult) -> Path:
        return trial_directory(self.run_directory, result.request.number)


def _misbehaviour(name: str) -> dict[str, Any]:
    """Return the fields of a workload that `misbehaving.behave` reads."""
    return {"fixed_arguments": {"misbehaviour": name}}


@pytest.fixture
def misbehaviour() -> Callable[[str], dict[str, Any]]:
    return _misbehaviour


@pytest.fixture
def make_bench() -> type[Bench]:
    return Bench


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


@pytest.fixture(scope="session")
def bench(model: ModelSpec, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    made = Bench(model, tmp_path_factory.mktemp("run"))
    with made.runner:
        with pytest.MonkeyPatch.context() as environment:
            environment.setenv("OMP_NUM_THREADS", "1")  # threads that wait for each other are slow on a busy machine
            made.runner._ready_launcher()
        yield made


@pytest.fixture
def own_bench(model: ModelSpec, tmp_path: Path, light_launchers: None) -> Iterator[Bench]:
    """A launcher that this test may kill, for trials that train nothing."""
    made = Bench(model, tmp_path / "run")
    with made.runner:
        yield made


# The launcher's own code, without the import of torch.
LIGHT = "from autotune.execution import launch; launch._preload = lambda device: True; launch.main()"


@pytest.fixture(scope="session")
def light_command() -> Callable[..., list[str]]:
    return lambda *arguments: [sys.executable, "-P", "-c", LIGHT, *arguments]


@pytest.fixture
def light_launchers(light_command: Callable[..., list[str]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("autotune.execution.launcher.launch_command", light_command)
