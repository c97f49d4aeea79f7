"""One launcher for all tests of trials: its start takes seconds, a trial of a tiny model one or two."""

import contextlib
import itertools
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import psutil
import pytest

from autotune.execution.job import Job
from autotune.execution.launch import Launcher
from autotune.execution.outcome import Ending
from autotune.execution.runner import LocalRunner, Runner, trial_directory
from autotune.training.resolve import resolve
from autotune.values.budget import CheckTask, LossTask, SoakTask
from autotune.values.config import TrainConfig
from autotune.values.hardware import detect
from autotune.values.model import ModelSpec, Task
from autotune.values.trial import Limits, Measurement, Purpose, TrialRequest, TrialResult
from autotune.values.workload import Workload

# Measuring ends after two steps: the interval is always narrow enough.
LIMITS = Limits(
    memory_bytes=1 << 30, timeout_s=120, discarded_steps=1, measure_steps=2, measure_time_s=60, relative_interval=1e9
)


# The launcher's own code, without the import of torch.
LIGHT = "from autotune.execution import launch; launch._preload = lambda device: True; launch.main()"


def light_command(*arguments: str, python: str = sys.executable) -> list[str]:
    """The command of a launcher that starts at once, for trials that train nothing."""
    return [python, "-P", "-c", LIGHT, *arguments]


# Of a run that is to make all its steps.
LONG = {"measure_steps": 10, "relative_interval": 1e-12}
GPT2 = {"model_type": "gpt2", "vocab_size": 512, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 64}


class Asked:
    """A launcher that is given jobs and whose replies are read."""

    def __init__(self, directory: Path, *devices: str) -> None:
        self._directory = directory
        self.launcher = Launcher(directory, devices or ("cpu",))
        self.launcher.wait()
        self._names = itertools.count()

    def send(self, entry: str, *, timeout_s: float = 60, **fields: Any) -> Path:
        """Have a function of a module of tests run; return the directory that it is given."""
        directory = self._directory / f"{next(self._names):03d}"
        directory.mkdir()
        self.launcher.send(Job(**{"place": 0, **fields}, directories=(directory,), entry=entry, timeout_s=timeout_s))
        return directory

    def run(self, entry: str, **fields: Any) -> tuple[Ending, Path]:
        """Return how a job ended, and its directory."""
        directory = self.send(entry, **fields)
        place, ending = self.launcher.reply(60)
        assert place == 0
        return ending, directory


class Lent:
    """A launcher that runs already, lent to a search of this process, which leaves it running."""

    def __init__(self, launcher: Launcher) -> None:
        self.wait, self.send, self.reply = launcher.wait, launcher.send, launcher.reply
        self.has_died = launcher.has_died

    def end(self) -> None:
        """Its owner ends it."""


