"""Recognises a failed allocation in any of its disguises, and says in one short line what was asked for.

The library's own words, which fill many lines, are in the trial's log. Pure.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator

from autotune.units import show_memory

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

_LONGEST = 200  # characters of a cause


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether `error`, or one that caused it, is an allocation that failed."""
    for current in _with_causes(error):
        if isinstance(current, MemoryError) or type(current).__name__ == "OutOfMemoryError":
            return True
        text = str(current).lower()
        if any(message in text for message in _ALLOCATION_MESSAGES):
            return True
    return False


def is_out_of_memory_log(tail: str) -> bool:
    """Return whether the log of a process that died without writing an outcome ends in a failed allocation."""
    text = tail.lower()
    return any(message in text for message in _FATAL_MESSAGES)


def _with_causes(error: BaseException) -> Iterator[BaseException]:
    """Yield `error`, and those that caused it, each once."""
    seen: set[int] = set()
    current: BaseException | None = error
    while current is not None and id(current) not in seen:
        seen.add(id(current))
        yield current
        current = current.__cause__ or current.__context__


def first_line(error: BaseException) -> str:
    """Return the first line of an error; of a failed allocation, how much was asked for."""
    text = str(error).strip()
    asked = _ASKED.search(text)
    if asked is not None:
        amount = asked[1]
        return f"{show_memory(int(amount.split()[0])) if amount.endswith('bytes') else amount} were asked for"
    worded = (line for line in text.splitlines() if any(map(str.isalnum, line)))  # some libraries frame their messages
    line = next(worded, type(error).__name__)
    return textwrap.shorten(line, _LONGEST, placeholder=" ...")


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
