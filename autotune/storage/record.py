"""The lasting record: a database of what the trials of all searches measured.

By default SQLite in `$AUTOTUNE_HOME`; `AUTOTUNE_RECORD` names another database by its URL, or is "off". Many searches
may write at once, of one team on many machines: each trial is one short transaction, and (search, number) is its
primary key, so that it is there once however often it is written. What goes wrong is a :class:`RecordError` of one line
within seconds; a search relies on the result files of its run directory and goes on without the record.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import sqlalchemy as sa

from autotune.errors import InputError, RecordError
from autotune.storage.database import VARIABLE, Database
from autotune.storage.home import home, writable
from autotune.storage.recorded import (
    LARGE_COLUMNS,
    Key,
    RecordedSearch,
    RecordedTrial,
    search_of,
    search_row,
    trial_row,
)

SCHEMA_VERSION = 1
RECORD_FILE = "record.db"

# Searches named in one statement; SQLite takes 32,766 names (https://www.sqlite.org/limits.html).
_AT_ONCE = 1000

_tables = sa.MetaData()
_about = sa.Table(
    "autotune_about",
    _tables,
    sa.Column("name", sa.String(32), primary_key=True),
    sa.Column("value", sa.String(255), nullable=False),
)
_searches = sa.Table(
    "autotune_searches",
    _tables,
    sa.Column("id", sa.String(64), primary_key=True),
    sa.Column("key", sa.String(16), nullable=False, index=True),
    sa.Column("model", sa.String(255), nullable=False, index=True),
    sa.Column("started", sa.String(32), nullable=False),
    sa.Column("verdict", sa.String(64)),
    sa.Column("best_config_id", sa.String(16)),
    sa.Column("speedup", sa.Double),
    sa.Column("about", sa.Text, nullable=False),  # of the rest
)
_trials = sa.Table(
    "autotune_trials",
    _tables,
    sa.Column("search_id", sa.String(64), sa.ForeignKey("autotune_searches.id"), primary_key=True),
    sa.Column("number", sa.Integer, primary_key=True, autoincrement=False),
    sa.Column("purpose", sa.String(16), nullable=False),
    sa.Column("config_id", sa.String(16), nullable=False),
    sa.Column("status", sa.String(16), nullable=False),
    sa.Column("samples_per_second", sa.Double),
    sa.Column("peak_bytes", sa.BigInteger),
    sa.Column("memory_bytes", sa.BigInteger, nullable=False),
    sa.Column("duration_s", sa.Double, nullable=False),
    sa.Column("ended", sa.String(32), nullable=False),
    sa.Column("config", sa.Text, nullable=False),
    sa.Column("outcome", sa.Text, nullable=False),
)


def record() -> Record | None:
    """Return the record of this user, None if it is switched off.

    Raises:
        InputError: `AUTOTUNE_RECORD` is no URL of a database, or there is no home for the usual one.
        MachineError: The package that talks to that database is not installed.
    """
    named = os.environ.get(VARIABLE, "").strip()
    if named.lower() == "off":
        return None
    return Record(named) if named else Record(f"sqlite:///{home() / RECORD_FILE}", at_home=True)


class Record:
    """One database; nothing is connected or made before something is read or written, which may raise RecordError.

    If it lies `at_home`, the home of lasting things is made when it is first written.

    Raises:
        InputError: `url` isn't one, or is that of a SQLite file on a network file system.
        MachineError: Its driver is not installed.
    """

    def __init__(self, url: str, *, at_home: bool = False) -> None:
        self._database = Database(url)
        self._at_home = at_home
        self._ready = False

    @property
    def where(self) -> str:
        """The database, for people; a password is not shown."""
        return self._database.where

    def write(self, search: RecordedSearch, trials: Iterable[RecordedTrial]) -> int:
        """Write trials that aren't written yet, and their search; one transaction. Return how many those were."""
        row = search_row(search)
        with self._writing() as connection:
            self._database.insert_new(connection, _searches, [row])
            connection.execute(sa.update(_searches).where(_searches.c.id == search.id).values(**row))
            known = set(connection.scalars(sa.select(_trials.c.number).where(_trials.c.search_id == search.id)))
            rows = [trial_row(search.id, trial) for trial in trials if trial.number not in known]
            self._database.insert_new(connection, _trials, rows)
        return len(rows)

    def searches(
        self, *, key: Key | None = None, latest: int | None = None, brief: bool = False
    ) -> list[RecordedSearch]:
        """Return searches with their trials, the latest first, if `key` is given those with it; of no record yet, none.

        At most so many of the `latest` are returned; `brief`: without the configurations and outcomes of the trials.
        """
        wanted = sa.select(_searches).order_by(_searches.c.started.desc(), _searches.c.id)
        if key is not None:
            wanted = wanted.where(_searches.c.key == key.short)
        columns = [c for c in _trials.c if not (brief and c.name in LARGE_COLUMNS)]
        with self._reading() as connection:
            if connection is None:
                return []
            found = connection.execute(wanted.limit(latest)).mappings().all()
            rows: dict[str, list[Any]] = {row["id"]: [] for row in found}
            for ids in _in_parts(list(rows)):
                chosen = sa.select(*columns).where(_trials.c.search_id.in_(ids)).order_by(_trials.c.number)
                for row in connection.execute(chosen).mappings():
                    rows[row["search_id"]].append(row)
        return list(filter(None, (search_of(row, rows[row["id"]]) for row in found)))

    def forget(self, searches: Sequence[RecordedSearch]) -> None:
        """Delete searches with their trials."""
        with self._writing() as connection:
            for ids in _in_parts([search.id for search in searches]):
                connection.execute(sa.delete(_trials).where(_trials.c.search_id.in_(ids)))
                connection.execute(sa.delete(_searches).where(_searches.c.id.in_(ids)))

    @contextlib.contextmanager
    def _reading(self) -> Iterator[sa.Connection | None]:
        """Connect to read; None if there is nothing to read, which is not made for that."""
        try:
            is_missing = self._database.file is not None and not self._database.file.exists()
        except OSError as error:  # a name too long, say
            raise RecordError(f"{str(self._database.file)[:100]}: {error.strerror}") from None
        if is_missing:
            yield None
            return
        with self._database.reading() as connection:
            has_any = sa.inspect(connection).has_table(_about.name) and self._version(connection) is not None
            yield connection if has_any else None

    @contextlib.contextmanager
    def _writing(self) -> Iterator[sa.Connection]:
        """Begin a transaction, in a database that has the tables."""
        if self._at_home:
            try:
                writable()
            except InputError as error:
                raise RecordError(str(error)) from None
        with self._database.writing() as connection:
            if not self._ready:
                self._make(connection)
            yield connection
        self._ready = True

    def _make(self, connection: sa.Connection) -> None:
        """Make what is missing, while no other process does."""
        self._database.exclude_others(connection)
        _tables.create_all(connection)
        if self._version(connection) is None:
            connection.execute(sa.insert(_about).values(name="schema", value=str(SCHEMA_VERSION)))

    def _version(self, connection: sa.Connection) -> int | None:
        """Return the version of the schema, None if it isn't written yet; refuse one that is newer."""
        found = connection.scalar(sa.select(_about.c.value).where(_about.c.name == "schema"))
        if found is not None and int(found) > SCHEMA_VERSION:
            raise RecordError(
                f"{self.where}: written by a newer autotune (schema {found}, this one knows {SCHEMA_VERSION}); "
                f"update autotune, or name another database by {VARIABLE}"
            )
        return int(found) if found is not None else None


def _in_parts(ids: Sequence[str]) -> Iterator[Sequence[str]]:
    for start in range(0, len(ids), _AT_ONCE):
        yield ids[start : start + _AT_ONCE]
