"""`autotune compare RUN_DIR --python PYTHON`: measures the winner of a search in two environments of Python, in turn.

Each has a process that runs its trials (see `execution.launch`), and both have this version of autotune, which writes
their requests and reads their results. The latest comparison is in `compare-other` and `compare-this` of the directory.
"""

import contextlib
import json
import shutil
import statistics
import subprocess
import sys
from pathlib import Path

from autotune.errors import InputError, MachineError, one_line
from autotune.search.run import backend_of
from autotune.storage import trust
from autotune.storage.run_directory import RunDirectory, read_plan
from autotune.units import show_rate
from autotune.values.hardware import installed_versions
from autotune.values.problem import Note, Observer, ignore
from autotune.values.result import Compared, Comparison, ResultData, differing_versions
from autotune.values.statistics import Speedup
from autotune.values.trial import Failure, Measurement, Purpose
from autotune.version import __version__

_ROUNDS = 3

_ASK = """import json; from autotune.values import hardware; from autotune.version import __version__
print(json.dumps([__version__, hardware.installed_versions()]))"""


def compare_environments(
    run_dir: str | Path, python: str, *, trust_run_dir: bool = False, observer: Observer = ignore
) -> tuple[ResultData, Comparison]:
    """Return the answer of `run_dir` and how fast its winner trains here, over the environment of `python`.

    Raises:
        InputError: There is no answer, or `python` can't run this version of autotune.
        MachineError: It ran on another machine, or a trial failed; the message says in which environment, and how.
    """
    directory, python = RunDirectory.existing(Path(run_dir)), str(Path(shutil.which(python) or python).absolute())
    with directory, contextlib.ExitStack() as running:
        plan, result, theirs = read_plan(directory.path), directory.answer_to("compare"), versions_of(python)
        if plan.fleet.engine == "ray":
            raise InputError(f"--python {python}: a trial on a cluster runs in the environment of its machines")
        trust.check(directory.path, plan, trusted=trust_run_dir, delivers=False)
        plan.changed_packages()  # MachineError: it is another machine
        config, names = result.best.config, (python, "this environment")
        samples, sides = plan.workload.samples_per_step(config), []
        for name, program in (("compare-other", python), ("compare-this", sys.executable)):
            shutil.rmtree(directory.path / name, ignore_errors=True)
            path = directory.inside(name).path
            sides.append(running.enter_context(backend_of(plan.fleet, path, planned=plan.hardware, python=program)))
        seen: tuple[list[Measurement], list[Measurement]] = ([], [])
        for number in range(_ROUNDS):
            for side in (0, 1) if number % 2 == 0 else (1, 0):
                asked = plan.request_of(config, Purpose.FINAL, number=number, timeout_s=plan.budget.trial_timeout_s)
                outcome = sides[side].pool.run(asked).outcome
                if isinstance(outcome, Failure):
                    raise MachineError(f"{names[side]}: the winner didn't train: {outcome.status}: {outcome.cause}")
                seen[side].append(outcome)
                rate = show_rate(outcome.samples_per_second)
                observer(Note(text=f"round {number + 1} of {_ROUNDS}: {names[side]}: {rate} samples/s"))
    times = [[trial.step_times_s for trial in side] for side in seen]
    rates = [samples / statistics.fmean(step for trial in side for step in trial) for side in times]
    peaks = [max(trial.memory.peak_bytes for trial in side) for side in seen]
    measured = Compared(
        config=config,
        samples_per_second=(rates[0], rates[1]),
        peak_bytes=(peaks[0], peaks[1]),
        **dict(Speedup.of_means(times[0], times[1])),
        more_s={},
    )
    changed = differing_versions(theirs, installed_versions())
    return result, Comparison(names=names, compared=(measured,), changed=changed)


def versions_of(python: str) -> dict[str, str]:
    """Return the versions of the packages in the environment of `python`; InputError: it lacks this autotune."""
    try:
        done = subprocess.run([python, "-P", "-c", _ASK], capture_output=True, text=True, timeout=300, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise InputError(f"--python {python}: can't be run: {one_line(error)}") from None
    if done.returncode:
        said = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise InputError(f"--python {python}: autotune can't be imported there: {said}; install {__version__} of it")
    theirs, versions = json.loads(done.stdout)
    if theirs != __version__:
        raise InputError(f"--python {python}: has autotune {theirs}; install {__version__} there, as it is here")
    return dict(versions)
