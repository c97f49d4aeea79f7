"""The files that the processes of a trial leave in its directory: an outcome and a log for each rank."""

from __future__ import annotations

import json
from pathlib import Path


def outcome_file(rank: int = 0) -> str:
    """Return the name of the file that rank `rank` writes its outcome to."""
    return f"rank-{rank}.json"


def log_file(rank: int = 0) -> str:
    """Return the name of the file that holds what rank `rank` printed."""
    return f"log-{rank}.txt" if rank else "log.txt"


def has_failed(outcome: Path, has_ended: bool) -> bool:
    """Return whether a rank has failed: by its own word, or because it has ended without one.

    Args:
        outcome: Its outcome file, which appears whole.
        has_ended: Whether its process has.
    """
    try:
        return bool(json.loads(outcome.read_bytes())["kind"] == "failure")
    except FileNotFoundError:
        return has_ended
    except (OSError, ValueError, TypeError, KeyError):
        return True
