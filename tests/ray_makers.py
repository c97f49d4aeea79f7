"""Runs trials on the nodes of a test's Ray cluster: makers (`module:function`) for `autotune.execution.ray_pool`."""

import contextlib
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import benches
import misbehaving_ranks
import psutil
from factories import make_measurement, make_result, separable_rate

from autotune.errors import InfrastructureError
from autotune.execution import launch
from autotune.execution.runner import LocalRunner, Runner
from autotune.values.hardware import detect
from autotune.values.trial import TrialRequest, TrialResult

# Where trials leave word of themselves for the test, by the workload's arguments.
NOTES = "notes"


def is_of_a_trial(process: psutil.Process) -> bool:
    """Whether it trains: a child of a launcher that Ray's processes have started."""
    with contextlib.suppress(psutil.Error):
        parent = process.parent()
        above = parent.parent() if parent is not None else None
        return above is not None and above.name().startswith("ray::")
    return False


def nodes_of_trials() -> list[str]:
    """Return the ids of the nodes that are reserved for trials, those of each trial in the order of their ranks."""
    from ray.util import placement_group_table

    groups = [group for group in placement_group_table().values() if group["state"] == "CREATED"]
    return [group["bundles_to_node_id"][rank] for group in groups for rank in sorted(group["bundles_to_node_id"])]


def behaving(directory: Path, device: str) -> Runner:
    """Real trials, or misbehaving ones."""
    return LocalRunner(directory, detect(device), entry="misbehaving:behave")


def _with_a_rank_that(what: str) -> Callable[[Path, str], Runner]:
    """Real trials, of which rank 1 does what the function `what` of `misbehaving_ranks` does."""

    def make(directory: Path, device: str) -> Runner:
        misbehaving_ranks.plan(directory, 1, what)
        return LocalRunner(directory, detect(device), entry="misbehaving_ranks:behave")

    return make


rank_1_has_less_memory = _with_a_rank_that("have_less_memory")
rank_1_is_killed = _with_a_rank_that("be_killed")
rank_1_raises_an_error = _with_a_rank_that("raise_an_error")
rank_1_sleeps = _with_a_rank_that("sleep")
rank_1_pauses_in_the_first_step = _with_a_rank_that("pause_in_the_first_step")
rank_1_pauses_in_a_measured_step = _with_a_rank_that("pause_in_a_measured_step")
rank_1_pauses_in_saving = _with_a_rank_that("pause_in_saving")


def light(directory: Path, device: str) -> Runner:
    """Misbehaving trials that train nothing."""
    launch.launch_command = benches.light_command
    return Noting(directory, detect(device), entry="misbehaving:behave")


class Noting(LocalRunner):
    """Writes down the worker that runs a trial."""

    def run(self, request: TrialRequest) -> TrialResult:
        if (notes := request.workload.fixed_arguments.get(NOTES)) is not None:
            (Path(notes) / f"worker-{request.number}").write_text(str(os.getpid()))
        return super().run(request)


class Scripted(Runner):
    """Trials that sleep a little and measure what their configuration says."""

    def run(self, request: TrialRequest) -> TrialResult:
        seconds = 0.2 + int(request.config.config_id[:2], 16) / 1000
        time.sleep(seconds)
        result = make_result(request.config, make_measurement(separable_rate(request)), duration_s=seconds)
        return result.model_copy(update={"request": request})


def scripted(directory: Path, device: str) -> Runner:
    return Scripted()


class Dying(Runner):
    """Kills its worker; with a folder for notes only the first time that a trial runs."""

    def run(self, request: TrialRequest) -> TrialResult:
        if (notes := request.workload.fixed_arguments.get(NOTES)) is not None:
            died = Path(notes) / f"died-{request.number}"
            if died.exists():
                return Scripted().run(request)
            died.touch()
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError("unreachable")

    def ask(self, name: str, entry: str, request: TrialRequest, **limits: object) -> TrialResult:
        return self.run(request)


def dying(directory: Path, device: str) -> Runner:
    return Dying()


def broken(directory: Path, device: str) -> Runner:
    raise InfrastructureError("no trial can be run here")
