"""A database by its URL, SQLite or PostgreSQL: how it is connected to, locked and written, and its errors in one line.

What is stored in it is the business of `record`. A password is never shown, in a message neither. People forget a part
of a URL, or the percent signs of a character, and then a password stands where something else is read. So of what is no
URL only the kind of database is shown, of a URL no user name, and host and name of the database only if they look like
one.
"""

from __future__ import annotations

import contextlib
import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote, quote_plus

import sqlalchemy as sa
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.pool import NullPool

from autotune.errors import InputError, MachineError, RecordError, one_line
from autotune.storage.home import network_kind

# The environment variable that names the URL.
VARIABLE = "AUTOTUNE_RECORD"

# Seconds that a server, or another writer, is waited for; and a statement that only reads, which may read much.
PATIENCE_S = 3
READING_S = 60

# What is shown instead of a secret.
HIDDEN = "***"

# "postgres" is what hosts hand out. The driver is that of the extra `postgresql`, unless the URL names one.
_DRIVERS = {"postgresql": "postgresql+psycopg", "postgres": "postgresql+psycopg"}
_SCHEMES = frozenset({"sqlite", *_DRIVERS})

# Options of drivers; those in the URL count more. A network that swallows packets is noticed within some ten seconds
# (https://www.postgresql.org/docs/current/libpq-connect.html).
_LIBPQ = {
    "connect_timeout": PATIENCE_S,
    "tcp_user_timeout": 10_000,
    "keepalives_idle": 5,
    "keepalives_interval": 2,
    "keepalives_count": 3,
}
_OPTIONS: dict[str, dict[str, Any]] = {"pysqlite": {"timeout": PATIENCE_S}, "psycopg": _LIBPQ, "psycopg2": _LIBPQ}

# First statement of each transaction, to write and to read. A writer of SQLite takes the lock at once: in the middle of
# a transaction it would not wait for it.
_POSTGRESQL_BEGIN = (
    f"SELECT set_config('lock_timeout', '{PATIENCE_S}s', true), set_config('statement_timeout', '%ds', true)"
)
_BEGIN = {
    "sqlite": ("BEGIN IMMEDIATE", "BEGIN"),
    "postgresql": (_POSTGRESQL_BEGIN % PATIENCE_S, _POSTGRESQL_BEGIN % READING_S),
}

# A lock that is held to the end of the transaction. The number is arbitrary and ours ("autotune" in ASCII).
_EXCLUSIVE = f"SELECT pg_advisory_xact_lock({int.from_bytes(b'autotune')})"

# Inserts that leave rows with the same key as they are.
_INSERT_NEW: dict[str, Callable[[sa.Table], sa.Insert]] = {
    "sqlite": lambda table: sqlite.insert(table).on_conflict_do_nothing(),
    "postgresql": lambda table: postgresql.insert(table).on_conflict_do_nothing(),
}

# What libpq adds to what has happened, and how many characters of the rest are shown.
_GUESSES = ("Is the server running", "This probably means")
_LONGEST = 160

# Words of errors that waiting a minute doesn't help.
_PERMANENT = (
    *("authentication failed", "access denied", "permission denied", "does not exist", "unknown database"),
    *("pg_hba.conf", "unable to open", "readonly", "read-only", "disk is full", "name or service not known"),
)

_HOST = re.compile(r"[\w.-]+|[0-9a-fA-F:.]+")
_NAME = re.compile(r"[\w.$-]+")
_SECRET_NAME = re.compile(r"pass|pwd|secret|token|key|auth|credential", re.IGNORECASE)
_NO_PATH = re.compile(r":[^/]*@|(pass\w*|pwd|secret|token)\s*=", re.IGNORECASE)


