"""The lasting record: what the trials of all searches measured, in a database. With the study, all of SQLAlchemy.

By default SQLite in `$AUTOTUNE_HOME`; `AUTOTUNE_RECORD` names another database by its URL, or is "off". Several
searches may write at once: each trial is one short transaction, and SQLite keeps a write-ahead log. What goes wrong is
a :class:`RecordError` of one line within seconds; the result files of a run directory are what a search relies on, so
`autotune.keeping` goes on without.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import sqlalchemy as sa
from sqlalchemy.pool import NullPool

from autotune.errors import InputError, MachineError, RecordError, one_line
from autotune.home import home, writable
from autotune.kept import KeptSearch, KeptTrial, Key
from autotune.kept_rows import LARGE_COLUMNS, search_of, search_row, trial_row

SCHEMA_VERSION = 1
RECORD_FILE = "record.db"
VARIABLE = "AUTOTUNE_RECORD"

# How long another writer is waited for, and a server.
PATIENCE_S = 3

# By driver, since they don't agree on names.
_POSTGRESQL = {
    "connect_timeout": PATIENCE_S,
    "options": f"-c statement_timeout={PATIENCE_S}s -c lock_timeout={PATIENCE_S}s",
}
_OPTIONS: dict[str, dict[str, Any]] = {
    "pysqlite": {"timeout": PATIENCE_S},
    "psycopg": _POSTGRESQL,
    "psycopg2": _POSTGRESQL,
}

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
    sa.Column("speedup", sa.Float),
    sa.Column("about", sa.Text, nullable=False),  # JSON of the rest
)
_trials = sa.Table(
    "autotune_trials",
    _tables,
    sa.Column("search_id", sa.String(64), sa.ForeignKey("autotune_searches.id"), primary_key=True),
    sa.Column("number", sa.Integer, primary_key=True, autoincrement=False),
    sa.Column("purpose", sa.String(16), nullable=False),
    sa.Column("config_id", sa.String(16), nullable=False),
    sa.Column("status", sa.String(16), nullable=False),
    sa.Column("samples_per_second", sa.Float),
    sa.Column("peak_bytes", sa.BigInteger),
    sa.Column("memory_bytes", sa.BigInteger, nullable=False),
    sa.Column("duration_s", sa.Float, nullable=False),
    sa.Column("ended", sa.String(32), nullable=False),
    sa.Column("config", sa.Text, nullable=False),  # JSON
    sa.Column("outcome", sa.Text, nullable=False),  # JSON
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
    """One database; nothing is connected or made before something is read or written.

    Args:
        url: As SQLAlchemy has it.
        at_home: The file is in the home of lasting things, which is made when it is first written.

    Raises:
        InputError: `url` isn't one.
        MachineError: Its driver is not installed.
    """

    def __init__(self, url: str, *, at_home: bool = False) -> None:
        try:
            self._url = sa.make_url(url)
            options = _OPTIONS.get(self._url.get_driver_name(), {})
            self._engine = sa.create_engine(self._url, poolclass=NullPool, connect_args=options)
        except ImportError as error:
            missing = error.name or one_line(error)
            raise MachineError(f"{VARIABLE}: this database needs {missing}, which is not installed") from None
        except (sa.exc.ArgumentError, TypeError, ValueError):
            raise InputError(_no_url(url)) from None
        if self._is_sqlite and self._url.database in (None, "", ":memory:"):
            raise InputError(_no_url(url))
        self._at_home = at_home
        self._ready = False
        if self._is_sqlite:
            sa.event.listen(self._engine, "connect", _set_up_sqlite)
            sa.event.listen(self._engine, "begin", _begin_sqlite)

    @property
    def where(self) -> str:
        """The database, for people; a password is not shown."""
        shown = self._url.database if self._is_sqlite else self._url.render_as_string(hide_password=True)
        return shown or ""

    def keep(self, search: KeptSearch, trials: Iterable[KeptTrial]) -> None:
        """Write trials that aren't written yet, and their search; one transaction.

        Raises:
            RecordError: It could not be written.
        """
        with self._writing() as connection:
            self._put_search(connection, search)
            known = set(connection.scalars(sa.select(_trials.c.number).where(_trials.c.search_id == search.id)))
            rows = [trial_row(search.id, trial) for trial in trials if trial.number not in known]
            if rows:
                connection.execute(sa.insert(_trials), rows)

    def _put_search(self, connection: sa.Connection, search: KeptSearch) -> None:
        row = search_row(search)
        changed = connection.execute(sa.update(_searches).where(_searches.c.id == search.id).values(**row))
        if changed.rowcount == 0:
            connection.execute(sa.insert(_searches).values(**row))

    def searches(self, *, key: Key | None = None, latest: int | None = None, brief: bool = False) -> list[KeptSearch]:
        """Return searches with their trials, the latest first; of no record yet, none.

        Args:
            key: Only those with this key.
            latest: At most so many.
            brief: Without the configurations and outcomes of the trials.

        Raises:
            RecordError: It could not be read.
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
            chosen = sa.select(*columns).where(_trials.c.search_id.in_(list(rows))).order_by(_trials.c.number)
            for row in connection.execute(chosen).mappings():
                rows[row["search_id"]].append(row)
        return list(filter(None, (search_of(row, rows[row["id"]]) for row in found)))

    def forget(self, searches: Sequence[KeptSearch]) -> None:
        """Delete searches with their trials.

        Raises:
            RecordError: It could not be written.
        """
        ids = [search.id for search in searches]
        with self._writing() as connection:
            connection.execute(sa.delete(_trials).where(_trials.c.search_id.in_(ids)))
            connection.execute(sa.delete(_searches).where(_searches.c.id.in_(ids)))

    @contextlib.contextmanager
    def _reading(self) -> Iterator[sa.Connection | None]:
        """Connect to read; None if there is nothing to read, which is not made for that."""
        if self._is_sqlite and not (self._url.database and Path(self._url.database).exists()):
            yield None
            return
        with self._translated(), self._engine.connect().execution_options(reading=True) as connection:
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
        with self._translated():
            if not self._ready:
                self._make_ready()
            with self._engine.begin() as connection:
                yield connection

    def _make_ready(self) -> None:
        """Make what is missing; where another process does the same at the same time, the second try finds it made."""
        for is_last in (False, True):
            try:
                with self._engine.begin() as connection:
                    _tables.create_all(connection)
                    if self._version(connection) is None:
                        connection.execute(sa.insert(_about).values(name="schema", value=str(SCHEMA_VERSION)))
            except (sa.exc.IntegrityError, sa.exc.ProgrammingError):
                if is_last:
                    raise
            else:
                self._ready = True
                return

    def _version(self, connection: sa.Connection) -> int | None:
        """Return the version of the schema, None if it isn't written yet; refuse one that is newer."""
        found = connection.scalar(sa.select(_about.c.value).where(_about.c.name == "schema"))
        if found is not None and int(found) > SCHEMA_VERSION:
            raise RecordError(
                f"{self.where}: written by a newer autotune (schema {found}, this one knows {SCHEMA_VERSION}); "
                f"update autotune, or name another database by {VARIABLE}"
            )
        return int(found) if found is not None else None

    @property
    def _is_sqlite(self) -> bool:
        return self._url.get_backend_name() == "sqlite"

    @contextlib.contextmanager
    def _translated(self) -> Iterator[None]:
        """Turn what the database says into one line."""
        try:
            yield
        except (sa.exc.SQLAlchemyError, OSError, ValueError) as error:
            said = one_line(getattr(error, "orig", None) or error, 160)
            raise RecordError(f"{self.where}: {_in_words(said)}") from None


