"""`autotune compare RUN_DIR --python PYTHON`: the winner of a search in two environments, in turn."""

import contextlib
import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from answers import drawn
from factories import OUT_OF_MEMORY, ScriptedRunner, make_hardware, make_measurement
from finished_searches import BEST, make_search
from search_events import Heard

from autotune.errors import InputError, MachineError
from autotune.output.compare import comparison_table
from autotune.search import environments
from autotune.storage.run_directory import RunDirectory
from autotune.values import hardware as machine
from autotune.values.hardware import installed_versions
from autotune.values.trial import Memory
from autotune.version import __version__


def python(directory: Path, answer: str) -> str:
    """A Python that answers every question alike."""
    path = directory / "python"
    path.write_text(f"#!/bin/sh\n{answer}\n")
    path.chmod(0o755)
    return str(path)


def other_torch(directory: Path) -> str:
    versions = {**installed_versions(), "torch": "2.99.0"}
    return python(directory, f"echo '{json.dumps([__version__, versions])}'")


@pytest.fixture
def compared(tmp_path, monkeypatch):
    """Compares a finished search with an environment that gives `theirs`, where this one gives 100 samples/s."""

    def run(theirs):
        make_search(tmp_path / "run")
        other, ran = other_torch(tmp_path), []

        @contextlib.contextmanager
        def backend(fleet, path, *, planned, python):
            def told(request):
                ran.append((request.config, python == other))
                return theirs if python == other else make_measurement(100.0, memory=Memory(resident_bytes=2 << 30))

            yield SimpleNamespace(pool=ScriptedRunner(path, told))

        monkeypatch.setattr(environments, "backend_of", backend)
        monkeypatch.setattr(machine, "detect", lambda device: make_hardware())
        return *environments.compare_environments(tmp_path / "run", other, observer=(heard := Heard())), ran, heard

    return run


def test_the_winner_runs_in_both_by_turns_and_what_differs_is_told(compared):
    theirs = make_measurement(50.0, memory=Memory(resident_bytes=3 << 30))
    result, found, ran, heard = compared(theirs)
    assert ran == [(BEST, is_other) for is_other in (True, False, False, True, True, False)]
    assert len(heard.notes) == 6
    (one,) = found.compared
    assert one.samples_per_second == pytest.approx((50.0, 100.0))
    assert one.ratio == pytest.approx(2.0)
    assert one.peak_bytes == (3 << 30, 2 << 30)
    assert one.interval.low > 1.5
    assert found.changed == {"torch": ("2.99.0", installed_versions()["torch"])}
    said = drawn(comparison_table(result, found), 200)
    assert "this environment is faster: 2.00 (" in said
    assert "x, 100 for 50 samples/s, peak memory 2.00 GiB for 3.00 GiB: micro-batch 16" in said


def test_a_winner_that_fails_in_one_of_them_says_where_and_why(compared):
    with pytest.raises(MachineError, match=rf"/python: the winner didn't train: {OUT_OF_MEMORY.status}: "):
        compared(OUT_OF_MEMORY)


def test_a_search_of_another_machine_is_refused(tmp_path, monkeypatch):
    make_search(tmp_path / "run")
    monkeypatch.setattr(machine, "detect", lambda device: make_hardware(name="another"))
    with pytest.raises(MachineError, match="go on where it ran"):
        environments.compare_environments(tmp_path / "run", other_torch(tmp_path))


def test_its_trials_leave_those_of_the_search_alone(compared, tmp_path):
    compared(make_measurement(50.0))
    trials = RunDirectory(tmp_path / "run").results()
    compared(make_measurement(50.0))
    assert RunDirectory(tmp_path / "run").results() == trials
    assert len(RunDirectory(tmp_path / "run" / "compare-other").results()) == 3


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        ("echo 'No module named autotune' >&2; exit 1", "can't be imported there: No module named autotune; install"),
        (f"echo '{json.dumps(['0.0.1', {}])}'", f"has autotune 0.0.1; install {__version__} there"),
    ],
)
def test_an_environment_without_this_autotune_is_refused(tmp_path, answer, said):
    with pytest.raises(InputError, match=said):
        environments.versions_of(python(tmp_path, answer))


def test_a_python_that_is_none_is_refused_and_this_one_is_not(tmp_path):
    with pytest.raises(InputError, match=r"can't be run: .*No such file"):
        environments.versions_of(str(tmp_path / "none"))
    assert environments.versions_of(sys.executable) == installed_versions()
