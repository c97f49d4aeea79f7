"""Loads the answer of a search from a file, which may come from somebody else, and the results of its trials.

The arguments of an answer follow from its configuration, workload and hardware alone. So they are made again here, and
a file whose arguments differ is refused: nobody has measured them, and they would be written into scripts.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from autotune.errors import InputError, located
from autotune.execution.outcome import recovered
from autotune.training.arguments import plan
from autotune.units import visible
from autotune.value import read_named, read_value, write_value
from autotune.values.result import SCHEMA_VERSION, ResultData
from autotune.values.trial import TrialResult

RESULT_FILE = "result.json"


def read_result(path: str | Path) -> ResultData:
    """Return the answer saved in `path`.

    Raises:
        InputError: The file is missing, not JSON of a result, of another schema version, or its arguments aren't those
            that its configuration means.
    """
    try:
        text = read_named(Path(path))
    except OSError as error:
        is_missing = isinstance(error, FileNotFoundError)
        where = "; a search writes its answer into its run directory, runs/..." if is_missing else ""
        raise InputError(f"{path}: {error.strerror}{where}") from None
    try:
        found = ResultData.model_validate_json(text)
        check_arguments(found)
    except ValidationError as error:
        reason = located(error, "file")
    except ValueError as error:
        reason = str(error)
    else:
        return found
    raise InputError(visible(f"{path}: not a result of autotune (schema {SCHEMA_VERSION}): {reason}"))


def check_arguments(result: ResultData) -> None:
    """Refuse arguments that aren't what the best configuration means.

    Raises:
        ValueError: They differ, or the configuration doesn't fit the workload.
    """
    mapping = plan(result.best.config, result.workload, result.hardware)
    soaked = result.soaked.arguments if result.soaked is not None else {}
    meant: dict[str, Any] = {
        "training_arguments": {**mapping.tuned, **soaked},
        **mapping.model_dump(include={"model", "quantization", "adapter"}),
    }
    for name, value in result.arguments.model_dump().items():
        theirs, ours = value or {}, meant[name] or {}
        for key in {**ours, **theirs}:
            if (key in theirs) != (key in ours) or _canonical(theirs.get(key)) != _canonical(ours.get(key)):
                raise ValueError(
                    f"arguments.{name}: {key}: not what the best configuration means; the file was changed, or made by "
                    "another version of autotune: search again"
                )


def _canonical(value: Any) -> str:
    return json.dumps(value, sort_keys=True)


def trial_folders(run_directory: Path) -> list[Path]:
    """Return the folders of a search's trials, by number; a copy of one under another name is none."""
    found = (folder for folder in (run_directory / "trials").glob("*") if re.fullmatch("[0-9]{4,9}", folder.name))
    return sorted(found, key=lambda folder: int(folder.name))


def read_trial(directory: Path) -> TrialResult | None:
    """Return the result of a trial; None if it has none that can be read, or another's: then it has not finished."""
    try:
        found = read_value(TrialResult, directory / RESULT_FILE)
    except (OSError, ValidationError):
        return None
    return found if found.request.number == int(directory.name) else None


def restore(run_directory: Path) -> list[str]:
    """Write the results that a search which was killed here could not, or that were damaged since; say which.

    They are made of what the processes of the trials had written.
    """
    said = []
    for directory in trial_folders(run_directory):
        path = directory / RESULT_FILE
        if read_trial(directory) is not None or not ((result := recovered(directory)) or path.exists()):
            continue
        what = "can't be read" if path.exists() else "was not written yet"
        if result is not None:
            write_value(result, path)
        then = "recovered from what its process wrote" if result else "what it had measured counts no more"
        said.append(f"trial {int(directory.name)}: {RESULT_FILE} {what}; {then}")
    return said
