"""Searches as Optuna studies: the study of a run directory, and the lasting record of all searches.

A search is a study of its own. Its user attribute "search" describes it
(:class:`~autotune.storage.recorded.RecordedSearch`); "trial" of a trial is its number, "result" the whole `TrialResult`
as JSON. The lasting record is a journal file in `$AUTOTUNE_HOME`; `AUTOTUNE_RECORD` names a database in its place, by
the URL of an Optuna `RDBStorage`, or is "off". Many searches may write at once. A fault is a :class:`RecordError` of
one line. A URL holds a password, and drivers repeat parts of it: so of what a driver says only known words are shown.
"""

import contextlib
import fcntl
import functools
import logging
import os
import re
import time
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path

import optuna
import sqlalchemy as sa
from optuna.storages import BaseStorage, JournalStorage, RDBStorage, get_storage
from optuna.storages.journal import JournalFileBackend
from optuna.storages.journal._file import BaseJournalFileLock
from optuna.trial import FrozenTrial

from autotune.errors import InputError, MachineError, RecordError
from autotune.storage.home import home, writable
from autotune.storage.recorded import RecordedSearch, read_recorded

logger = logging.getLogger(__name__)

VARIABLE = "AUTOTUNE_RECORD"  # of the environment; names the URL
RECORD_FILE = "record.journal"

SEARCH, NUMBER, RESULT = "search", "trial", "result"  # user attributes: of a study, and two of a trial
PATIENCE_S = 10  # for another writer of a file, and for a server's answer to a statement

# Arguments of a connection to PostgreSQL, where its URL has no others: a server that can't be reached or doesn't answer
# is noticed within some ten seconds (https://www.postgresql.org/docs/current/libpq-connect.html).
_LIBPQ = {
    "connect_timeout": 3,
    "tcp_user_timeout": 1000 * PATIENCE_S,
    "keepalives_idle": 5,
    "keepalives_interval": 2,
    "keepalives_count": 3,
    "options": f"-c statement_timeout={PATIENCE_S}s",
}

# Words that are shown of an error.
_WORDS = (
    *("authentication failed", "access denied", "permission denied", "does not exist", "unknown database"),
    *("pg_hba.conf", "unable to open", "readonly", "read-only", "disk is full", "no space left"),
    *("name or service not known", "not a database", "malformed", "no such file or directory", "is a directory"),
    *("no longer compatible", "connection refused", "timeout expired", "timed out", "statement timeout"),
    *("too many clients", "server closed the connection", "starting up", "shutting down", "terminating connection"),
    *("database is locked", "deadlock", "unsupported startup parameter"),
)

_NO_URL = (
    f"{VARIABLE}: no URL of a database that lasts, such as sqlite:////data/record.db or "
    "postgresql://user:password@host/database (with %40 for an @ in the password, %2F for a /); 'off' switches the "
    "record off"
)


def record() -> "Record | None":
    """Return the user's record, None if it is off; InputError, MachineError: no database's URL, or no driver."""
    named = os.environ.get(VARIABLE, "").strip()
    return None if named.lower() == "off" else Record(named or home() / RECORD_FILE)


