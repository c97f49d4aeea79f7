"""Whether a result that was loaded says what a search would have made of it: what its types alone can't tell. Pure.

A file may come from somebody else. Its arguments are made of its configuration, workload and hardware alone, so they
are made again here: what else stands there is nobody's measurement, and would be written into scripts all the same.
Called by `result.load`.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from autotune.training_args import plan

if TYPE_CHECKING:
    from autotune.result import TuningResult


def check_arguments(result: TuningResult) -> None:
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
