"""What a target's writer hands back: files, the commands that use them, and what of the answer they don't say."""

from __future__ import annotations

from typing import NamedTuple


class Draft(NamedTuple):
    """Files of one target."""

    files: dict[str, str]  # by name
    launch: tuple[str, ...] = ()  # command lines, the one to prefer first
    lost: tuple[str, ...] = ()  # what the target can't express, a line each
