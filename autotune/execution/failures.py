"""Why a trial failed, in its own words: errors, with failed allocations recognised in any disguise, and its log.

Of an error one short line is said, of a failed allocation what was asked for. The library's own words, which fill many
lines, are in the log of the trial's process: its head and tail are kept, and its end is read. Where a process stood at
the time limit is read from the stack that Python's faulthandler has written there.
"""

from __future__ import annotations

import contextlib
import os
import re
import textwrap
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path, PurePath
from traceback import walk_tb

from autotune.units import parse_memory, show_memory
from autotune.value import open_own

# What libraries say when an allocation fails, all seen under RLIMIT_DATA; CUDA has an exception class of its own.
_ALLOCATION_MESSAGES = (
    "defaultcpuallocator: can't allocate memory",
    "could not execute a primitive",  # oneDNN hides the failed allocation of its scratchpad
    "could not create a primitive",
    "cuda out of memory",
    "cuda error: out of memory",  # a library's own allocation, beside torch's
    "cublas_status_alloc_failed",
    "cudnn_status_alloc_failed",
    "[errno 12]",
    "cannot allocate memory",
    "std::bad_alloc",
    "memoryerror",  # wrapped by the compilers' own exceptions
)

# Last words of processes that end without raising, seen under the same limit.
_FATAL_MESSAGES = (
    "libgomp: thread creation failed: resource temporarily unavailable",
    "cannot allocate memory for thread-local data: abort",
    "terminate called after throwing an instance of 'std::bad_alloc'",
)

# torch's CUDA allocator says '2.00 GiB', the one of the CPU '8388608 bytes', numpy 'Unable to allocate 2.00 GiB'.
_ASKED = re.compile(r"(?:tried|unable) to allocate ([\d.]+ [KMGT]iB|\d+ bytes)", re.IGNORECASE)

# Of a log, from its beginning and from its end.
HEAD_BYTES, TAIL_BYTES = 1 << 20, 1 << 16


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether `error`, or one that caused it, is an allocation that failed."""
    seen: set[int] = set()
    current: BaseException | None = error
    while current is not None and id(current) not in seen:
        text = str(current).lower()
        if isinstance(current, MemoryError) or type(current).__name__ == "OutOfMemoryError":
            return True
        if any(message in text for message in _ALLOCATION_MESSAGES):
            return True
        seen.add(id(current))
        current = current.__cause__ or current.__context__
    return False


def is_out_of_memory_log(tail: str) -> bool:
    """Return whether the log of a process that died without writing an outcome ends in a failed allocation."""
    text = tail.lower()
    return any(message in text for message in _FATAL_MESSAGES)


def first_line(error: BaseException) -> str:
    """Return the first line of an error; of a failed allocation, how much was asked for."""
    text = str(error).strip()
    asked = _ASKED.search(text)
    if asked is not None:
        amount = asked[1]
        return f"{show_memory(int(amount.split()[0])) if amount.endswith('bytes') else amount} were asked for"
    worded = (line for line in text.splitlines() if any(map(str.isalnum, line)))  # some libraries frame their messages
    line = next(worded, type(error).__name__)
    return textwrap.shorten(line, 200, placeholder=" ...")


def asked_bytes(error: BaseException) -> int:
    """Return how much a failed allocation asked for; 0: it doesn't say."""
    asked = _ASKED.search(str(error))
    return parse_memory(asked[1].removesuffix(" bytes")) if asked is not None else 0


def import_failure(error: BaseException) -> str:
    """Return why libraries can't be imported: the first of a chain of errors, whose package it is, and what to do."""
    while (cause := error.__cause__ or (None if error.__suppress_context__ else error.__context__)) is not None:
        error = cause
    said = f"{type(error).__name__}: {first_line(error)}"
    names = [frame.f_globals.get("__name__", "").partition(".")[0] for frame, _ in walk_tb(error.__traceback__)]
    # Whose frames are innermost where another package's code fails to load.
    importing = ("torch", "importlib", "_frozen_importlib", "_frozen_importlib_external", "ctypes", "__main__")
    package = next((name for name in reversed(names) if name not in importing), None)
    if package is None or package in ("autotune", "transformers"):
        return said
    with contextlib.suppress(PackageNotFoundError):
        package = f"{package} {version(package)}"
    return f"{package} can't be imported: {said}; install the build of it for torch {version('torch')}, or uninstall it"


def shortage(error: BaseException, in_use_bytes: int | None, budget_bytes: int) -> str:
    """Return the cause of a trial that ran out of memory, with what was in use of the budget, if that is known."""
    said = first_line(error)
    if "budget" in said:
        return said
    in_use = "" if in_use_bytes is None else f" with {show_memory(in_use_bytes)} in use"
    return f"{said}{in_use}; the budget is {show_memory(budget_bytes)}"


def ran_short(retries: int | None) -> tuple[str, ...]:
    """Return a warning if the allocator gave its cache back while steps were measured."""
    if not retries:
        return ()
    often = "once" if retries == 1 else f"{retries} times"
    return (
        f"the allocator ran short {often} while it was measured, and gave its cache back: it is too near the budget",
    )


class BoundedLog:
    """A log file of at most `HEAD_BYTES` + `TAIL_BYTES` and a line; what lies between is counted and dropped."""

    def __init__(self, path: Path) -> None:
        self._file = os.fdopen(open_own(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), "wb")
        self._head_left = HEAD_BYTES
        self._tail = b""
        self._dropped_bytes = 0

    def close(self) -> None:
        """Write what is left."""
        if self._dropped_bytes:
            self._file.write(f"\n[... {self._dropped_bytes} bytes left out ...]\n".encode())
        self._file.write(self._tail)
        self._file.close()

    def copy_from(self, descriptor: int) -> bool:
        """Take what the non-blocking `descriptor` holds now; return False at its end or when nothing is there."""
        try:
            chunk = os.read(descriptor, 1 << 16)
        except BlockingIOError:
            return False
        head, rest = chunk[: self._head_left], chunk[self._head_left :]
        self._head_left -= len(head)
        self._file.write(head)
        self._file.flush()
        tail = self._tail + rest
        self._tail = tail[-TAIL_BYTES:]
        self._dropped_bytes += len(tail) - len(self._tail)
        return bool(chunk)


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
    _, heading, stack = log.rpartition("(most recent call first):")
    frames = []
    for line in stack.strip("\n").splitlines() if heading else ():
        frame = re.match(r'^\s*File "(?P<path>[^"]*)", line (?P<line>\d+) in (?P<name>\S+)', line)
        if frame is None:
            break
        frames.append(frame)
    # Frames that only hand on what is called, or wait for whoever was called.
    passing = ("wrapper", "<lambda>", "__exit__", "__call__", "_wrapped_call_impl", "_call_impl", "decorate_context")
    telling = next((f for f in frames if f["name"] not in passing), frames[0] if frames else None)
    return f"{telling['name']} ({PurePath(telling['path']).name}:{telling['line']})" if telling is not None else ""
