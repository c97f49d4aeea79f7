"""The lasting record: a real database that several write at once, and that never takes a search down."""

import sqlite3
from pathlib import Path

import pytest
from at_once import run_at_once
from factories import OUT_OF_MEMORY, make_config
from recorded_searches import recorded_search, recorded_trial

from autotune.errors import InputError, RecordError
from autotune.storage import database as databases
from autotune.storage import record as module
from autotune.storage.database import VARIABLE
from autotune.storage.record import RECORD_FILE, SCHEMA_VERSION, Record, record
from autotune.storage.recorded import Key, trial_row

OTHER = Key(model="m", workload="w", hardware="h", versions="v")


@pytest.fixture
def path(tmp_path) -> Path:
    return tmp_path / "record.db"


@pytest.fixture
def database(path) -> Record:
    return Record(f"sqlite:///{path}")


@pytest.fixture
def _hasty(monkeypatch):
    """Others are waited for only a moment."""
    monkeypatch.setitem(databases._OPTIONS, "pysqlite", {"timeout": 0.1})


def keep(database: Record, *searches) -> None:
    for search in searches:
        database.write(search, search.trials)


def test_what_was_kept_is_read_again(database):
    search = recorded_search(recorded_trial(make_config(16), 12.5), recorded_trial(make_config(4), OUT_OF_MEMORY))
    keep(database, search)
    assert database.searches() == [search]


def test_reading_makes_nothing(database, tmp_path):
    assert database.searches() == []
    assert not list(tmp_path.iterdir())


def test_a_trial_that_is_kept_again_stays_as_it_is(database):
    search = recorded_search(recorded_trial())
    keep(database, search, search)
    database.write(search, [search.trials[1].model_copy(update={"duration_s": 99.0})])
    assert database.searches() == [search]


def test_how_many_were_not_there_is_told(database):
    search = recorded_search(recorded_trial(), recorded_trial())
    assert database.write(search, search.trials[:1]) == 1
    assert database.write(search, search.trials) == 2


def test_who_writes_the_same_trial_at_the_same_moment_writes_it_once(database, monkeypatch):
    """Both have looked before either wrote: what one then finds written isn't written again, and is no error."""
    search = recorded_search(recorded_trial())
    keep(database, search)
    monkeypatch.setattr(module, "trial_row", lambda search_id, trial: {**trial_row(search_id, trial), "number": 1})
    late = search.trials[1].model_copy(update={"number": 7, "duration_s": 99.0})
    database.write(search, [late])
    assert database.searches() == [search]


def test_trials_come_one_by_one_and_the_answer_last(database):
    search = recorded_search(recorded_trial())
    for trial in search.trials:
        database.write(search, [trial])
    answered = search.model_copy(update={"verdict": "faster", "best_config_id": "x", "speedup": 1.5})
    database.write(answered, [])
    assert database.searches() == [answered]


def test_the_latest_search_comes_first(database):
    searches = [recorded_search(id=str(day), started=f"2026-11-0{day}T00:00:00+00:00") for day in (2, 3, 1)]
    keep(database, *searches)
    assert [search.id for search in database.searches()] == ["3", "2", "1"]
    assert [search.id for search in database.searches(latest=1)] == ["3"]


def test_searches_are_found_by_their_key(database):
    mine, other = recorded_search(), recorded_search(id="b", key=OTHER)
    keep(database, mine, other)
    assert database.searches(key=mine.key) == [mine]
    assert database.searches(key=OTHER) == [other]


def test_more_searches_than_a_statement_takes_names(database, monkeypatch):
    monkeypatch.setattr(module, "_AT_ONCE", 2)
    searches = [recorded_search(id=str(number)) for number in range(5)]
    keep(database, *searches)
    assert database.searches() == searches
    database.forget(searches[1:])
    assert database.searches() == searches[:1]


def test_in_brief_configurations_and_outcomes_are_left_out(database):
    keep(database, recorded_search())
    (search,) = database.searches(brief=True)
    assert [(t.config, t.outcome, t.samples_per_second) for t in search.trials] == [({}, {}, 10.0)]


def test_what_is_forgotten_is_gone_and_the_rest_is_not(database):
    mine, other = recorded_search(), recorded_search(id="b", key=OTHER)
    keep(database, mine, other)
    database.forget([mine])
    assert database.searches() == [other]


WRITER = """
import sys
sys.path.insert(0, sys.argv[3])
from recorded_searches import recorded_search, recorded_trial
from autotune.storage.record import Record

search = recorded_search(*(recorded_trial() for _ in range(30)), id=sys.argv[2])
print("ready", flush=True)
sys.stdin.readline()
database = Record(f"sqlite:///{sys.argv[1]}")
for trial in search.trials:
    database.write(search, [trial])
"""


