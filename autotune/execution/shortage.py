"""Says in one short line what a failed allocation asked for, or that the allocator ran short without failing.

Pure. Called where a trial's outcome is made; the library's own words, which fill many lines, are in the trial's log.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator

from autotune.units import show_memory

# torch's CUDA allocator says '2.00 GiB', the one of the CPU '8388608 bytes', numpy 'Unable to allocate 2.00 GiB'.
_ASKED = re.compile(r"(?:tried|unable) to allocate ([\d.]+ [KMGT]iB|\d+ bytes)", re.IGNORECASE)

_LONGEST = 200  # characters of a cause


def with_causes(error: BaseException) -> Iterator[BaseException]:
    """Yield `error`, and those that caused it, each once."""
    seen: set[int] = set()
    current: BaseException | None = error
    while current is not None and id(current) not in seen:
        seen.add(id(current))
        yield current
        current = current.__cause__ or current.__context__


def first_line(error: BaseException) -> str:
    """Return what an error says: of a failed allocation how much was asked for, otherwise its first line."""
    text = str(error).strip()
    asked = _ASKED.search(text)
    if asked is not None:
        amount = asked[1]
        return f"{show_memory(int(amount.split()[0])) if amount.endswith('bytes') else amount} were asked for"
    line = (text or type(error).__name__).splitlines()[0]
    return textwrap.shorten(line, _LONGEST, placeholder=" ...")


def shortage(error: BaseException, in_use_bytes: int | None, budget_bytes: int) -> str:
    """Return the cause of a trial that ran out of memory.

    Args:
        error: As it reached the trial's end.
        in_use_bytes: Of the budget, when it failed; None if it can't be told.
        budget_bytes: The trial's.
    """
    said = first_line(error)
    if "budget" in said:
        return said
    in_use = "" if in_use_bytes is None else f" with {show_memory(in_use_bytes)} in use"
    return f"{said}{in_use}; the budget is {show_memory(budget_bytes)}"


def ran_short(retries: int | None) -> tuple[str, ...]:
    """Say so if the allocator had no room to keep its cache while steps were measured."""
    if not retries:
        return ()
    often = "once" if retries == 1 else f"{retries} times"
    return (
        f"the allocator ran short {often} while it was measured, and gave its cache back: it is too near the budget",
    )
