"""One thing that has to hold, and who can tell."""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple


class Kind(StrEnum):
    """What has to be real for a check to be judged."""

    ANYWHERE = "anywhere"
    VALUES_OR_TIME = "values/time"  # of a real GPU; elsewhere it is kept and not judged


class Check(NamedTuple):
    """One thing that has to hold."""

    name: str
    passed: bool
    detail: str
    kind: Kind = Kind.ANYWHERE
