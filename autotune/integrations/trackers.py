"""TensorBoard, Weights & Biases and MLflow: how a trial and the answer are written with each library.

A library is imported when its tracker begins, in the process of the search and not in trials. Where runs go is decided
by the library's own settings (`WANDB_MODE`, `WANDB_PROJECT`, `MLFLOW_TRACKING_URI`, `MLFLOW_EXPERIMENT_NAME`).
"""

from __future__ import annotations

import importlib.util
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from pydantic import Field, NonNegativeInt

from autotune.errors import InputError, MachineError, suggestion
from autotune.value import Value

_PROJECT = "autotune"


class Search(Value):
    """What all runs of a search have in common."""

    id: str
    name: str
    about: dict[str, str]
    directory: str


class Entry(Value):
    """One run of a tracker: a trial, or the answer."""

    name: str
    step: NonNegativeInt = Field(description="number of the trial; of the answer the number of trials")
    completed: bool
    params: dict[str, bool | int | float | str] = Field(description="the configuration")
    metrics: dict[str, float]
    tags: dict[str, str]


class Tracker(Protocol):
    """A service or file that a search is written to; whatever a method raises, the search goes on."""

    def open(self, search: Search, known_as: str) -> str:
        """Begin, or resume what the tracker knows as `known_as`; return how it knows the search."""

    def trial(self, entry: Entry) -> None:
        """Write a trial."""

    def answer(self, entry: Entry) -> None:
        """Write the answer; a resumed search may do so again."""

    def close(self) -> None:
        """End."""


class TensorBoard:
    """A run for each trial, for the tab HPARAMS, and curves over the trials, in the search's folder `tensorboard`."""

    def __init__(self) -> None:
        self._writer: Any = None

    def open(self, search: Search, known_as: str) -> str:
        """Make the folder."""
        from torch.utils.tensorboard import SummaryWriter

        folder = str(Path(search.directory) / "tensorboard")
        self._writer = SummaryWriter(log_dir=folder)
        if not known_as:
            self._writer.add_text("search", _listed({"search": search.name, **search.about}))
        return folder

    def trial(self, entry: Entry) -> None:
        """Write a run of hyperparameters and figures, and a point of each curve."""
        self._run(entry)
        for name, value in entry.metrics.items():
            self._writer.add_scalar(f"trials/{name}", value, entry.step)
        self._writer.flush()

    def answer(self, entry: Entry) -> None:
        """Write a run of its own."""
        self._run(entry)
        self._writer.add_text("answer", _listed({**entry.tags, **entry.params, **entry.metrics}), entry.step)
        self._writer.flush()

    def close(self) -> None:
        """Close the files."""
        self._writer.close()

    def _run(self, entry: Entry) -> None:
        """Write hyperparameters and figures; in the tab HPARAMS these need names that no curve has."""
        figures = {f"hparam/{name}": value for name, value in entry.metrics.items()}
        self._writer.add_hparams({**entry.params, **entry.tags}, figures, run_name=entry.name, global_step=entry.step)


class WandB:
    """A run for each trial, all in one group, written when the trial has ended, so that none is open during a trial."""

    def __init__(self) -> None:
        self._search: Search | None = None

    def open(self, search: Search, known_as: str) -> str:
        """Note the group."""
        self._search = search
        return search.id

    def trial(self, entry: Entry) -> None:
        """Write a run."""
        import wandb

        search = self._search
        assert search is not None
        run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", _PROJECT),
            group=search.name,
            name=entry.name,
            id=f"{search.id}-{entry.name}",
            job_type=entry.tags["purpose"],
            config={**entry.params, "search": search.about},
            dir=search.directory,
            settings=wandb.Settings(
                silent=True, console="off", x_disable_stats=True, disable_git=True, save_code=False
            ),
        )
        run.log(dict(entry.metrics), step=entry.step)
        run.summary.update(entry.tags)
        run.finish(exit_code=0 if entry.completed else 1)

    answer = trial

    def close(self) -> None:
        """End the library's process."""
        import wandb

        wandb.teardown()


class MLflow:
    """A parent run for the search, and a child of it for each trial and for the answer."""

    def __init__(self) -> None:
        self._client: Any = None
        self._experiment = self._parent = ""

    def open(self, search: Search, known_as: str) -> str:
        """Begin the parent run, or resume it."""
        from mlflow import MlflowClient

        client = self._client = MlflowClient()
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", _PROJECT)
        found = client.get_experiment_by_name(name)
        self._experiment = found.experiment_id if found is not None else client.create_experiment(name)
        if known_as:
            self._parent = known_as
            client.update_run(self._parent, status="RUNNING")
        else:
            run = client.create_run(self._experiment, run_name=search.name, tags=dict(search.about))
            self._parent = run.info.run_id
        return self._parent

    def trial(self, entry: Entry) -> None:
        """Write a child run, and the figures as points of the parent's curves."""
        self._child(entry)
        self._batch(self._parent, entry, only_metrics=True)

    def answer(self, entry: Entry) -> None:
        """Write a child run of its own, and the verdict to the parent."""
        self._child(entry)
        self._client.set_tag(self._parent, "verdict", entry.tags["status"])
        self._client.set_tag(self._parent, "best", entry.tags["changes"])

    def close(self) -> None:
        """End the parent run."""
        self._client.set_terminated(self._parent)

    def _child(self, entry: Entry) -> None:
        tags = {"mlflow.parentRunId": self._parent, **entry.tags}
        run = self._client.create_run(self._experiment, run_name=entry.name, tags=tags)
        self._batch(run.info.run_id, entry)
        self._client.set_terminated(run.info.run_id, "FINISHED" if entry.completed else "FAILED")

    def _batch(self, run: str, entry: Entry, *, only_metrics: bool = False) -> None:
        from mlflow.entities import Metric, Param

        now = int(time.time() * 1000)
        metrics = [Metric(name, value, now, entry.step) for name, value in entry.metrics.items()]
        params = [] if only_metrics else [Param(name, str(value)) for name, value in entry.params.items()]
        self._client.log_batch(run, metrics=metrics, params=params)


TRACKERS: dict[str, Callable[[], Tracker]] = {"tensorboard": TensorBoard, "wandb": WandB, "mlflow": MLflow}


def check(names: tuple[str, ...]) -> None:
    """Refuse trackers that can't be written to, before the search begins.

    Raises:
        InputError: There is no tracker of that name, or it isn't logged in.
        MachineError: Its library isn't installed.
    """
    for name in names:
        if name not in TRACKERS:
            raise InputError(f"--report-to {name}: expected {', '.join(TRACKERS)}{suggestion(name, TRACKERS)}")
        if not _is_installed(name):
            raise MachineError(
                f'--report-to {name}: the package {name} is not installed; pip install "autotune-train[{name}]"'
            )
        if name == "wandb" and not _may_log():
            raise InputError("--report-to wandb: not logged in: run `wandb login`, or set WANDB_MODE=offline")


def _is_installed(package: str) -> bool:
    """Return whether there is a package of that name; a mere folder, such as wandb leaves where it ran, is none."""
    found = importlib.util.find_spec(package)
    return found is not None and found.origin is not None


def _may_log() -> bool:
    """Return whether wandb has a key, or needs none; otherwise it would wait for one in the middle of a search."""
    if os.environ.get("WANDB_MODE", "online") != "online":
        return True
    import wandb

    return bool(wandb.api.api_key)


def _listed(lines: dict[str, Any]) -> str:
    return "\n".join(f"- {name}: {value}" for name, value in lines.items())
