"""Reads and writes values as JSON files; a reader never sees half a file."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TypeVar

from autotune.values import Value

V = TypeVar("V", bound=Value)


def write_value(value: Value, path: Path) -> None:
    """Write `value` as JSON to `path` by a temporary name, a flush to disk and a rename.

    Raises:
        OSError: The directory can't be written.
    """
    write_text(value.model_dump_json(indent=2) + "\n", path)


def write_text(text: str, path: Path) -> None:
    """Write `text` to `path` by a temporary name, a flush to disk and a rename."""
    write_bytes(text.encode(), path)


def write_bytes(content: bytes, path: Path) -> None:
    """Write `content` to `path` by a temporary name, a flush to disk and a rename."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    with temporary.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


def read_value(kind: type[V], path: Path) -> V:
    """Return the value in `path`.

    Raises:
        OSError: The file can't be read.
        pydantic.ValidationError: The file isn't JSON of that value.
    """
    return kind.model_validate_json(path.read_bytes())
