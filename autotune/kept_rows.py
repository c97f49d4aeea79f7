"""Searches and trials as rows of the lasting record, and back. Pure; called by `autotune.record`.

A row that another version wrote and this one can't read is passed over with a warning.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from typing import Any

from autotune.kept import KeptSearch, KeptTrial

logger = logging.getLogger(__name__)

# Columns of a trial that hold whole values as JSON.
LARGE_COLUMNS = ("config", "outcome")

# Fields of a search that are columns; `about` holds the others.
_SEARCH_COLUMNS = ("id", "model", "started", "verdict", "best_config_id", "speedup")


def search_row(search: KeptSearch) -> dict[str, Any]:
    """Return the row of a search."""
    written = search.model_dump(mode="json", exclude={"trials"})
    row = {name: written.pop(name) for name in _SEARCH_COLUMNS}
    row["model"] = row["model"][:255]
    return {**row, "key": search.key.short, "about": json.dumps(written)}


def search_of(row: Any, trials: Sequence[Any]) -> KeptSearch | None:
    """Return a search out of its rows, without trials that can't be read; None if it can't."""
    readable = tuple(filter(None, map(_trial, trials)))
    columns = {name: row[name] for name in _SEARCH_COLUMNS}
    try:
        return KeptSearch.model_validate({**json.loads(row["about"]), **columns, "trials": readable})
    except ValueError:
        logger.warning("search %s of the record is passed over: it can't be read", row["id"])
        return None


def trial_row(search_id: str, trial: KeptTrial) -> dict[str, Any]:
    """Return the row of a trial."""
    written = trial.model_dump()
    return {
        **written,
        "search_id": search_id,
        "purpose": str(trial.purpose),
        "status": str(trial.status),
        "config": json.dumps(trial.config),
        "outcome": json.dumps(trial.outcome),
    }


def _trial(row: Any) -> KeptTrial | None:
    columns = {name: value for name, value in row.items() if name != "search_id"}
    try:
        large = {name: json.loads(columns.get(name, "{}")) for name in LARGE_COLUMNS}
        return KeptTrial.model_validate({**columns, **large})
    except ValueError:
        logger.warning("trial %s of search %s in the record is passed over", row["number"], row["search_id"])
        return None
