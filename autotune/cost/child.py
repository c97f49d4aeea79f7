"""Traces the families of a search in a child process; entered by the launcher like a trial.

It touches no device. Families are traced in the order they are asked for until the processor time for it is spent; one
that can't be traced is left out, with the reason. Wall time is limited by what the search has alone: a busy machine
would leave it blind.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable
from pathlib import Path

from pydantic import Field, ValidationError

from autotune.cost.family import Family, shape_of
from autotune.cost.profile import Profile
from autotune.errors import InputError
from autotune.value import Value, read_value, write_value
from autotune.values.workload import Workload

ENTRY = "autotune.cost.child:run_trace"


class TraceRequest(Value):
    """What is to be traced."""

    workload: Workload
    families: tuple[Family, ...]
    parameters: int = Field(description="of the model, that a trace has to come to")
    limit_s: float = Field(gt=0, description="processor time; no family is begun after this")
    within_s: float = Field(default=math.inf, gt=0, description="wall time, in the same way")


class Traces(Value):
    """What was traced, in the same order, and what couldn't be."""

    profiles: tuple[Profile, ...]
    failures: tuple[str, ...] = ()


def run_trace(directory: Path) -> None:
    """Answer the request in `directory`; until then each profile lies there by itself, should this process be ended."""
    kept: list[Path] = []

    def keep(profile: Profile) -> None:
        kept.append(directory / f"profile-{len(kept):03}.json")
        write_value(profile, kept[-1])

    write_value(traces_of(read_value(TraceRequest, directory / "request.json"), keep), directory / "answer.json")
    for path in kept:
        path.unlink()


def traces_left(directory: Path, failure: str) -> Traces:
    """Return what a child that was ended had traced, and `failure`."""
    profiles = []
    for path in sorted(directory.glob("profile-*.json")):
        with contextlib.suppress(OSError, ValidationError):
            profiles.append(read_value(Profile, path))
    return Traces(profiles=tuple(profiles), failures=(failure,))


def traces_of(request: TraceRequest, keep: Callable[[Profile], None] = lambda profile: None) -> Traces:
    """Return the profiles of the families, in this process, which comes to load torch; each is given to `keep`."""
    from autotune.cost.profiler import profile

    shape = shape_of(request.workload)
    profiles: list[Profile] = []
    failures: dict[str, None] = {}
    started, ends_at = time.process_time(), time.monotonic() + request.within_s
    for done, family in enumerate(request.families):
        if time.process_time() - started > request.limit_s or time.monotonic() > ends_at:
            failures[
                f"{len(request.families) - done} kinds of configurations are tried without one: tracing takes too long"
            ] = None
            break
        try:
            profiles.append(profile(request.workload.model, family, shape, parameters=request.parameters))
            keep(profiles[-1])
        except InputError as error:
            failures[str(error)] = None
    return Traces(profiles=tuple(profiles), failures=tuple(failures))
