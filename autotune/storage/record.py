"""Searches as Optuna studies: the study of a run directory, and the lasting record of all searches.

A search is a study of its own, in which each trial is there as soon as it has ended. Its user attribute "search"
describes it (:class:`~autotune.storage.recorded.RecordedSearch`); "recorded" of a trial is what other searches read of
it (:class:`~autotune.storage.recorded.RecordedTrial`). Any program that reads Optuna's storages can open it.

The lasting record is a journal file in `$AUTOTUNE_HOME`; `AUTOTUNE_RECORD` names a database in its place, by the URL of
an Optuna `RDBStorage`, or is "off". Many searches may write at once. What goes wrong is a :class:`RecordError` of one
line; a search relies on the result files of its run directory and goes on without the record. A URL holds a password,
and drivers repeat parts of it: so of what a driver says only known words are shown.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import json
import logging
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import optuna
import sqlalchemy as sa
from optuna.storages import BaseStorage, JournalStorage
from optuna.storages.journal import JournalFileBackend
from optuna.storages.journal._file import BaseJournalFileLock
from optuna.trial import FrozenTrial

from autotune.errors import InputError, MachineError, RecordError
from autotune.storage.home import home, writable
from autotune.storage.recorded import Key, RecordedSearch, RecordedTrial

logger = logging.getLogger(__name__)

# The environment variable that names the URL.
VARIABLE = "AUTOTUNE_RECORD"

RECORD_FILE, FORMER_FILE = "record.journal", "record.db"

# User attributes: of a study, and of a trial its number and what other searches read of it.
SEARCH, NUMBER, RECORDED = "search", "trial", "recorded"

# Seconds in which a server answers. A network that swallows packets is noticed within some ten seconds
# (https://www.postgresql.org/docs/current/libpq-connect.html).
PATIENCE_S = 3
_LIBPQ = {"connect_timeout": PATIENCE_S, "tcp_user_timeout": 10_000, "keepalives_idle": 5, "keepalives_count": 3}

# Words that are shown of an error.
_WORDS = (
    *("authentication failed", "access denied", "permission denied", "does not exist", "unknown database"),
    *("pg_hba.conf", "unable to open", "readonly", "read-only", "disk is full", "no space left"),
    *("name or service not known", "not a database", "malformed", "no such file or directory", "is a directory"),
    *("no longer compatible", "connection refused", "timeout expired", "timed out", "too many clients"),
    *("server closed the connection", "starting up", "shutting down", "terminating connection"),
    *("database is locked", "deadlock"),
)

_NO_URL = (
    f"{VARIABLE}: no URL of a database that lasts, such as sqlite:////data/record.db or "
    "postgresql://user:password@host/database (with %40 for an @ in the password, %2F for a /); 'off' switches the "
    "record off"
)


def record() -> Record | None:
    """Return the record of this user, None if it is switched off.

    Raises:
        InputError: `AUTOTUNE_RECORD` is no URL of a database, or there is no home for the usual file.
        MachineError: The package that talks to that database is not installed.
    """
    named = os.environ.get(VARIABLE, "").strip()
    if named.lower() == "off":
        return None
    if named:
        return Record(named)
    file = home() / RECORD_FILE
    former = file.with_name(FORMER_FILE)
    if former.exists() and not file.exists():
        logger.warning("autotune: %s: a record of an earlier form, which is not read any more; remove it", former)
    return Record(file)


class Record:
    """An Optuna storage of searches: a journal file, or a database by its URL.

    Nothing is opened or made before something is read or written, which may raise RecordError.

    Raises:
        InputError: `place` is neither a path nor a URL.
        MachineError: The database's driver is not installed.
    """

    def __init__(self, place: Path | str) -> None:
        self._place = place
        self.where = str(place) if isinstance(place, Path) else _shown(place)
        self._engine = _engine(place) if isinstance(place, str) else None
        self._written: dict[str, tuple[optuna.Study, dict[int, str]]] = {}  # by name: with its trials by number

    @functools.cached_property
    def storage(self) -> BaseStorage:
        """The storage, which is made if need be."""
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        if isinstance(self._place, Path):
            if self._place.is_symlink():
                raise RecordError(f"{self._place}: is a link: remove it")
            if self._place.exists():
                with self._place.open("rb") as file:
                    if file.read(1) not in (b"", b"{"):
                        raise ValueError("no journal")
            else:
                self._place.touch(mode=0o600)
            return JournalStorage(JournalFileBackend(str(self._place), lock_obj=_Lock(self._place)))
        assert self._engine is not None
        return _storage(self._engine, self.where)

    def write(self, search: RecordedSearch, trials: Sequence[FrozenTrial]) -> int:
        """Write a search with all of its trials; return how many weren't there yet.

        A trial is known by its attribute "trial", a number. Where one that ran again replaces an earlier one, the whole
        search is written anew.
        """
        with self._translated():
            if isinstance(self._place, Path) and self._place.parent == home():
                writable()
            about = search.model_dump(mode="json", exclude={"trials"})
            name = f"{search.model[:100]} {search.started[:16]} {search.id[:8]}"
            study, known = self._written.pop(name) if name in self._written else self._opened(name)
            found = _by_number(trials)
            new = [n for n, content in found.items() if known.get(n) != content]
            if known.keys() & set(new):  # finished trials can't be changed
                optuna.delete_study(study_name=name, storage=self.storage)
                study, known = self._opened(name)
            if study.user_attrs.get(SEARCH) != about:
                study.set_user_attr(SEARCH, about)
            study.add_trials([trial for trial in trials if trial.user_attrs[NUMBER] not in known])
            self._written[name] = study, known | found
        return len(new)

    def _opened(self, name: str) -> tuple[optuna.Study, dict[int, str]]:
        """Return a study, made if need be, and its trials."""
        if name in optuna.get_all_study_names(self.storage):  # creating it again would add a line to a journal
            study = optuna.load_study(study_name=name, storage=self.storage)
        else:
            study = optuna.create_study(
                study_name=name, storage=self.storage, direction="maximize", load_if_exists=True
            )
        return study, _by_number(study.get_trials(deepcopy=False))

    def searches(self, *, key: Key | None = None, latest: int | None = None) -> list[RecordedSearch]:
        """Return searches with their trials, the latest first, if `key` is given those with it, at most the `latest`.

        What can't be read is passed over with a warning; where no record is yet, there are none.
        """
        with self._translated():
            if self._is_missing():
                return []
            found = []
            for study in self.storage.get_all_studies():
                try:
                    if SEARCH in study.user_attrs:
                        found.append((RecordedSearch.model_validate(study.user_attrs[SEARCH]), study))
                except ValueError:
                    logger.warning("search %r of the record is passed over: it can't be read", study.study_name)
            found = [(search, study) for search, study in found if key is None or search.key == key]
            found.sort(key=lambda each: each[0].started, reverse=True)
            return [
                search.model_copy(update={"trials": self._trials(study._study_id, study.study_name)})
                for search, study in found[:latest]
            ]

    def _trials(self, study_id: int, name: str) -> tuple[RecordedTrial, ...]:
        """Return the trials of a study by number; if one is there twice, the later one."""
        found = {}
        for trial in self.storage.get_all_trials(study_id, deepcopy=False):
            try:
                if RECORDED in trial.user_attrs:
                    recorded = RecordedTrial.model_validate(trial.user_attrs[RECORDED])
                    found[recorded.number] = recorded
            except (ValueError, TypeError):
                logger.warning("trial %s of search %r in the record is passed over", trial.number, name)
        return tuple(found[number] for number in sorted(found))

    def forget(self, searches: Sequence[RecordedSearch]) -> None:
        """Delete searches with their trials."""
        wanted = {search.id for search in searches}
        with self._translated():
            for study in self.storage.get_all_studies():
                about = study.user_attrs.get(SEARCH)
                if isinstance(about, dict) and about.get("id") in wanted:
                    self.storage.delete_study(study._study_id)

    def _is_missing(self) -> bool:
        """Whether it is a file that isn't there, and isn't made by reading."""
        if isinstance(self._place, Path):
            return not self._place.exists()
        scheme, _, file = self._place.partition(":///")
        return scheme.startswith("sqlite") and not Path(file.partition("?")[0]).exists()

    @contextlib.contextmanager
    def _translated(self) -> Iterator[None]:
        """Turn what a storage raises into a RecordError of one line without secrets."""
        try:
            yield
        except RecordError:
            raise
        except InputError as error:
            raise RecordError(str(error)) from None
        except Exception as error:  # of Optuna, SQLAlchemy, a driver, the file system, or of a damaged file
            parts: list[str] = []
            cause: BaseException | None = error
            while cause is not None:
                parts.append(f"{cause} {getattr(cause, 'orig', '')}".lower())
                cause = cause.__cause__ or cause.__context__
            said = " ".join(parts)  # which may have secrets in it
            words = next((words for words in _WORDS if words in said), type(error).__name__)
            if words not in _WORDS and isinstance(error, ValueError | LookupError | TypeError):
                words = f"damaged, or no storage of Optuna ({words})"
            raise RecordError(f"{self.where}: can't be used: {words}") from None


def _by_number(trials: Sequence[FrozenTrial]) -> dict[int, str]:
    """Return the attributes of trials as text, by number; without those of somebody else's trials."""
    ours = [trial.user_attrs for trial in trials if NUMBER in trial.user_attrs]
    return {attributes[NUMBER]: json.dumps(attributes, sort_keys=True) for attributes in ours}


