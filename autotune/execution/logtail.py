"""The log of a trial's process: head and tail of what it prints are kept, and its end is read.

Where a process stood at the time limit is read from the stack that Python's faulthandler has written there.
"""

from __future__ import annotations

import os
import re
from collections import deque
from pathlib import Path, PurePath
from typing import Self

HEAD_BYTES = 1 << 20
TAIL_BYTES = 1 << 16
_CHUNK_BYTES = 1 << 16

_HEADING = "(most recent call first):"
_FRAME = re.compile(r'^\s*File "(?P<path>[^"]*)", line (?P<line>\d+) in (?P<name>\S+)')

# Frames that only hand on what is called, or wait for whoever was called.
_PASSING = ("wrapper", "<lambda>", "__exit__", "__call__", "_wrapped_call_impl", "_call_impl", "decorate_context")


class BoundedLog:
    """A log file of at most `HEAD_BYTES` + `TAIL_BYTES` and a line; what lies between is counted and dropped."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("wb")
        self._head_left = HEAD_BYTES
        self._tail: deque[bytes] = deque()
        self._tail_bytes = 0
        self._dropped_bytes = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._dropped_bytes:
            self._file.write(f"\n[... {self._dropped_bytes} bytes left out ...]\n".encode())
        for chunk in self._tail:
            self._file.write(chunk)
        self._file.close()

    def copy_from(self, descriptor: int) -> bool:
        """Take what the non-blocking `descriptor` holds now; return False at its end or when nothing is there."""
        try:
            chunk = os.read(descriptor, _CHUNK_BYTES)
        except BlockingIOError:
            return False
        self._write(chunk)
        return bool(chunk)

    def _write(self, chunk: bytes) -> None:
        head, rest = chunk[: self._head_left], chunk[self._head_left :]
        self._head_left -= len(head)
        self._file.write(head)
        self._file.flush()
        if rest:
            self._tail.append(rest)
            self._tail_bytes += len(rest)
        while self._tail_bytes > TAIL_BYTES:
            first = self._tail.popleft()
            dropped = min(len(first), self._tail_bytes - TAIL_BYTES)
            if dropped < len(first):
                self._tail.appendleft(first[dropped:])
            self._tail_bytes -= dropped
            self._dropped_bytes += dropped


def read_tail(path: Path, *, lines: int = 15, size: int = 8192) -> str:
    """Return the last lines of a log, undecodable bytes replaced; empty if there is no log."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - size))
            text = file.read().decode("utf-8", errors="replace")
    except OSError:
        return ""
    plain = text.replace("\r", "\n").replace("\t", "    ")  # a progress bar returns to the start of its line
    printable = "".join(c if c.isprintable() or c == "\n" else "\N{REPLACEMENT CHARACTER}" for c in plain)
    return "\n".join([line for line in printable.split("\n") if line.strip()][-lines:])


def place_in(log: str) -> str:
    """Return the innermost call of the last stack in a log, such as 'broadcast (distributed_c10d.py:3098)'; or ''."""
    _, heading, stack = log.rpartition(_HEADING)
    if not heading:
        return ""
    frames = []
    for line in stack.strip("\n").splitlines():
        frame = _FRAME.match(line)
        if frame is None:
            break
        frames.append(frame)
    telling = next((f for f in frames if f["name"] not in _PASSING), frames[0] if frames else None)
    return f"{telling['name']} ({PurePath(telling['path']).name}:{telling['line']})" if telling is not None else ""