def test_two_processes_write_at_once_into_a_record_that_neither_has_made(path, database):
    assert run_at_once(WRITER, str(path), "ab") == [(0, "")] * 2
    assert {search.id: len(search.trials) for search in database.searches()} == {"a": 31, "b": 31}


@pytest.mark.usefixtures("_hasty")
def test_a_locked_record_is_one_line_after_a_moment(path):
    keep(Record(f"sqlite:///{path}"), recorded_search())
    holder = sqlite3.connect(path, isolation_level=None)
    holder.execute("BEGIN IMMEDIATE")
    late = Record(f"sqlite:///{path}")
    with pytest.raises(RecordError, match=r"record\.db: in use by another process") as caught:
        keep(late, recorded_search(id="b"))
    assert "\n" not in str(caught.value)
    assert caught.value.is_temporary
    assert len(late.searches()) == 1, "who only reads doesn't wait for a writer"
    holder.execute("ROLLBACK")
    holder.close()
    keep(late, recorded_search(id="b"))
    assert len(late.searches()) == 2


@pytest.mark.parametrize("content", [b"this is no database, whatever its name says", b"SQLite format 3\0" + bytes(400)])
def test_a_damaged_record_is_one_line_and_left_as_it_is(path, content):
    path.write_bytes(content * 20)
    for attempt in (lambda: Record(f"sqlite:///{path}").searches(), lambda: keep(Record(f"sqlite:///{path}"), SEARCH)):
        with pytest.raises(RecordError, match=r"record\.db: ") as caught:
            attempt()
        assert "\n" not in str(caught.value)
        assert not caught.value.is_temporary
    assert path.read_bytes() == content * 20


SEARCH = recorded_search()


def test_a_record_of_a_newer_autotune_is_refused(path, database):
    keep(database, SEARCH)
    with sqlite3.connect(path) as connection:
        connection.execute(f"UPDATE autotune_about SET value = '{SCHEMA_VERSION + 1}' WHERE name = 'schema'")
    connection.close()
    for attempt in (lambda: Record(f"sqlite:///{path}").searches(), lambda: keep(Record(f"sqlite:///{path}"), SEARCH)):
        with pytest.raises(RecordError, match=r"written by a newer autotune .*update autotune"):
            attempt()


def test_a_file_of_somebody_else_is_added_to_and_not_touched(path, database):
    with sqlite3.connect(path) as connection:
        connection.execute("CREATE TABLE theirs (value)")
    connection.close()
    assert database.searches() == []
    keep(database, SEARCH)
    assert database.searches() == [SEARCH]


def test_a_row_that_can_not_be_read_is_passed_over(path, database, caplog):
    keep(database, recorded_search(recorded_trial()))
    with sqlite3.connect(path) as connection:
        connection.execute("UPDATE autotune_trials SET purpose = 'of another time' WHERE number = 1")
    connection.close()
    (search,) = database.searches()
    assert [trial.number for trial in search.trials] == [0]
    assert "trial 1 of search a in the record is passed over" in caplog.text


def test_a_folder_that_is_not_there_is_one_line(tmp_path):
    with pytest.raises(RecordError, match=r"nowhere/record\.db: can't be used: unable to open"):
        keep(Record(f"sqlite:///{tmp_path}/nowhere/record.db"), SEARCH)


class TestWhereItIs:
    def test_by_default_in_the_home(self, monkeypatch, tmp_path):
        monkeypatch.delenv(VARIABLE, raising=False)
        monkeypatch.setenv("AUTOTUNE_HOME", str(tmp_path / "new"))
        database = record()
        assert database.searches() == []
        assert not (tmp_path / "new").exists()
        keep(database, SEARCH)
        assert (tmp_path / "new" / RECORD_FILE).is_file()

    def test_a_home_that_can_not_be_written_is_one_line(self, monkeypatch, tmp_path):
        (tmp_path / "file").touch()
        monkeypatch.delenv(VARIABLE, raising=False)
        monkeypatch.setenv("AUTOTUNE_HOME", str(tmp_path / "file"))
        with pytest.raises(RecordError, match=r"can't be written"):
            keep(record(), SEARCH)

    @pytest.mark.parametrize("word", ["off", "OFF"])
    def test_it_can_be_switched_off(self, monkeypatch, word):
        monkeypatch.setenv(VARIABLE, word)
        assert record() is None

    def test_a_url_names_another(self, monkeypatch, path):
        monkeypatch.setenv(VARIABLE, f"sqlite:///{path}")
        keep(record(), SEARCH)
        assert path.is_file()

    @pytest.mark.parametrize("url", ["/data/record.db", "nosuch://host/db", "sqlite://", "sqlite:///:memory:"])
    def test_what_is_no_url_of_a_lasting_database_is_refused(self, monkeypatch, url):
        monkeypatch.setenv(VARIABLE, url)
        with pytest.raises(InputError, match=r"AUTOTUNE_RECORD: .* is no URL .*'off' switches") as caught:
            record()
        assert "\n" not in str(caught.value)