class _Lock(BaseJournalFileLock):
    """A lock on a journal that the kernel releases when its holder is killed; Optuna's own then holds 30 s.

    Of a line that was cut short, by a kill or a full disk, the beginning is removed: what was appended to it would make
    the whole file unreadable.
    """

    def __init__(self, path: Path) -> None:
        self._path = path

    def acquire(self) -> bool:
        descriptor = os.open(self._path, os.O_RDWR | os.O_NOFOLLOW)
        self._file = os.fdopen(descriptor, "r+b")
        fcntl.flock(self._file, fcntl.LOCK_EX)
        position = end = self._file.seek(0, os.SEEK_END)
        tail = b""
        while position and b"\n" not in tail[:-1]:
            if tail.endswith(b"\n"):
                return True
            position = max(0, position - 4096)
            self._file.seek(position)
            tail = self._file.read(end - position)
        cut = tail[tail.rfind(b"\n") + 1 :]
        self._file.truncate(end - len(cut))
        return True

    def release(self) -> None:
        self._file.close()


def _engine(url: str) -> sa.Engine:
    """Return what connects to a database.

    Raises:
        InputError: SQLAlchemy knows no such database.
        MachineError: Its driver is not installed.
    """
    scheme, separator, rest = url.partition("://")
    if scheme in ("postgresql", "postgres"):  # the latter is what hosts hand out; the driver is that of the extra
        url = f"postgresql+psycopg{separator}{rest}"
    options: dict[str, Any] = {"connect_args": _LIBPQ} if url.startswith("postgresql+psycopg") else {}
    try:
        return sa.create_engine(url, poolclass=sa.NullPool, **options)
    except ImportError as error:
        remedy = ' (pip install "autotune-train[postgresql]")' if options else ""
        raise MachineError(f"{VARIABLE}: this database needs {error.name}, which is not installed{remedy}") from None
    except (sa.exc.ArgumentError, ValueError, TypeError):
        raise InputError(_NO_URL) from None


