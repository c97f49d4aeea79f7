"""What of a run directory goes to the lasting record, whoever writes it and however often."""

import os

import pytest
from factories import OUT_OF_MEMORY, make_budget, make_plan, make_result, make_space_file

from autotune.errors import RunDirectoryError
from autotune.planning.options import SearchOptions
from autotune.storage.record import Record
from autotune.storage.run_directory import RunDirectory
from autotune.storage.sync import Answer, catch_up, identity_of, note_answer, recorded_trials
from autotune.storage.writer import RecordWriter
from autotune.value import write_value
from autotune.values.checks import SoakTask
from autotune.values.trial import Purpose

PLAN = make_plan(
    record=True, space=make_space_file({"precision": ["fp32", "bf16"]}), budget=make_budget(finalists=1, max_trials=1)
)
ANSWER = Answer(verdict="faster", best_config_id="abc", speedup=1.5)


@pytest.fixture
def database(tmp_path) -> Record:
    return Record(f"sqlite:///{tmp_path / 'record.db'}")


@pytest.fixture
def directory(tmp_path) -> RunDirectory:
    """Of a search that was killed after two trials."""
    directory = RunDirectory.create(tmp_path / "run")
    directory.write_plan(PLAN)
    for number, outcome in enumerate((10.0, OUT_OF_MEMORY)):
        folder = directory.path / "trials" / f"{number:04d}"
        folder.mkdir(parents=True)
        write_value(make_result(number=number, outcome=outcome), folder / "result.json")
    return directory


def test_all_that_a_killed_search_left_is_written_once(database, directory):
    first, again = (catch_up(database, directory.path) for _ in range(2))
    assert (first.trials, first.written) == (2, 2)
    assert (again.trials, again.written) == (2, 0)
    (search,) = database.searches()
    assert [str(trial.status) for trial in search.trials] == ["completed", "out of memory"]
    assert search.verdict is None


def test_it_is_the_search_that_the_keeper_wrote(database, directory):
    writer = RecordWriter(database, PLAN, directory, lambda event: None)
    writer.write(directory.results()[:1])
    assert catch_up(database, directory.path).written == 1
    assert len(database.searches()) == 1


def test_the_answer_is_written_too(database, directory):
    note_answer(directory, ANSWER)
    catch_up(database, directory.path)
    (search,) = database.searches()
    assert (search.verdict, search.best_config_id, search.speedup) == ("faster", "abc", 1.5)


def test_what_was_not_to_be_recorded_is_left_alone(database, directory):
    directory.write_plan(PLAN.model_copy(update={"record": False}))
    found = catch_up(database, directory.path)
    assert (found.wanted, found.reason) == (False, "it was searched with --no-record")
    assert database.searches() == []


def test_a_search_that_was_resumed_with_other_versions_is_left_alone_for_that_reason(database, directory):
    options = SearchOptions(model="gpt2")
    directory.write_plan(PLAN.model_copy(update={"record": False, "options": options}))
    assert "other versions of its packages" in catch_up(database, directory.path).reason


def test_a_search_that_is_running_writes_by_itself(database, directory):
    with directory, pytest.raises(RunDirectoryError, match="another search is running"):
        catch_up(database, directory.path)


def test_where_no_search_is_that_is_said(database, tmp_path):
    with pytest.raises(RunDirectoryError, match="holds no search"):
        catch_up(database, tmp_path)


def test_checks_are_not_kept(directory):
    results = [
        make_result(number=0, purpose=Purpose.BASELINE),
        make_result(number=2, purpose=Purpose.SOAK, task=SoakTask(eval_batch_sizes=(8,))),
        make_result(number=3, purpose=Purpose.FINAL),
    ]
    assert [trial.number for trial in recorded_trials(directory, results)] == [0, 3]


def test_times_are_those_of_the_files(directory):
    for file in (directory.path / "search.json", directory.path / "trials" / "0000" / "result.json"):
        os.utime(file, (1_000_000_000, 1_000_000_000))
    assert identity_of(directory).started == "2001-09-09T01:46:40+00:00"
    assert [trial.ended for trial in recorded_trials(directory, directory.results()[:1])] == [
        "2001-09-09T01:46:40+00:00"
    ]
