"""A record on a PostgreSQL server that many searches write at once.

    AUTOTUNE_TEST_RECORDS="postgresql://user:password@host/autotune_test" pytest -m slow -k team_record

All tables of a database named there are dropped, so its name must have "test" in it; the server must ask for passwords.
"""

from __future__ import annotations

import os

import pytest
import sqlalchemy as sa
from at_once import run_at_once
from factories import OUT_OF_MEMORY, make_config
from recorded_searches import recorded_search, recorded_trial, stored

from autotune.errors import RecordError
from autotune.storage.record import Record

URLS = os.environ.get("AUTOTUNE_TEST_RECORDS", "").split()
pytestmark = [pytest.mark.slow, pytest.mark.skipif(not URLS, reason="AUTOTUNE_TEST_RECORDS names no server")]

LARGE = {"text": "ünïcödé 💾 " * 20_000}  # hundreds of KiB, and characters of four bytes


@pytest.fixture(params=URLS, ids=lambda url: url.partition(":")[0])
def url(request) -> str:
    """The URL of a database without our tables."""
    pytest.importorskip("psycopg")
    url = sa.make_url(request.param.replace("postgresql:", "postgresql+psycopg:"))
    assert "test" in (url.database or ""), "the name of a database to try this on must have 'test' in it"
    with sa.create_engine(url, poolclass=sa.NullPool).begin() as connection:
        connection.execute(sa.text("DROP SCHEMA public CASCADE"))
        connection.execute(sa.text("CREATE SCHEMA public"))
    return request.param


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
    assert database.write(search, stored(*search.trials)) == 3
    assert Record(url).searches() == [search]
    assert Record(url).write(search, stored(*search.trials)) == 0
    assert database.searches(key=search.key, latest=1) == [search]
    database.forget([search])
    assert database.searches() == []


WRITER = """
import sys
sys.path.insert(0, sys.argv[3])
from recorded_searches import recorded_search, recorded_trial, stored
from autotune.storage.record import Record

mine = recorded_search(*(recorded_trial() for _ in range(10)), id=sys.argv[2])
ours = recorded_search(*(recorded_trial() for _ in range(10)), id="ours")
print("ready", flush=True)
sys.stdin.readline()
database = Record(sys.argv[1])
for one, other in zip(mine.trials, ours.trials):
    database.write(mine, stored(*mine.trials[: one.number + 1]))
    database.write(ours, stored(*ours.trials[: other.number + 1]))
"""


def test_many_processes_make_the_tables_and_write_at_once_the_same_search_too(url):
    assert run_at_once(WRITER, url, "abcdef") == [(0, "")] * 6
    found = {search.id: len(search.trials) for search in Record(url).searches()}
    assert found == dict.fromkeys([*"abcdef", "ours"], 11)


def test_tables_of_the_earlier_form_are_refused_in_a_line(url):
    engine = sa.create_engine(url.replace("postgresql:", "postgresql+psycopg:"), poolclass=sa.NullPool)
    with engine.begin() as connection:
        connection.execute(sa.text("CREATE TABLE autotune_searches (id integer)"))
    with pytest.raises(RecordError, match="a record of an earlier form"):
        Record(url).searches()


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