def _storage(engine: sa.Engine, where: str) -> BaseStorage:
    """Return the storage of a database, its tables made if need be.

    Raises:
        RecordError: It holds a record of an earlier form.
    """
    tables = sa.inspect(engine)
    if tables.has_table("autotune_searches") and not tables.has_table("studies"):
        raise RecordError(
            f"{where}: holds a record of an earlier form (tables autotune_...), which isn't read any more: name "
            f"another database by {VARIABLE}"
        )
    options = {"poolclass": sa.NullPool, "connect_args": _LIBPQ if engine.name == "postgresql" else {}}
    url = engine.url.render_as_string(hide_password=False)
    for _ in range(2):  # beside others who make the tables too
        with contextlib.suppress(sa.exc.IntegrityError, sa.exc.ProgrammingError):
            return optuna.storages.RDBStorage(url, engine_kwargs=options)
    return optuna.storages.RDBStorage(url, engine_kwargs=options)


def _shown(url: str) -> str:
    """Return a URL for people: its kind, and host or file as far as they can't be part of a password.

    Raises:
        InputError: It is no URL of a database, or is one in memory.
    """
    scheme, separator, rest = url.partition("://")
    is_file = scheme.partition("+")[0] == "sqlite"
    if is_file and re.fullmatch(r"/[^@?]*[^@?/:][^@?:]*(\?.*)?", rest):
        return rest[1:].partition("?")[0]
    host = re.fullmatch(r"([^@/]*@)?([\w.-]*)(:\d+)?/[^@/?]+(\?[^@]*)?", rest)
    if not separator or is_file or not re.fullmatch(r"[a-z0-9]+(\+[a-z0-9_]+)?", scheme) or host is None:
        raise InputError(_NO_URL)
    return f"{scheme}://{host[2]}" if "@" in rest else f"{scheme}://..."
