"""The folder that holds everything of one search.

::

    runs/t5-small-20261121-020000-47/
        search.json           the plan: options, and all that is settled before the first trial
        trials/0000/          request.json, result.json and log.txt of each trial
        best-config.json      the answer, rewritten whenever it changes
        data/                 lengths of the real data, a recipe's rows, or pickled code
        study.journal         the Optuna study: parameters, values, constraints, and whole results as user attributes
        explain/trials/       trials of `autotune explain`, with numbers of their own
        report.html           of `autotune report`
        lock                  held while a search runs

The result files count: a trial that isn't in the study is added when the search goes on. An answer may come from
somebody else: its arguments follow from its configuration, workload and hardware, so they are made again when it is
read, and a file with other arguments is refused.
"""

import contextlib
import fcntl
import json
import os
import re
import shutil
import time
from pathlib import Path
from typing import IO, Self

from pydantic import ValidationError

from autotune.errors import DISK_IS_FULL, InfrastructureError, InputError, RunDirectoryError, located, resuming, writing
from autotune.execution.outcome import recovered
from autotune.execution.places import full_disk
from autotune.execution.runner import trial_directory
from autotune.planning.plan import SearchPlan
from autotune.storage.trust import check_within
from autotune.training.arguments import arguments_of
from autotune.units import visible
from autotune.value import TEMPORARY_SUFFIX, Value, found_value, open_own, read_value, write_value
from autotune.values.result import ANSWER_FILE as ANSWER_FILE
from autotune.values.result import SCHEMA_VERSION as ANSWER_VERSION
from autotune.values.result import ResultData
from autotune.values.trial import TrialResult

PLAN_FILE = "search.json"
RESULT_FILE = "result.json"
STUDY_FILE = "study.journal"
EXPLAIN_FOLDER = "explain"


def default_run_directory(model: str) -> Path:
    """Return ``runs/<model>-<time>-<process>``, slashes and other awkward characters of the model's name replaced."""
    safe = re.sub(r"[^\w.-]+", "-", model.strip("/. ")).strip("-") or "model"
    return Path("runs") / f"{safe[-80:]}-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"


