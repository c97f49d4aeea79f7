"""The benchmark of a shared record: it counts what is missing or there twice, and runs where a search is killed."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from factories import make_plan, make_result

from autotune.storage.record import Record
from autotune.storage.run_directory import RunDirectory
from autotune.storage.sync import IDENTITY_FILE, catch_up
from autotune.value import write_value

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

import team_record  # noqa: E402


@pytest.fixture
def database(tmp_path) -> Record:
    return Record(f"sqlite:///{tmp_path / 'record.db'}")


@pytest.fixture
def run_dirs(tmp_path, database) -> list[Path]:
    """Two searches of three trials, all of them recorded."""
    for name in "ab":
        directory = RunDirectory.create(tmp_path / name)
        directory.write_plan(make_plan(record=True))
        for number in range(3):
            leave(directory.path, number)
        catch_up(database, directory.path)
    return [tmp_path / name for name in "ab"]


def leave(run_dir: Path, number: int) -> None:
    folder = run_dir / "trials" / f"{number:04d}"
    folder.mkdir(parents=True)
    write_value(make_result(number=number), folder / "result.json")


def test_all_there_once_is_all_there_once(database, run_dirs):
    found = team_record.compared(database, run_dirs)
    assert found == {
        "finished": 6, "recorded": 6, "missing": 0, "twice": 0, "without_a_file": 0, "searches": 2, "of_others": 0,
    }  # fmt: skip


def test_a_trial_that_is_a_file_and_no_row_is_missing(database, run_dirs):
    leave(run_dirs[0], 3)
    assert team_record.compared(database, run_dirs)["missing"] == 1


def test_a_search_that_is_recorded_under_two_names_has_its_trials_twice(database, run_dirs):
    (run_dirs[1] / IDENTITY_FILE).unlink()
    catch_up(database, run_dirs[1])
    found = team_record.compared(database, run_dirs)
    assert (found["twice"], found["searches"], found["of_others"]) == (3, 3, 1)


@pytest.mark.slow
def test_searches_share_a_record_and_one_is_killed(tmp_path):
    """As on a server, which here is a file that is always there."""
    report = tmp_path / "report.json"
    options = {"stop": "true", "start": "true", "searches": 3, "trials": 10, "pace": 0.3, "down": 1, "out": report}
    done = subprocess.run(
        [sys.executable, str(BENCHMARKS / "team_record.py"), *(f"--{name}={value}" for name, value in options.items())],
        env={
            **os.environ,
            "AUTOTUNE_RECORD": f"sqlite:///{tmp_path / 'record.db'}",
            "PYTHONPATH": os.pathsep.join([str(BENCHMARKS.parent), *sys.path]),
        },
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(report.read_text())
    assert [search["exit_code"] for search in found["searches"]] == [-9, 0, 0]
    assert found["after_sync"]["missing"] == found["after_sync"]["twice"] == 0
    assert found["after_sync"]["finished"] == sum(search["finished_trials"] for search in found["searches"]) > 0
