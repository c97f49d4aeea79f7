"""Faults that are planted into the process of a search before it begins: of disks, folders and clocks.

A write is what the interpreter announces to audit hooks (https://docs.python.org/3/library/audit_events.html): a file
opened to be written, a directory made, a file renamed; and a flush to disk, at which a full disk shows as well.
"""

import errno
import itertools
import os
import random
import shutil
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

_MADE = {"os.mkdir": 0, "os.rename": 1}  # position of the path that is made


class AtWrite(NamedTuple):
    """From the n-th write below a folder on, each one fails; or at that write the folder is removed."""

    folder: Path
    write: int  # from 1
    number: int = errno.ENOSPC  # of the error; 0: the folder is removed instead
    lasting: bool = True  # whether later writes fail as well

    @property
    def mark(self) -> Path:
        """A file that is there once the fault has happened."""
        return self.folder.with_name("happened")

    def __call__(self) -> None:
        writes = itertools.count(1)

        def count(path: Any) -> None:
            if not isinstance(path, str | os.PathLike) or not Path(path).is_relative_to(self.folder):
                return
            at = next(writes)
            if at == self.write or (self.lasting and at > self.write):
                self.mark.touch()
                if not self.number:
                    shutil.rmtree(self.folder, ignore_errors=True)
                    return
                raise OSError(self.number, os.strerror(self.number), os.fspath(path))

        def heard(event: str, arguments: tuple[Any, ...]) -> None:
            if event == "open" and arguments[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
                count(arguments[0])
            elif event in _MADE:
                count(arguments[_MADE[event]])

        os.fsync = lambda descriptor: count(Path(f"/proc/self/fd/{descriptor}").readlink())
        sys.addaudithook(heard)


class SmallRecord(NamedTuple):
    """The lasting record has no room for more than some bytes, as on a disk that is full."""

    most_bytes: int

    def __call__(self) -> None:
        from optuna.storages.journal import JournalFileBackend

        append = JournalFileBackend.append_logs

        def limited(backend: JournalFileBackend, logs: list[dict[str, Any]]) -> None:
            path = Path(backend._file_path)
            before = path.stat().st_size
            append(backend, logs)
            if path.name == "record.journal" and path.stat().st_size > self.most_bytes:
                os.truncate(path, max(before, self.most_bytes))  # a part of a line is there
                raise OSError(errno.ENOSPC, "No space left on device")

        JournalFileBackend.append_logs = limited


def clock_jumps() -> None:
    """Have the clock of the day jump by up to two hours, forth and back, each time that it is read."""
    read, read_ns = time.time, time.time_ns
    time.time = lambda: read() + random.uniform(-7200, 7200)
    time.time_ns = lambda: read_ns() + random.randint(-7200, 7200) * 10**9
