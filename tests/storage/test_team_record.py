"""A record on a PostgreSQL server that many searches write at once.

    AUTOTUNE_TEST_RECORDS="postgresql://user:password@host/autotune_test" pytest -m slow -k team_record

The tables of a database named there are dropped, so its name must have "test" in it; the server must ask for passwords.
"""

from __future__ import annotations

import os

import pytest
import sqlalchemy as sa
from at_once import run_at_once
from factories import OUT_OF_MEMORY, make_config
from recorded_searches import recorded_search, recorded_trial

from autotune.errors import RecordError
from autotune.storage.database import Database
from autotune.storage.record import SCHEMA_VERSION, Record

URLS = os.environ.get("AUTOTUNE_TEST_RECORDS", "").split()
pytestmark = [pytest.mark.slow, pytest.mark.skipif(not URLS, reason="AUTOTUNE_TEST_RECORDS names no server")]

TABLES = ("autotune_trials", "autotune_searches", "autotune_about")
LARGE = {"text": "ünïcödé 💾 " * 20_000}  # hundreds of KiB, and characters of four bytes


@pytest.fixture(params=URLS, ids=lambda url: url.partition(":")[0])
def url(request) -> str:
    """The URL of a database without our tables."""
    pytest.importorskip("psycopg")
    database = Database(request.param)
    assert "test" in (database.url.database or ""), "the name of a database to try this on must have 'test' in it"
    with database.engine.begin() as connection:
        for table in TABLES:
            connection.execute(sa.text(f"DROP TABLE IF EXISTS {table}"))
    return request.param


def execute(url: str, statement: str, *, hold: bool = False) -> sa.Connection:
    connection = Database(url).engine.connect()
    connection.execute(sa.text(statement))
    if not hold:
        connection.commit()
        connection.close()
    return connection


def test_what_was_kept_is_read_again_to_the_last_digit(url):
    search = recorded_search(
        recorded_trial(make_config(16), 1 / 3),
        recorded_trial(make_config(4), OUT_OF_MEMORY),
        model="modèle 💾",
    )
    large = search.trials[1].model_copy(update={"outcome": LARGE})
    search = search.model_copy(update={"trials": (search.trials[0], large, search.trials[2]), "speedup": 1 / 3})
    database = Record(url)
    assert database.searches() == []
    assert database.write(search, search.trials) == 3
    assert Record(url).searches() == [search]
    assert Record(url).write(search, search.trials) == 0
    assert database.searches(key=search.key, latest=1) == [search]
    database.forget([search])
    assert database.searches() == []


def test_a_row_that_is_there_is_left_as_it_is(url):
    """As when two write the same trial at the same moment, or one that was told its write had failed."""
    search = recorded_search()
    Record(url).write(search, search.trials)
    database = Database(url)
    with database.writing() as connection:
        table = sa.Table("autotune_trials", sa.MetaData(), autoload_with=connection)
        (row,) = connection.execute(sa.select(table)).mappings().all()
        database.insert_new(connection, table, [{**row, "duration_s": 99.0}, {**row, "number": 1}])
    (found,) = Record(url).searches()
    assert [trial.duration_s for trial in found.trials] == [search.trials[0].duration_s] * 2


WRITER = """
import sys
sys.path.insert(0, sys.argv[3])
from recorded_searches import recorded_search, recorded_trial
from autotune.storage.record import Record

mine = recorded_search(*(recorded_trial() for _ in range(10)), id=sys.argv[2])
ours = recorded_search(*(recorded_trial() for _ in range(10)), id="ours")
print("ready", flush=True)
sys.stdin.readline()
database = Record(sys.argv[1])
for one, other in zip(mine.trials, ours.trials):
    database.write(mine, [one])
    database.write(ours, [other])
"""


def test_many_processes_make_the_tables_and_write_at_once_the_same_search_too(url):
    assert run_at_once(WRITER, url, "abcdef") == [(0, "")] * 6
    found = {search.id: len(search.trials) for search in Record(url).searches()}
    assert found == dict.fromkeys([*"abcdef", "ours"], 11)


def test_a_table_that_is_locked_is_given_up_after_seconds_and_may_be_free_later(url):
    search = recorded_search()
    Record(url).write(search, [])
    holder = execute(url, "UPDATE autotune_searches SET speedup = 2", hold=True)
    try:
        with pytest.raises(RecordError, match="can't be used") as caught:
            Record(url).write(search, search.trials)
    finally:
        holder.rollback()
        holder.close()
    assert caught.value.is_temporary
    assert "\n" not in str(caught.value)
    assert Record(url).write(search, search.trials) == 1


def test_a_record_of_a_newer_autotune_is_refused(url):
    Record(url).write(recorded_search(), [])
    execute(url, f"UPDATE autotune_about SET value = '{SCHEMA_VERSION + 1}'")
    for attempt in (Record(url).searches, lambda: Record(url).write(recorded_search(), [])):
        with pytest.raises(RecordError, match="written by a newer autotune"):
            attempt()


def test_a_wrong_password_is_one_line_without_it_and_not_waited_for(url):
    wrong = sa.make_url(url).set(password="s3cr3t-but-wrong")
    with pytest.raises(RecordError) as caught:
        Record(wrong.render_as_string(hide_password=False)).searches()
    assert "s3cr3t" not in str(caught.value)
    assert not caught.value.is_temporary


def test_a_server_that_is_not_there_is_one_line_and_may_come_back(url):
    away = sa.make_url(url).set(port=1)
    with pytest.raises(RecordError) as caught:
        Record(away.render_as_string(hide_password=False)).searches()
    assert "\n" not in str(caught.value)
    assert caught.value.is_temporary