def _in_words(said: str) -> str:
    if "database is locked" in said:
        return f"in use by another process for more than {PATIENCE_S} s"
    if "not a database" in said or "malformed" in said:
        return f"damaged ({said}); move it aside, or name another database by {VARIABLE}"
    return f"can't be used: {said}"


def _set_up_sqlite(connection: Any, _: Any) -> None:
    """Let readers and a writer work at once. Transactions are begun by hand, for writing: see `Record`."""
    connection.isolation_level = None
    with contextlib.suppress(Exception):  # somebody else is at it, or the folder is read-only: it works without, too
        connection.execute("PRAGMA journal_mode=WAL")
    connection.execute("PRAGMA synchronous=NORMAL")  # a power cut may take the last trials; they are files as well


def _begin_sqlite(connection: sa.Connection) -> None:
    """Begin a transaction; who will write waits for others at once, not in the middle, where SQLite doesn't wait."""
    reads = connection.get_execution_options().get("reading", False)
    connection.exec_driver_sql("BEGIN" if reads else "BEGIN IMMEDIATE")


def _no_url(url: str) -> str:
    scheme, separator, rest = url.partition("://")
    shown = f"{scheme}{separator}{rest.rpartition('@')[2]}"  # without a password
    return (
        f"{VARIABLE}: {shown!r} is no URL of a database that lasts, such as sqlite:////data/record.db; "
        "'off' switches the record off"
    )
