"""Writes each trial as it ends, and the answer, to TensorBoard, Weights & Biases or MLflow: `--report-to`.

The library's own settings (`WANDB_MODE`, `MLFLOW_TRACKING_URI` ...) decide where runs go and how long it waits for a
server. A tracker that fails gets no further trials: a note says so, and the search goes on. A written run leaves
an empty file `trackers/TRACKER/RUN` in the run directory, so that a resumed search writes what was missed, once.
"""

import contextlib
import importlib.util
import math
import os
import statistics
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple, Self

from autotune.errors import InputError, MachineError, one_line, resuming, suggestion
from autotune.planning.plan import SearchPlan
from autotune.space.knobs import changes, make_point, shown_changes
from autotune.storage.run_directory import RunDirectory
from autotune.units import GIB
from autotune.values.config import TrainConfig
from autotune.values.problem import Event, Note, Observer, TrialEnded
from autotune.values.result import ResultData
from autotune.values.trial import Failure, Measurement, TrialResult

# The longest text that is written. MLflow refuses 6,000 characters (MAX_PARAM_VAL_LENGTH), older servers 500.
_LONGEST_TEXT = 500

# Settings of the libraries where the user has none: a server that doesn't answer holds a search up for a minute or two,
# once. By default MLflow tries for a quarter of an hour, wandb without end.
_PATIENCE = {
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "20",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2",
    "WANDB_INIT_TIMEOUT": "60",
    "WANDB_FINISH_TIMEOUT": "60",
    "WANDB_FINISH_TIMEOUT_RAISES": "true",
}


class Run(NamedTuple):
    """One run of a tracker: a trial, or the answer; `step` is the number of the trial, or of all trials."""

    name: str
    step: int
    config: Mapping[str, bool | int | float | str]
    metrics: Mapping[str, float]

    @classmethod
    def of(cls, plan: SearchPlan, result: TrialResult) -> Self:
        request, outcome, prediction = result.request, result.outcome, result.request.prediction
        config = _config(plan, request.config, str(request.purpose), str(result.status))
        metrics = {"duration_s": result.duration_s}
        if isinstance(outcome, Failure):
            config["cause"] = outcome.cause[:_LONGEST_TEXT]
            if outcome.memory is not None and outcome.memory.is_known:
                metrics["peak_memory_gib"] = outcome.memory.peak_bytes / GIB
        if prediction is not None:
            metrics["predicted_samples_per_second"] = prediction.samples_per_second
            metrics["predicted_peak_memory_gib"] = prediction.peak_bytes / GIB
        measured = result.measurement
        mfu = prediction.mfu_at(measured.samples_per_second) if prediction and measured else None
        return cls(f"trial-{request.number:04d}", request.number, config, metrics | _figures(plan, measured, mfu))


def tensorboard(run: Run, search: Path) -> None:
    """Write a run to `tensorboard/` in the run directory; the tab HPARAMS compares the runs."""
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(str(search / "tensorboard" / run.name)) as writer:
        writer.add_hparams(dict(run.config), dict(run.metrics), run_name=".", global_step=run.step)


def wandb(run: Run, search: Path) -> None:
    import wandb

    project, kind = os.environ.get("WANDB_PROJECT", "autotune"), str(run.config["purpose"])
    settings = {"project": project, "group": search.name, "job_type": kind, "name": run.name, "dir": str(search)}
    with wandb.init(**settings, config=dict(run.config), reinit="create_new") as made:  # beside a run of the user's own
        made.log(dict(run.metrics), step=run.step)


def mlflow(run: Run, search: Path) -> None:
    import mlflow

    # The user's own experiment and run stay the active ones of this process.
    name = os.environ.get("MLFLOW_EXPERIMENT_NAME", "autotune")
    found = mlflow.get_experiment_by_name(name)
    experiment_id = mlflow.create_experiment(name) if found is None else found.experiment_id
    with mlflow.start_run(run_name=run.name, experiment_id=experiment_id, nested=True):
        mlflow.log_params(dict(run.config))
        mlflow.log_metrics(dict(run.metrics), step=run.step)


TRACKERS: dict[str, Callable[[Run, Path], None]] = {"tensorboard": tensorboard, "wandb": wandb, "mlflow": mlflow}


