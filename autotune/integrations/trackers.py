"""Writes each trial as it ends, and the answer, to trackers by `accelerate.tracking`: `--report-to`.

::

    Tracking  --- a line of JSON for each run --->  main  ---> the tracker's library
              <-- a line: empty, or what failed --

Each tracker has a process of its own. What its library prints, asks or leaves behind stays out of the search's, and so
does the state that accelerate needs, which would decide the device of a training that follows there. A tracker that
fails, or doesn't answer in time, gets no further trials: a note says so, and the search goes on. A run that was written
leaves an empty file `trackers/TRACKER/RUN` in the run directory, so that a resumed search writes what was missed, and
nothing twice. Where runs go is decided by the library's own settings (`WANDB_MODE`, `MLFLOW_TRACKING_URI` ...).
"""

from __future__ import annotations

import contextlib
import importlib.util
import math
import os
import select
import statistics
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Self

from pydantic import Field, NonNegativeInt

from autotune.errors import InputError, MachineError, one_line, suggestion
from autotune.execution.environment import launcher_environment
from autotune.planning.plan import SearchPlan
from autotune.space.knobs import changes, shown_changes
from autotune.space.points import make_point
from autotune.storage.run_directory import RunDirectory
from autotune.units import GIB
from autotune.value import Value
from autotune.values.config import TrainConfig
from autotune.values.events import Event, Note, Observer, TrialEnded
from autotune.values.problem import Change
from autotune.values.result import ResultData
from autotune.values.trial import Failure, Measurement, Outcome, TrialResult

# The packages, by the names that accelerate has for them.
TRACKERS = ("aim", "clearml", "comet_ml", "dvclive", "mlflow", "swanlab", "tensorboard", "trackio", "wandb")

# Time limit of a run; the first has its library imported.
LIMIT_S = 60.0

# Where a library sorts runs into projects.
_PROJECT = "autotune"

# The longest text that is written. MLflow refuses 6,000 characters (MAX_PARAM_VAL_LENGTH), older servers 500.
_LONGEST_TEXT = 500


class Run(Value):
    """One run of a tracker: a trial, or the answer."""

    name: str
    step: NonNegativeInt = Field(description="number of the trial; of the answer the number of trials")
    config: dict[str, bool | int | float | str]
    metrics: dict[str, float]


def check(names: tuple[str, ...]) -> None:
    """Refuse trackers that can't be written to, before the search begins.

    Raises:
        InputError: There is no tracker of that name, or it isn't logged in.
        MachineError: Its library isn't installed.
    """
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
    """Writes one search to the trackers that its plan names; the observer hears every event, and of what fails here."""

    def __init__(self, plan: SearchPlan, directory: RunDirectory, observer: Observer) -> None:
        self._plan = plan
        self._directory = directory
        self._observer = observer
        self._processes: dict[str, subprocess.Popen[bytes]] = {}

    def __enter__(self) -> Self:
        for name in self._plan.report_to:
            self._processes[name] = subprocess.Popen(
                command(name, self._directory.path.absolute()),
                bufsize=0,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env=launcher_environment("cpu", {}),
                start_new_session=True,  # Ctrl-C is the search's
            )
        for result in self._directory.results() if self._processes else ():
            self._write(run_of(self._plan, result))
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes.values():
            _end(process, LIMIT_S)

    def __call__(self, event: Event) -> None:
        """Pass an event on, and write a trial that has ended."""
        self._observer(event)
        if isinstance(event, TrialEnded):
            self._write(run_of(self._plan, event.result))

    def end(self, answer: ResultData) -> None:
        """Write the answer."""
        self._write(answer_of(self._plan, answer))

    def _write(self, run: Run) -> None:
        """Write a run to each tracker that doesn't have it; one that fails isn't told of any more."""
        for name, process in tuple(self._processes.items()):
            written = self._directory.path / "trackers" / name / run.name
            if written.exists():
                continue
            if failed := _failed(process, run):
                _end(self._processes.pop(name), 0.0)
                catch_up = f"`autotune resume {self._directory.path}` tells it what it missed"
                self._observer(Note(text=f"{name}: {failed}; the search goes on without it, and {catch_up}"))
                continue
            with contextlib.suppress(OSError):  # a full disk, of which the search will say more
                written.parent.mkdir(parents=True, exist_ok=True)
                written.touch()


def _failed(process: subprocess.Popen[bytes], run: Run) -> str:
    """Tell a tracker of a run and wait for its answer; return what went wrong."""
    assert process.stdin is not None
    assert process.stdout is not None
    with contextlib.suppress(BrokenPipeError):
        process.stdin.write(f"{run.model_dump_json()}\n".encode())
    is_there, _, _ = select.select([process.stdout], [], [], LIMIT_S)
    if not is_there:
        return f"no answer for {LIMIT_S:.0f} s"
    answer = process.stdout.readline().decode()
    return answer.strip() if answer else "its process ended"


def _end(process: subprocess.Popen[bytes], limit_s: float) -> None:
    """Let a tracker's process end, as it does when nothing more can come."""
    try:
        process.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()


def run_of(plan: SearchPlan, result: TrialResult) -> Run:
    """Return the run of a trial that has ended."""
    request, outcome, prediction = result.request, result.outcome, result.request.prediction
    config = _config(plan, request.config, str(request.purpose), str(result.status), changes(request.config, plan))
    if isinstance(outcome, Failure):
        config["cause"] = outcome.cause[:_LONGEST_TEXT]
    metrics = {"duration_s": result.duration_s, **_figures(outcome)}
    if prediction is not None:
        metrics["predicted_samples_per_second"] = prediction.samples_per_second
        metrics["predicted_peak_memory_gib"] = prediction.peak_bytes / GIB
    return Run(name=f"trial-{request.number:04d}", step=request.number, config=config, metrics=metrics)