class Database:
    """One database; nothing is connected or made before something is read or written.

    What the database then says is raised as a RecordError of one line.

    Raises:
        InputError: `url` isn't that of SQLite or PostgreSQL, of a database in memory, or of a SQLite file on a network
            file system.
        MachineError: Its driver is not installed.
    """

    def __init__(self, url: str) -> None:
        scheme, separator, rest = url.partition("://")
        if scheme.partition("+")[0] not in _SCHEMES or _is_garbled(url):
            raise InputError(_no_url(url))
        try:
            self.url = sa.make_url(f"{_DRIVERS.get(scheme, scheme)}{separator}{rest}")
            given = _OPTIONS.get(self.url.get_driver_name(), {})
            options = {name: value for name, value in given.items() if name not in self.url.query}
            with warnings.catch_warnings():
                warnings.simplefilter("error", sa.exc.SAWarning)  # of options, whose names it shows
                self.engine = sa.create_engine(self.url, poolclass=NullPool, connect_args=options)
        except ImportError as error:
            remedy = "" if self.file is not None else ' (pip install "autotune-train[postgresql]")'
            missing = error.name or one_line(error)
            raise MachineError(f"{VARIABLE}: this database needs {missing}, which is not installed{remedy}") from None
        except (sa.exc.ArgumentError, sa.exc.SAWarning, TypeError, ValueError):
            raise InputError(_no_url(url)) from None
        self._kind = self.url.get_backend_name()
        if self.file is not None:
            if str(self.file) in ("", ".", ":memory:") or not str(self.file).isprintable():
                raise InputError(_no_url(url))
            _refuse_network(self.file)
            sa.event.listen(self.engine, "connect", _set_up_sqlite)
        sa.event.listen(self.engine, "begin", self._begin)

    @property
    def file(self) -> Path | None:
        """The file of SQLite, None of a server."""
        return Path(self.url.database or "") if self.url.get_backend_name() == "sqlite" else None

    @property
    def where(self) -> str:
        """The database, for people."""
        return str(self.file) if self.file is not None else shown(self.url)

    @contextlib.contextmanager
    def reading(self) -> Iterator[sa.Connection]:
        """Connect to read."""
        with self.translated(), self.engine.connect().execution_options(reading=True) as connection:
            yield connection

    @contextlib.contextmanager
    def writing(self) -> Iterator[sa.Connection]:
        """Begin a transaction, which is committed at the end."""
        with self.translated(), self.engine.begin() as connection:
            yield connection

    def exclude_others(self, connection: sa.Connection) -> None:
        """Wait for other processes to end the transactions in which they did this; SQLite has one writer anyway."""
        if self._kind == "postgresql":
            connection.exec_driver_sql(_EXCLUSIVE)

    def insert_new(self, connection: sa.Connection, table: sa.Table, rows: Sequence[dict[str, Any]]) -> None:
        """Insert rows; one whose key is there already is passed over, whoever wrote it, and when."""
        if rows:
            connection.execute(_INSERT_NEW[self._kind](table), rows)

    def _begin(self, connection: sa.Connection) -> None:
        reads = connection.get_execution_options().get("reading", False)
        connection.exec_driver_sql(_BEGIN[self._kind][int(reads)])

    @contextlib.contextmanager
    def translated(self) -> Iterator[None]:
        """Turn errors of the database into a RecordError of one line without secrets."""
        try:
            yield
        except (sa.exc.SQLAlchemyError, OSError, ValueError, TypeError, RuntimeError) as error:
            origin = getattr(error, "orig", None) or error
            said = _said(masked(str(origin), self.url) or type(origin).__name__)
            text = f"{self.where}: {_in_words(said)}"
            raise RecordError(text, is_temporary=self._passes(error, said)) from None

    def _passes(self, error: Exception, said: str) -> bool:
        """Whether the same may work a minute later."""
        if self.file is not None:
            return "locked" in said
        passing = (sa.exc.OperationalError, sa.exc.InterfaceError, sa.exc.IntegrityError, OSError)
        return isinstance(error, passing) and not any(words in said.lower() for words in _PERMANENT)


