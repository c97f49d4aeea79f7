"""Reads and writes values as JSON files; a reader never sees half a file.

`write_*` and `open_own` are for files of our own, which are private: a link in their place is replaced or refused.
`save_bytes` is for files that the user names: links are followed, pipes and devices stay so.
"""

import errno
import hashlib
import json
import os
import secrets
import stat
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError


class Value(BaseModel):
    """An immutable value that checks itself when made and can be written as JSON.

    Raises:
        pydantic.ValidationError: A field is missing, unknown or of the wrong type.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, ser_json_inf_nan="strings")

    def digest(self, *, leave_out: frozenset[str] = frozenset()) -> str:
        """Return a short hash of the canonical JSON without the fields `leave_out`: equal values, equal digests."""
        return digest_of(self.model_dump(mode="json", exclude=set(leave_out)))


def digest_of(fields: dict[str, Any]) -> str:
    """Return a short hash of the canonical JSON of these fields."""
    return sha256_of(json.dumps(fields, sort_keys=True, separators=(",", ":")).encode())[:10]


V = TypeVar("V", bound=Value)

TEMPORARY_SUFFIX = ".tmp"  # of files that are being written; a process that is killed meanwhile leaves one


def write_value(value: Value, path: Path) -> None:
    """Write `value` as JSON to `path`, as `write_bytes` does."""
    write_text(value.model_dump_json(indent=2) + "\n", path)


def write_text(text: str, path: Path) -> None:
    """Write `text` to `path`, as `write_bytes` does."""
    write_bytes(text.encode(), path)


def write_bytes(content: bytes, path: Path, *, mode: int = 0o600) -> None:
    """Write `content` to `path` by a temporary name, a flush to disk and a rename; `mode` is before the umask."""
    temporary = path.with_name(f".{path.name[:40]}.{secrets.token_hex(8)}{TEMPORARY_SUFFIX}")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)  # no link that somebody has put there
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:  # of a full disk, say
        temporary.unlink(missing_ok=True)
        raise


def open_own(path: Path, flags: int) -> int:
    """Return a descriptor of a file of our own, opened with `flags` of `os.open`; OSError: also if it is a link."""
    if path.is_symlink():
        raise OSError(errno.ELOOP, "a link, or no plain file", str(path))
    descriptor = os.open(path, (flags | os.O_NOFOLLOW | os.O_NONBLOCK) & ~os.O_TRUNC, 0o600)
    found = os.fstat(descriptor)
    if not stat.S_ISREG(found.st_mode) or found.st_nlink > 1:
        os.close(descriptor)
        raise OSError(errno.ELOOP, "a link, or no plain file", str(path))
    if flags & os.O_TRUNC:
        os.ftruncate(descriptor, 0)
    return descriptor


def save_bytes(content: bytes, path: Path) -> None:
    """Write `content` to where the user wants it: a file is replaced at once, its links stay; a pipe needs a reader."""
    if _is_special(path):
        path.write_bytes(content)
        return
    target = Path(os.path.realpath(path))
    write_bytes(content, target, mode=stat.S_IMODE(target.stat().st_mode) if target.exists() else 0o666)


def check_savable(path: Path, mark: str = "") -> None:
    """Check (OSError) that `path` can be written, and is no file without our `mark`; a pipe needs no reader yet."""
    if _is_special(path):
        if not os.access(path, os.W_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        return
    target = Path(os.path.realpath(path))
    existed = target.exists()
    with target.open("a+b") as file:
        file.seek(0)
        if (content := file.read(1 << 20)) and mark.encode() not in content:
            raise FileExistsError(errno.EEXIST, f"{path.name} is another file; remove it, or name another")
    if not existed:
        target.unlink()


def _is_special(path: Path) -> bool:
    """Whether `path`, its links followed, is a pipe or a device."""
    return path.exists() and not path.is_file() and not path.is_dir()


def sha256_of(content: bytes) -> str:
    """Return the digest by which the content of a file is known."""
    return hashlib.sha256(content).hexdigest()


def read_unchanged(path: Path, sha256: str) -> bytes:
    """Return the content of a file that is known by its digest; OSError: it is another one by now."""
    content = path.read_bytes()
    if sha256_of(content) != sha256:
        raise OSError(f"{path.name} is not what the search was begun with")
    return content


def read_value(kind: type[V], path: Path) -> V:
    """Return the value in `path`; OSError, pydantic.ValidationError: it can't be read, or is no such value."""
    return kind.model_validate_json(path.read_bytes())


def found_value(kind: type[V], path: Path) -> V | None:
    """Return the value in `path`, None if `read_value` refuses it."""
    try:
        return read_value(kind, path)
    except (OSError, ValidationError):
        return None