class Bench:
    """A runner with a launcher of its own, and trials as short as can be."""

    def __init__(self, model: ModelSpec, run_directory: Path, *, device: str = "cpu") -> None:
        self.runner = LocalRunner(run_directory, detect(device), entry="misbehaving:behave")
        self._device = device
        run_directory.mkdir(exist_ok=True)
        self.run_directory = run_directory
        self._model = model
        self._numbers = itertools.count()

    def request(self, *, config: Any = None, workload: Any = None, limits: Any = None) -> TrialRequest:
        """Return a request for a trial of the tiny model; the arguments are fields that differ from the usual."""
        usual = {"per_device_train_batch_size": 2, "attn_implementation": "sdpa", "dataloader_pin_memory": False}
        made_config = TrainConfig(**{**usual, **(config or {})})
        data = {"task": Task.CAUSAL_LM, "sequence_length": 16, "global_batch_size": None}
        made_workload = Workload(**{"model": self._model, **data, **(workload or {})})
        return TrialRequest(
            number=next(self._numbers), purpose=Purpose.SEARCH, config=made_config, workload=made_workload,
            device=self._device, accumulation_steps=made_workload.accumulation_steps(made_config),
            limits=LIMITS.model_copy(update=limits or {}),
        )  # fmt: skip

    # Fields of trials and checks are those of `request`.

    def run(self, **fields: Any) -> TrialResult:
        return self.runner.run(self.request(**fields))

    def measured(self, **fields: Any) -> Measurement:
        return completed(self.run(**fields))

    def check_request(self, task: CheckTask, **fields: Any) -> TrialRequest:
        purpose = Purpose.SOAK if isinstance(task, SoakTask) else Purpose.LOSS_CHECK
        return self.request(**fields).model_copy(update={"purpose": purpose, "task": task})

    def check(self, task: CheckTask, **fields: Any) -> TrialResult:
        return self.runner.run(self.check_request(task, **fields))

    def assert_losses_of_one(self, folder: Path, runner: Runner, config: dict[str, Any]) -> None:
        """Hold a loss run of several ranks against that of one process: the samples of a step are the same."""
        (folder / "config.json").write_text(json.dumps(GPT2))
        task, model = LossTask(steps=10, pass_steps=2, seed=1), resolve(str(folder))
        same = {"workload": {"model": model, "global_batch_size": 8}, "limits": LONG}
        alone = self.checked(task, **same).curve
        both = completed(runner.run(self.check_request(task, config=config, **same))).curve
        assert both.losses == pytest.approx(alone.losses, rel=1e-5)
        assert max(alone.losses) - min(alone.losses) > 100 * 1e-5 * alone.losses[0]  # something was learnt
        assert alone.dropout_spread > 0
        assert both.dropout_spread == pytest.approx(alone.dropout_spread, rel=0.5)

    def checked(self, task: CheckTask, **fields: Any) -> Measurement:
        return completed(self.check(task, **fields))

    def misbehave(self, name: str, *, timeout_s: float = 60, **limits: Any) -> TrialResult:
        """Run the function `name` of `misbehaving` as a trial."""
        return self.run(workload=misbehaviour(name), limits={"timeout_s": timeout_s, **limits})

    def in_turn(self, *configs: dict[str, Any], **limits: Any) -> list[TrialResult]:
        """Run trials of configurations in turn, for half a second."""
        limits = {"measure_time_s": 0.5, "measure_steps": 4000, **limits}
        requests = [self.request(config=config, limits=limits) for config in configs]
        numbers = tuple(request.number for request in requests)
        return self.runner.run_in_turn([r.model_copy(update={"in_turn_with": numbers}) for r in requests])

    def directory(self, result: TrialResult) -> Path:
        return trial_directory(self.run_directory, result.request.number)

    def seen(self, result: TrialResult) -> Any:
        """What a misbehaving trial has written down."""
        return json.loads((self.directory(result) / "seen.json").read_text())

    def log(self, result: TrialResult) -> str:
        return (self.directory(result) / "log.txt").read_text()

    def process(self, result: TrialResult) -> dict[str, Any]:
        return json.loads((self.directory(result) / "process.json").read_text())

    @contextlib.contextmanager
    def lent(self) -> Iterator[None]:
        """Have searches of this process run their trials by this launcher, start none and measure no operators."""
        launcher = self.runner.start()
        with (
            patch("autotune.execution.runner.Launcher", lambda *_, **__: Lent(launcher)),
            patch("autotune.search.run.measured_model", lambda plan, model, *_, **__: model),
        ):
            yield


def completed(result: TrialResult) -> Measurement:
    assert isinstance(result.outcome, Measurement), result.outcome
    return result.outcome


def misbehaviour(name: str) -> dict[str, Any]:
    """Return the fields of a workload that `misbehaving.behave` reads."""
    return {"fixed_arguments": {"misbehaviour": name}}


def is_running(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def left_behind(directory: Path) -> list[int]:
    """The processes that a misbehaving trial has started to outlive it."""
    return [int(line) for line in (directory / "left.txt").read_text().split()]