def answer_of(plan: SearchPlan, result: ResultData) -> Run:
    """Return the run of the answer; after more trials it is another."""
    best, baseline = result.best, result.baseline.measurement
    metrics = {"search_time_s": result.search_time_s, **_figures(best.measurement)}
    if baseline is not None:
        metrics["baseline_samples_per_second"] = baseline.samples_per_second
    if result.speedup is not None:
        metrics["speedup"] = result.speedup.ratio
    step = sum(trial.number is not None for trial in result.trials)
    config = _config(plan, best.config, "answer", result.verdict, best.changes)
    return Run(name=f"answer-{step:04d}", step=step, config=config, metrics=metrics)


def _config(
    plan: SearchPlan, config: TrainConfig, purpose: str, status: str, changed: Iterable[Change]
) -> dict[str, bool | int | float | str]:
    """Return a configuration with what it was tried for, and with what all runs of the search have in common."""
    workload = plan.workload
    return {
        **params_of(config),
        "purpose": purpose,
        "status": status,
        "changes": shown_changes(changed)[:_LONGEST_TEXT],
        "config_id": config.config_id,
        "model": workload.model.name,
        "task": str(workload.task),
        "global_batch_size": str(workload.global_batch_size or "any"),
        "device": plan.hardware.name,
        "memory_budget_gib": round(plan.memory_bytes / GIB, 2),
        "allow": str(plan.allowance),
        "effort": str(plan.budget.effort),
    }


def params_of(config: TrainConfig) -> dict[str, bool | int | float | str]:
    """Return a configuration as parameters, nested ones as `name.field`; parallelism only for several devices."""
    point = make_point(config)
    shown = {n: v for n, v in point.items() if not (config.parallelism.is_single and n.startswith("parallelism."))}
    return {name: "none" if value is None else value for name, value in shown.items()}


def _figures(outcome: Outcome | None) -> dict[str, float]:
    """Return what was measured."""
    memory = outcome.memory if outcome is not None else None
    figures = {"peak_memory_gib": memory.peak_bytes / GIB if memory is not None and memory.is_known else None}
    if isinstance(outcome, Measurement):
        figures |= {
            "samples_per_second": outcome.samples_per_second,
            "tokens_per_second": outcome.tokens_per_second,
            "step_time_s": statistics.fmean(outcome.step_times_s),
            "first_step_s": outcome.first_step_s,
            "startup_s": outcome.startup_s,
            "data_wait_share": outcome.data_wait_share,
            "loss": outcome.loss,
        }
    return {name: value for name, value in figures.items() if value is not None and math.isfinite(value)}


def command(name: str, search: Path) -> list[str]:
    """Return the command line of a tracker's process."""
    return [sys.executable, "-P", "-m", "autotune.integrations.trackers", name, str(search)]


def main(name: str, search: Path) -> None:
    """Write the runs on stdin to a tracker, and answer each on stdout."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a library prints isn't an answer
    for line in sys.stdin:
        try:
            write(name, Run.model_validate_json(line), search)
            failed = ""
        except (Exception, SystemExit) as error:  # whatever a library raises
            failed = f"{type(error).__name__}: {one_line(error)}"
        print(failed, file=answers, flush=True)


def write(name: str, run: Run, search: Path) -> None:
    """Write a run of the search in a run directory to a tracker; what its library raises is raised."""
    from accelerate import PartialState
    from accelerate.tracking import LOGGER_TYPE_TO_CLASS

    PartialState(cpu=True)
    tracker = LOGGER_TYPE_TO_CLASS[name](**_arguments(name, run, search))
    tracker.start()
    config = {"search": search.name, **run.config}
    if name == "tensorboard":  # accelerate's own has no figures for the tab HPARAMS
        tracker.tracker.add_hparams(config, run.metrics, run_name=".", global_step=run.step)
    else:
        tracker.store_init_configuration(config)
        tracker.log(run.metrics, step=run.step)
    tracker.finish()


def _arguments(name: str, run: Run, search: Path) -> dict[str, Any]:
    """Return how a class of accelerate is told of a run; its `run_name` is the project for most."""
    match name:
        case "tensorboard":
            return {"run_name": run.name, "logging_dir": search / "tensorboard"}
        case "aim":
            return {"run_name": run.name, "logging_dir": search, "experiment": search.name}
        case "mlflow":
            return {"experiment_name": _PROJECT, "run_name": run.name}
        case "dvclive":
            return {"dir": str(search / "dvclive" / run.name)}
        case "clearml":
            return {"run_name": _PROJECT, "task_name": run.name, "reuse_last_task_id": False}
        case "comet_ml":
            from comet_ml import ExperimentConfig

            project = os.environ.get("COMET_PROJECT_NAME", _PROJECT)
            return {"run_name": project, "experiment_config": ExperimentConfig(name=run.name, tags=[search.name])}
    project = os.environ.get(f"{name.upper()}_PROJECT", _PROJECT)
    where = {"dir": str(search), "job_type": run.config["purpose"]} if name == "wandb" else {}
    return {"run_name": project, "name": run.name, "group": search.name, **where}


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
