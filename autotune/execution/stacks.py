"""Reads from a log where a process stood: the stack that Python's faulthandler has written when it was asked."""

from __future__ import annotations

import re
from pathlib import PurePath

_HEADING = "(most recent call first):"
_FRAME = re.compile(r'^\s*File "(?P<path>[^"]*)", line (?P<line>\d+) in (?P<name>\S+)')

# Frames that only hand on what is called, or wait for whoever was called.
_PASSING = ("wrapper", "<lambda>", "__exit__", "__call__", "_wrapped_call_impl", "_call_impl", "decorate_context")


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