def check(names: tuple[str, ...]) -> None:
    """Refuse trackers before the search begins that don't exist, aren't logged in (InputError) or installed."""
    for name in names:
        if name not in TRACKERS:
            raise InputError(f"--report-to {name}: expected {', '.join(TRACKERS)}{suggestion(name, TRACKERS)}")
        found = importlib.util.find_spec(name)
        if found is None or found.origin is None:  # a mere folder, such as wandb leaves where it ran
            raise MachineError(f"--report-to {name}: the package {name} is not installed; pip install {name}")
        if name == "wandb" and os.environ.get("WANDB_MODE", "online") == "online":
            import wandb

            if not wandb.api.api_key:
                raise InputError("--report-to wandb: not logged in: run `wandb login`, or set WANDB_MODE=offline")


class Tracking:
    """Writes a search to the trackers of its plan; the observer gets every event, and a note for each that fails."""

    def __init__(self, plan: SearchPlan, directory: RunDirectory, observer: Observer) -> None:
        self._plan, self._directory, self._observer, self._names = plan, directory, observer, list(plan.report_to)
        if self._names:
            for result in directory.results():
                self._write(Run.of(plan, result))

    def __call__(self, event: Event) -> None:
        self._observer(event)
        if isinstance(event, TrialEnded):
            self._write(Run.of(self._plan, event.result))

    def end(self, answer: ResultData) -> None:
        self._write(answer_of(self._plan, answer))

    def _write(self, run: Run) -> None:
        search = self._directory.path.absolute()
        for name in tuple(self._names):
            written = search / "trackers" / name / run.name
            if written.exists():
                continue
            unset = _PATIENCE.keys() - os.environ.keys()
            os.environ.update({name: _PATIENCE[name] for name in unset})
            try:
                with contextlib.redirect_stdout(sys.stderr):  # stdout is the answer's
                    TRACKERS[name](run._replace(config={"search": search.name, **run.config}), search)
            except (Exception, SystemExit) as error:  # whatever a library raises
                self._names.remove(name)
                later = f"the search goes on without it, and {resuming(search)} tells it what it missed"
                self._observer(Note(text=f"{name}: {type(error).__name__}: {one_line(error)}; {later}"))
                continue
            finally:  # runs of the user's own, later in this process, wait as long as before
                for variable in unset:
                    os.environ.pop(variable, None)
            with contextlib.suppress(OSError):  # a full disk, of which the search will say more
                written.parent.mkdir(parents=True, exist_ok=True)
                written.touch()


def answer_of(plan: SearchPlan, result: ResultData) -> Run:
    """Return the run of the answer, which is another one after more trials."""
    metrics = {"search_time_s": result.search_time_s, **_figures(plan, result.best.measurement, result.best.mfu)}
    baseline = _figures(plan, result.baseline.measurement, result.baseline.mfu)
    metrics |= {f"baseline_{name}": value for name, value in baseline.items()}
    if result.speedup is not None:
        metrics["speedup"] = result.speedup.ratio
    step = sum(trial.number is not None for trial in result.trials)
    return Run(f"answer-{step:04d}", step, _config(plan, result.best.config, "answer", result.verdict), metrics)


def _config(plan: SearchPlan, config: TrainConfig, purpose: str, status: str) -> dict[str, bool | int | float | str]:
    is_single = config.parallelism.is_single
    knobs = {n: v for n, v in make_point(config).items() if not (is_single and n.startswith("parallelism."))}
    return {
        **{name: "none" if value is None else value for name, value in knobs.items()},
        "purpose": purpose,
        "status": status,
        "changes": shown_changes(changes(config, plan))[:_LONGEST_TEXT],
        "config_id": config.config_id,
        "model": plan.workload.model.name,
        "task": str(plan.workload.task),
        "global_batch_size": str(plan.workload.global_batch_size or "any"),
        "device": plan.hardware.name,
        "memory_budget_gib": round(plan.memory_bytes / GIB, 2),
        "allow": str(plan.allowance),
        "effort": str(plan.budget.effort),
    }


def _figures(plan: SearchPlan, measured: Measurement | None, mfu: float | None) -> dict[str, float]:
    if measured is None:
        return {}
    tokens = plan.workload.tokens_per_sample
    names = ("samples_per_second", "first_step_s", "startup_s", "data_wait_share", "loss")
    figures = {
        "step_time_s": statistics.fmean(measured.step_times_s),
        "tokens_per_second": measured.samples_per_second * tokens if tokens else None,
        "mfu": mfu,
        **{name: getattr(measured, name) for name in names},
    }
    if measured.memory.is_known:
        figures["peak_memory_gib"] = measured.memory.peak_bytes / GIB
    return {name: value for name, value in figures.items() if value is not None and math.isfinite(value)}