def shown(url: sa.URL) -> str:
    """Return a server's URL for people: kind, host and database. A port is shown only where it can be nothing else."""
    host = _plain(url.host, _HOST)
    port = f":{url.port}" if url.port is not None and url.username is not None else ""
    database = _plain(url.database, _NAME)
    return f"{url.drivername}://{host}{port}" + (f"/{database}" if database else "")


def masked(text: str, url: sa.URL) -> str:
    """Return what a driver says without what may be a password."""
    for secret in sorted(set(_secrets(url)), key=len, reverse=True):
        text = text.replace(secret, HIDDEN)
    return text


def _is_garbled(text: str) -> bool:
    """Whether a URL can be read in a way that nobody has meant, such as with a part of a password for the host."""
    scheme, _, rest = text.partition("://")
    body = rest.partition("?")[0]
    if scheme.partition("+")[0] == "sqlite":
        return _NO_PATH.search(body) is not None
    return body.count("@") > 1


def _plain(part: str | None, looks: re.Pattern[str]) -> str:
    return "" if not part else part if looks.fullmatch(part) else HIDDEN


def _secrets(url: sa.URL) -> Iterator[str]:
    """Yield what isn't to be shown, in each way that it may be written."""
    parts = [str(url.password) if url.password is not None else None]
    if url.password is None:  # then what is read as the user or the port may have been meant as one
        parts += [url.username, str(url.port) if url.port is not None and url.username is None else None]
    parts += [url.host if _plain(url.host, _HOST) == HIDDEN else None]
    parts += [url.database if _plain(url.database, _NAME) == HIDDEN and url.get_backend_name() != "sqlite" else None]
    for name, value in url.query.items():
        if _SECRET_NAME.search(name):
            parts += [value] if isinstance(value, str) else value
    for part in filter(None, parts):
        yield from filter(None, {part, part.strip(), quote(part), quote(part, safe=""), quote_plus(part)})
        yield from filter(None, {repr(part)[1:-1], " ".join(part.split())})


def _set_up_sqlite(connection: Any, _: Any) -> None:
    """Let readers and a writer work at once. Transactions are begun by `_begin`."""
    connection.isolation_level = None
    with contextlib.suppress(Exception):  # another process does the same, or the folder is read-only: optional
        connection.execute("PRAGMA journal_mode=WAL")
    connection.execute("PRAGMA synchronous=NORMAL")  # a power cut may take the last trials; they are files as well


def _refuse_network(file: Path) -> None:
    kind = network_kind(file)
    if kind is not None:
        raise InputError(
            f"{file}: a SQLite file on a network file system ({kind}) breaks when several write it: name a PostgreSQL "
            f"database by {VARIABLE}, or a local folder by AUTOTUNE_HOME; {VARIABLE}=off does without"
        )


def _said(text: str) -> str:
    """Return what a driver says, on one line of bearable length."""
    said = " ".join(text.split())
    for guess in _GUESSES:
        said = said.partition(guess)[0].rstrip()
    return said if len(said) <= _LONGEST else f"{said[: _LONGEST - 3]}..."


def _in_words(said: str) -> str:
    if "database is locked" in said:
        return f"in use by another process for more than {PATIENCE_S} s"
    if "not a database" in said or "malformed" in said:
        return f"damaged ({said}); move it aside, or name another database by {VARIABLE}"
    return f"can't be used: {said}"


def _no_url(text: str) -> str:
    """Say what is wrong with a URL, without what may be a password."""
    scheme = text.partition("://")[0].partition("+")[0]
    what = f"what it names ({scheme}://...)" if scheme in _SCHEMES else "what it names"
    return (
        f"{VARIABLE}: {what} is no URL of a SQLite or PostgreSQL database that lasts, such as "
        "sqlite:////data/record.db or postgresql://user:password@host/database (with %40 for an @ in the password); "
        "'off' switches the record off"
    )
