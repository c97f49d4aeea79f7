"""Searches in processes of their own that faults happen to, cheap enough for thousands: trials come out of a table.

Everything but the launcher is real: `find` and `resume`, the run directory, the runner with all that it writes, the
sampler, the record. What the launcher's children would answer about the model is computed once and kept in a folder.
"""

import functools
import json
import multiprocessing
import os
import pkgutil
import random
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import transformers.models.auto.modeling_auto  # which `find` looks into, and takes seconds
import transformers.models.llama.configuration_llama  # noqa: F401
from running import process
from searching.tables import TableTrial, load_table

from autotune import api
from autotune.errors import AutotuneError
from autotune.execution.job import Job
from autotune.execution.launch import MARK_FILE
from autotune.execution.outcome import Ending, outcome_file
from autotune.execution.places import Place
from autotune.storage.record import Record
from autotune.storage.recorded import RecordedSearch
from autotune.value import read_value, write_value
from autotune.values.budget import LossCurve, LossTask, Soaked, SoakTask
from autotune.values.hardware import Hardware
from autotune.values.trial import Outcome, TrialRequest

TABLES = Path(__file__).parents[2] / "benchmarks" / "tables"
MODEL = TABLES / "models" / "llama-1m"
LAUNCHES = "launches.jsonl"  # in a run directory: each trial that was begun

# A search of the table's own problem: some of its 210 points run out of memory.
LIMITS: dict[str, Any] = {"device": "cpu", "effort": "quick", "max_time": "1h", "max_trials": 25}
FIND: dict[str, Any] = {
    **LIMITS, "model": str(MODEL), "seq_len": 32, "global_batch": 16, "memory": "50MiB",
    "space": str(TABLES / "space.yaml"),
}  # fmt: skip

# The longest that a trial takes, and that a whole search may.
LONGEST_S, LIMIT_S = 0.03, 180.0

Fault = Callable[[], Any]


class Search(NamedTuple):
    """A search, and where it is kept."""

    run: Path
    home: Path
    answers: Path  # what the launcher's children said of the model
    options: dict[str, Any] = FIND
    server: str = ""  # URL of the lasting record; empty: it is a file

    @property
    def record(self) -> Path:
        return self.home / "record.journal"

    def recorded(self) -> list[RecordedSearch]:
        return Record(self.server or self.record).searches()


@functools.cache
def _trials() -> dict[str, tuple[TableTrial, ...]]:
    return {point.config.config_id: point.trials for point in load_table(TABLES / "llama-1m.jsonl").points}


def answer(request: TrialRequest) -> Outcome:
    """Return what was recorded of a configuration; of one that wasn't, what was recorded of some other."""
    recorded, name = _trials(), request.config.config_id
    trials = recorded.get(name) or list(recorded.values())[int(name, 16) % len(recorded)]
    outcome = trials[request.number % len(trials)].outcome
    if outcome.kind == "measurement" and isinstance(request.task, SoakTask):
        return outcome.model_copy(update={"soaked": Soaked(eval_batch_size=8, checkpoint_bytes=1 << 20)})
    if outcome.kind == "measurement" and isinstance(request.task, LossTask):
        losses = tuple(8.0 / (1 + step) for step in range(request.task.steps))
        return outcome.model_copy(update={"curve": LossCurve(losses=losses, dropout_spread=None)})
    return outcome


class ReplayLauncher:
    """Stands in for `autotune.execution.launch.Launcher`: a job's outcome is written as its process would."""

    def __init__(self, run_directory: Path, devices: Any, **_: Any) -> None:
        (run_directory / MARK_FILE).write_text(json.dumps({"mark": "replayed"}))
        self._launches = run_directory / LAUNCHES
        self._jobs: list[Job] = []

    def wait(self, limit_s: float = 0.0) -> None:
        """It is ready at once."""

    def end(self) -> None:
        """Nothing runs under it."""

    def send(self, job: Job) -> None:
        self._jobs.append(job)

    def has_died(self) -> bool:
        return False

    def reply(self, timeout_s: float) -> tuple[int, Ending]:
        job = self._jobs.pop(0)
        for directory in job.directories:
            if job.entry.endswith(":run_trial"):
                self._trial(directory)
            else:
                _asked(job.entry, directory)
        return job.place, Ending(returncodes=[0 for _ in job.directories])

    def _trial(self, directory: Path) -> None:
        request = read_value(TrialRequest, directory / "request.json")
        line = json.dumps([request.number, str(request.purpose), request.config.config_id]) + "\n"
        with self._launches.open("a") as file:
            file.write(line)
        time.sleep(random.uniform(0.0, LONGEST_S))
        write_value(answer(request), directory / outcome_file())


_answers: Path  # of the search that this process runs


def _asked(entry: str, directory: Path) -> None:
    """Answer as an earlier child did, or as a child would."""
    kept = _answers / entry.partition(":")[2]
    if not kept.is_dir():
        pkgutil.resolve_name(entry)(directory)
        part = kept.with_suffix(f".{os.getpid()}")
        shutil.copytree(directory, part, ignore=shutil.ignore_patterns("request.json"))
        part.rename(kept)
    for path in sorted(kept.rglob("*")):  # what fails here is raised as it is, with its number
        target = directory / path.relative_to(kept)
        if path.is_dir():
            target.mkdir(exist_ok=True)
        else:
            shutil.copyfile(path, target)


def places(hardware: Hardware, count: int, *, each: int = 1) -> tuple[Place, ...]:
    """Return as many places as a machine with so many GPUs has."""
    return tuple(Place(shown=f"place {number}", devices=("cpu",)) for number in range(count))


def run(search: Search, fault: Fault | None = None) -> None:
    """Begin a search, or go on with it, in this process, and leave it with the exit code of the command line."""
    global _answers
    _answers = search.answers
    random.seed()
    os.environ.update({"AUTOTUNE_HOME": str(search.home), "AUTOTUNE_RECORD": search.server})
    with (search.home.parent / "said.txt").open("a", buffering=1) as said:
        os.dup2(said.fileno(), 1)
        os.dup2(said.fileno(), 2)
        try:
            with (
                patch("autotune.execution.runner.Launcher", ReplayLauncher),
                patch("autotune.search.run.places_of", places),
                patch("os.fsync", lambda _: None),
            ):
                if fault is not None:
                    fault()
                if (search.run / "search.json").exists():
                    api.resume(search.run, observer=lambda event: print(event, file=said))
                else:
                    api.find(**search.options, run_dir=search.run, observer=lambda event: print(event, file=said))
        except AutotuneError as error:
            print(f"autotune: {error}", file=said)
            sys.exit(error.exit_code)


def server() -> Any:
    """Return what starts processes that have everything imported."""
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    os.environ["PYTHONPATH"] = process()["env"]["PYTHONPATH"]
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["faults.replaying"])
    return context


def finish(server: Any, search: Search, fault: Fault | None = None) -> int:
    """Go on with a search to its end, and return its exit code."""
    begun = server.Process(target=run, args=(search, fault))
    begun.start()
    begun.join(LIMIT_S)
    assert begun.exitcode is not None, "it hangs"
    return begun.exitcode


def said(search: Search) -> str:
    """Return what a search said, without its trials."""
    lines = (search.home.parent / "said.txt").read_text().splitlines()
    return "\n".join(line for line in lines if not line.startswith(("result=", "request=")))