class Record:
    """An Optuna storage of searches, a journal file or a database by its URL, opened and made when first used."""

    def __init__(self, place: Path | str) -> None:
        self._path = place if isinstance(place, Path) else None
        self._url = self.where = str(place)
        if self._path is None:
            self.where = _shown(self._url)
            scheme, _, rest = self._url.partition("://")
            if scheme in ("postgresql", "postgres"):  # the latter is what hosts hand out
                self._url = f"postgresql+psycopg://{rest}"
            try:
                with warnings.catch_warnings():  # of options that a driver doesn't know
                    warnings.simplefilter("error", sa.exc.SAWarning)
                    sa.create_engine(self._url)
            except ImportError as error:
                remedy = ' (pip install "autotune-train[postgresql]")' * (error.name == "psycopg")
                needs = f"this database needs {error.name}, which is not installed{remedy}"
                raise MachineError(f"{VARIABLE}: {needs}") from None
            except (sa.exc.ArgumentError, sa.exc.SAWarning, ValueError, TypeError):
                raise InputError(_NO_URL) from None

    @functools.cached_property
    def storage(self) -> BaseStorage:
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        if self._path is None:
            url = sa.make_url(self._url)
            ours = _LIBPQ if url.drivername.startswith("postgresql+psycopg") else {}
            arguments = {name: value for name, value in ours.items() if name not in url.query}
            options = {"poolclass": sa.NullPool, "connect_args": arguments}
            for _ in range(2):  # beside others who make the tables too
                with contextlib.suppress(sa.exc.IntegrityError, sa.exc.ProgrammingError):
                    return get_storage(RDBStorage(self._url, engine_kwargs=options))
            return get_storage(RDBStorage(self._url, engine_kwargs=options))
        if self._path.is_symlink():
            raise RecordError(f"{self._path}: is a link: remove it")
        if not self._path.exists():
            self._path.touch(mode=0o600)
        with self._path.open("rb") as file:
            if file.read(1) not in (b"", b"{"):
                raise ValueError("no journal")
        return JournalStorage(JournalFileBackend(str(self._path), lock_obj=_Lock(self._path)))

    def write(self, search: RecordedSearch, trials: Sequence[FrozenTrial]) -> None:
        """Write a search with those of its trials that aren't there yet.

        A trial is known by its attribute "trial", a number. If one has run again, the whole search is written anew.
        """
        with self._translated():
            if self._path is not None and self._path.name == RECORD_FILE:
                writable()
            about = search.model_dump(mode="json", exclude={"trials"})
            name = f"{search.model[:100]} {search.started[:16]} {search.id[:8]}"
            wanted = {trial.user_attrs[NUMBER]: trial for trial in trials}
            study = self._opened(name)
            there = [trial.user_attrs for trial in study.get_trials(deepcopy=False)]
            known = {attributes[NUMBER]: attributes for attributes in there if NUMBER in attributes}
            if any(n in wanted and wanted[n].user_attrs != attributes for n, attributes in known.items()):
                optuna.delete_study(study_name=name, storage=self.storage)  # finished trials can't be changed
                study, known = self._opened(name), {}
            if study.user_attrs.get(SEARCH) != about:
                study.set_user_attr(SEARCH, about)
            study.add_trials([trial for number, trial in wanted.items() if number not in known])

    def _opened(self, name: str) -> optuna.Study:
        if name in optuna.get_all_study_names(self.storage):  # creating it again would add a line to a journal
            return optuna.load_study(study_name=name, storage=self.storage)
        return optuna.create_study(study_name=name, storage=self.storage, direction="maximize", load_if_exists=True)

    def searches(self, *, key: str | None = None, latest: int | None = None) -> list[RecordedSearch]:
        """Return searches with their trials, the latest first, those with `key` if given; damaged ones are left out."""
        with self._translated():
            if self._path is not None and not self._path.exists():
                return []
            found, whole, unread = [], [], 0
            for study in self.storage.get_all_studies():
                try:
                    if SEARCH in study.user_attrs:
                        search = RecordedSearch.model_validate(study.user_attrs[SEARCH])
                        found += [(search, study._study_id)] if key in (None, search.key) else []
                except ValueError:
                    unread += 1
            found.sort(key=lambda each: each[0].started, reverse=True)
            for search, study_id in found[:latest]:
                trials = {}  # by number; if one is there twice, the later one
                for trial in self.storage.get_all_trials(study_id, deepcopy=False):
                    try:
                        if RESULT in trial.user_attrs:
                            result = read_recorded(trial.user_attrs[RESULT])
                            trials[result.request.number] = result
                    except ValueError:
                        unread += 1
                whole.append(search.model_copy(update={"trials": tuple(trials[n] for n in sorted(trials))}))
            if unread:
                passed = f"{unread} searches or trials of the record are passed over: damaged, or of an earlier form"
                logger.warning("autotune: %s: %s", self.where, passed)
            return whole

    def forget(self, searches: Sequence[RecordedSearch]) -> None:
        wanted = {search.id for search in searches}
        with self._translated():
            for study in self.storage.get_all_studies():
                about = study.user_attrs.get(SEARCH)
                if isinstance(about, dict) and about.get("id") in wanted:
                    self.storage.delete_study(study._study_id)

    @contextlib.contextmanager
    def _translated(self) -> Iterator[None]:
        """Turn errors of a storage into a RecordError of one line without secrets."""
        try:
            yield
        except InputError as error:
            raise RecordError(str(error)) from None
        except Exception as error:  # of Optuna, SQLAlchemy, a driver, the file system, or of a damaged file
            cause: BaseException | None = error
            said = ""  # may hold secrets
            while cause is not None:
                said += f"{cause} {getattr(cause, 'orig', '')} ".lower()
                cause = cause.__cause__ or cause.__context__
            words = next((words for words in _WORDS if words in said), type(error).__name__)
            if words not in _WORDS and isinstance(error, ValueError | LookupError | TypeError):
                words = f"damaged, or no storage of Optuna ({words})"
            raise RecordError(f"{self.where}: can't be used: {words}") from None


class _Lock(BaseJournalFileLock):
    """A lock on a journal that the kernel releases when its holder is killed; Optuna's own then holds 30 s.

    A line that was cut short, by a kill or a full disk, is removed: one appended to it would make the file unreadable.
    """

    def __init__(self, path: Path) -> None:
        self._path = path

    def acquire(self) -> bool:
        self._file = os.fdopen(os.open(self._path, os.O_RDWR | os.O_NOFOLLOW), "r+b")
        deadline = time.monotonic() + PATIENCE_S
        while True:
            try:
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    self._file.close()
                    raise TimeoutError("timed out: another process holds it") from None
                time.sleep(0.01)
        position = end = self._file.seek(0, os.SEEK_END)
        tail = b""
        while position and b"\n" not in tail:
            position = max(0, position - 4096)
            self._file.seek(position)
            tail = self._file.read(end - position)
        self._file.truncate(end - len(tail) + tail.rfind(b"\n") + 1)
        return True

    def release(self) -> None:
        self._file.close()


def _shown(url: str) -> str:
    """Return the kind of a URL, and its host or file if no password can be in them; InputError: it is no such URL."""
    scheme, separator, rest = url.partition("://")
    is_file = scheme.partition("+")[0] == "sqlite"
    if is_file and re.fullmatch(r"/[^@?]*[^@?/:][^@?:]*(\?.*)?", rest):
        return rest[1:].partition("?")[0]
    host = re.fullmatch(r"([^@/]*@)?([\w.-]*)(:\d+)?/[^@/?]+(\?[^@]*)?", rest)
    if not separator or is_file or not re.fullmatch(r"[a-z0-9]+(\+[a-z0-9_]+)?", scheme) or host is None:
        raise InputError(_NO_URL)
    return f"{scheme}://{host[2]}" if "@" in rest else f"{scheme}://..."