class RunDirectory:
    """A run directory, locked for one search while entered.

    The lock is on the file `lock`, which is never replaced; a lock on a file that was removed counts for nothing.
    """

    def __init__(self, path: Path, *, is_new: bool = False, whole: Path | None = None) -> None:
        self.path, self._is_new = path, is_new
        self._whole = whole or path  # links may lead to any place in it
        self._made_here = self._has_begun = False

    @classmethod
    def create(cls, path: Path) -> "RunDirectory":
        """Return a new run directory, made and writable; RunDirectoryError: it isn't, or holds a search already."""
        directory = cls(path, is_new=True)
        directory._open_lock().close()
        directory._check_new()
        return directory

    @classmethod
    def existing(cls, path: Path) -> "RunDirectory":
        """Return the directory of an earlier search; RunDirectoryError: it holds none, or a link leads out of it."""
        if not (path / PLAN_FILE).is_file():
            raise RunDirectoryError(f"{path}: holds no search (no {PLAN_FILE}); `autotune find` starts one")
        check_within(path)
        return cls(path)

    def __enter__(self) -> Self:
        while True:
            lock = self._open_lock()
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if self._is_lock(lock):
                    break
            except BlockingIOError:
                try:  # `is_running` of another process holds a shared lock for a moment
                    fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
                except OSError:
                    lock.close()
                    raise RunDirectoryError(f"{self.path}: another search is running in it") from None
            except OSError:  # the file system has no locks
                break
            lock.close()  # of a directory that was removed between opening and locking, or looked at just then
            time.sleep(0.01)
        self._file = lock  # the lock lasts as long as the file is open
        try:
            self._check_new()  # another search may have come to its end since this one was made
            check_within(self._whole)
        except RunDirectoryError:
            lock.close()
            raise
        # Left by searches that were killed here; reports are written without the lock, and have others.
        for name in (f".{PLAN_FILE}", f".{ANSWER_FILE}", ".processes*.json", "trials/*/.*.json"):
            for path in self.path.glob(f"{name}.*{TEMPORARY_SUFFIX}"):
                with contextlib.suppress(OSError):
                    path.unlink()
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        named = not isinstance(error, OSError) and str(self.path.resolve()) in str(error)  # a log that says more
        try:
            if error is None or isinstance(error, OSError | InfrastructureError):
                self._check_place(error)
        finally:
            holds_search = (self.path / PLAN_FILE).exists()
            if self._made_here and not holds_search and not named and self._is_lock(self._file):
                # Refused before there was anything to keep. It is renamed, so that no search begins in it meanwhile.
                hidden = self.path.with_name(f".{self.path.name}.{os.getpid()}")
                with contextlib.suppress(OSError):
                    self.path.rename(hidden)
                    shutil.rmtree(hidden, ignore_errors=True)
            self._file.close()

    def _check_place(self, error: OSError | InfrastructureError | None) -> None:
        """Raise InfrastructureError if the directory is gone, its disk is full, or it can't be written any more."""
        if not self._is_lock(self._file) and self._has_begun:
            then = "was removed while the search ran; its trials are lost"
            if os.fstat(self._file.fileno()).st_nlink:  # the lock is still there, under another name
                moved = Path(f"/proc/self/fd/{self._file.fileno()}").readlink().parent
                then = f"was moved while the search ran; {resuming(moved)} goes on"
            raise InfrastructureError(f"{self.path}: {then}") from error
        if not isinstance(error, OSError):
            return
        if error.errno in DISK_IS_FULL:
            raise full_disk(self.path) from error
        if Path(str(error.filename or "")).absolute().is_relative_to(self.path.absolute()):
            raise InfrastructureError(f"{error.filename}: can't be written: {error.strerror}") from error

    def _open_lock(self) -> IO[str]:
        """Return the lock's file, opened; the directory of a new search is made."""
        for left in reversed(range(10)):  # other processes may remove it meanwhile
            try:
                if self._is_new and not self.path.is_dir():
                    self.path.parent.mkdir(parents=True, exist_ok=True)
                    with contextlib.suppress(FileExistsError):  # another process was faster, or it is no directory
                        self.path.mkdir(mode=0o700)
                        self._made_here = True
                return os.fdopen(open_own(self.path / "lock", os.O_WRONLY | os.O_CREAT | os.O_APPEND), "a")
            except OSError as error:
                # A new one is made again if another search, which was refused, has just removed it.
                if not (self._is_new and left and isinstance(error, FileNotFoundError)):
                    kind = InfrastructureError if error.errno in DISK_IS_FULL else RunDirectoryError
                    option = "--run-dir " if self._is_new else ""
                    raise kind(f"{option}{self.path}: can't be written: {error.strerror}") from None
        raise AssertionError("the last attempt returns or raises")

    def _is_lock(self, lock: IO[str]) -> bool:
        """Whether `lock` is the file that another process would open."""
        try:
            return os.path.samestat(os.fstat(lock.fileno()), (self.path / "lock").stat())
        except OSError:
            return False

    def _check_new(self) -> None:
        if self._is_new and (self.path / PLAN_FILE).exists():
            raise RunDirectoryError(f"--run-dir {self.path}: holds a search already; {resuming(self.path)} goes on")

    def is_running(self) -> bool:
        """Whether a search, or an explanation of one, runs in it now."""
        try:
            with (self.path / "lock").open() as lock:
                fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        except OSError:  # no lock, or a file system without: nothing says that one does
            return False
        return False

    def inside(self, name: str) -> "RunDirectory":
        """Return a directory of further trials inside this one, made if it isn't there."""
        path = self.path / name
        with writing(str(path), RunDirectoryError):
            path.mkdir(exist_ok=True)
            data = path / "data"
            if (self.path / "data").is_dir() and not data.exists():
                data.symlink_to(Path("..") / "data")  # trials look for their data beside them
        return RunDirectory(path, whole=self.path)

    def write_plan(self, plan: Value) -> None:
        write_value(plan, self.path / PLAN_FILE)
        self._is_new, self._has_begun = False, True

    def write_result(self, result: TrialResult) -> None:
        """Write the result of a trial that no process runs."""
        directory = trial_directory(self.path, result.request.number)
        for folder in (directory.parent, directory):  # not the run directory itself, which may have been removed
            folder.mkdir(exist_ok=True)
        write_value(result, directory / RESULT_FILE)

    def write_answer(self, result: ResultData) -> None:
        write_value(result, self.path / ANSWER_FILE)

    def answer(self) -> ResultData | None:
        """Return the answer; None if no trial has completed; InputError: its file can't be read."""
        path = self.path / ANSWER_FILE
        return read_result(path) if path.exists() else None

    def answer_to(self, purpose: str) -> ResultData:
        """Return the answer for a `purpose`, such as 'explain'; InputError: it can't be read, or there is none yet."""
        if (found := self.answer()) is None:
            why = f"no trial has completed ({resuming(self.path)} goes on)"
            raise InputError(f"{self.path}: nothing to {purpose}: {why}")
        return found

    def results(self) -> list[TrialResult]:
        """Return every finished trial, by number; one without a readable result has not finished."""
        return [result for result in map(_result_in, self.trial_folders()) if result is not None]

    def trial_folders(self) -> list[Path]:
        """Return the folders of a search's trials, by number, without copies under other names."""
        found = (folder for folder in (self.path / "trials").glob("*") if re.fullmatch("[0-9]{4,9}", folder.name))
        return sorted(found, key=lambda folder: int(folder.name))

    def restore(self) -> list[str]:
        """Write missing or damaged results anew from what the trials' processes left; return a line for each."""
        said = []
        for directory in self.trial_folders():
            path = directory / RESULT_FILE
            if _result_in(directory) is not None or not ((result := recovered(directory)) or path.exists()):
                continue
            what = "can't be read" if path.exists() else "was not written yet"
            if result is not None:
                write_value(result, path)
            then = "recovered from the files of its process" if result else "its measurement counts no more"
            said.append(f"trial {int(directory.name)}: {RESULT_FILE} {what}; {then}")
        return said


