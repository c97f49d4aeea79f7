"""TensorBoard, Weights & Biases and MLflow, each through its own library: what a search tells them, and where it goes.

Each is imported when it is first used, in the process of the search; trials know nothing of it. Where runs go is the
matter of the library's own settings (`WANDB_MODE`, `WANDB_PROJECT`, `MLFLOW_TRACKING_URI`, `MLFLOW_EXPERIMENT_NAME`).
Called by `tracking`.
"""

from __future__ import annotations

import importlib.util
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from autotune.errors import InputError, MachineError, suggestion
from autotune.integrations.tracker_entries import Entry
from autotune.value import Value

_PROJECT = "autotune"


class Search(Value):
    """What a tracker knows of the search as a whole."""

    id: str
    name: str
    about: dict[str, str]
    directory: str


class Tracker(Protocol):
    """Somewhere that a search is told to; whatever a method raises, the search goes on."""

    def open(self, search: Search, known_as: str) -> str:
        """Begin, or go on as what an earlier run of this search began; return how the tracker knows the search."""
        ...

    def trial(self, entry: Entry) -> None:
        """Tell of a trial."""
        ...

    def answer(self, entry: Entry) -> None:
        """Tell of the answer; a search that goes on may do so again."""
        ...

    def close(self) -> None:
        """End."""
        ...


class TensorBoard:
    """A run for each trial in the search's folder `tensorboard`, for the tab HPARAMS, and curves over the trials."""

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
        """Write what the tab of hyperparameters shows, which wants its figures under names that no curve has."""
        figures = {f"hparam/{name}": value for name, value in entry.metrics.items()}
        self._writer.add_hparams({**entry.params, **entry.tags}, figures, run_name=entry.name, global_step=entry.step)


class WandB:
    """A run for each trial, all of one group, begun when the trial has ended: none is open beside a trial."""

    def __init__(self) -> None:
        self._search: Search | None = None

    def open(self, search: Search, known_as: str) -> str:
        """Note the group."""
        self._search = search
        return search.id

    def trial(self, entry: Entry) -> None:
        """Write a run."""
        self._run(entry)

    def answer(self, entry: Entry) -> None:
        """Write a run of its own."""
        self._run(entry)

    def close(self) -> None:
        """End the library's process."""
        import wandb

        wandb.teardown()

    def _run(self, entry: Entry) -> None:
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


class MLflow:
    """A parent run for the search, and a child of it for each trial and for the answer."""

    def __init__(self) -> None:
        self._client: Any = None
        self._experiment = self._parent = ""

    def open(self, search: Search, known_as: str) -> str:
        """Begin the parent run, or go on with it."""
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
        """Write a child run; the parent has the figures as curves over the trials."""
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
    """Refuse trackers that can't be told anything, in second 0 and not after the first trial.

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
    """Whether there is a package of that name; a mere folder, as wandb leaves where it ran, is none."""
    found = importlib.util.find_spec(package)
    return found is not None and found.origin is not None


def _may_log() -> bool:
    """Whether wandb has a key, or needs none; asked for one in a search, it would wait for an answer."""
    if os.environ.get("WANDB_MODE", "online") != "online":
        return True
    import wandb

    return bool(wandb.api.api_key)


def _listed(lines: dict[str, Any]) -> str:
    return "\n".join(f"- {name}: {value}" for name, value in lines.items())