def read_plan(run_dir: Path) -> SearchPlan:
    """Return the plan of the search in a run directory; RunDirectoryError: it can't be read, or has another schema."""
    try:
        return read_value(SearchPlan, run_dir / PLAN_FILE)
    except ValidationError as error:
        reason = f"{located(error, 'the whole')}; it was changed by hand or by another version: start a new search"
    except (OSError, ValueError, RecursionError) as error:  # of which JSON's errors are kinds
        reason = str(error).splitlines()[0]
    raise RunDirectoryError(f"{run_dir}: {PLAN_FILE} can't be read: {reason}")


def read_result(path: str | Path) -> ResultData:
    """Return the answer saved in `path`, or in that run directory.

    InputError: it can't be read, or its arguments aren't its configuration's.
    """
    file = Path(path, ANSWER_FILE) if Path(path).is_dir() else Path(path)
    try:
        text = file.read_bytes()
    except OSError as error:
        where = "; a search writes its answer into its run directory, runs/..." * isinstance(error, FileNotFoundError)
        raise InputError(f"{path}: {error.strerror}{where}") from None
    try:
        found = ResultData.model_validate_json(text)
        _check_arguments(found)
        return found
    except ValidationError as error:
        reason = located(error, "file")
    except ValueError as error:
        reason = str(error)
    if file.name == ANSWER_FILE and file.with_name(PLAN_FILE).is_file():
        reason += f"; {resuming(file.parent)} writes it again"
    raise InputError(visible(f"{path}: not a result of autotune (schema {ANSWER_VERSION}): {reason}"))


def _check_arguments(result: ResultData) -> None:
    """Refuse (ValueError) arguments that aren't those of the best configuration."""
    meant = arguments_of(result.best.config, result.workload, result.hardware, result.soaked).model_dump()
    for name, value in result.arguments.model_dump().items():
        theirs, ours = ({k: json.dumps(v, sort_keys=True) for k, v in (d or {}).items()} for d in (value, meant[name]))
        for key in {**ours, **theirs}:
            if theirs.get(key) != ours.get(key):
                raise ValueError(
                    f"arguments.{name}: {key}: not what the best configuration means; the file was changed, or made by "
                    "another version of autotune: search again"
                )


def _result_in(directory: Path) -> TrialResult | None:
    """Return the result of a trial; None: there is none, it can't be read, or it is another's."""
    found = found_value(TrialResult, directory / RESULT_FILE)
    return found if found is not None and found.request.number == int(directory.name) else None
