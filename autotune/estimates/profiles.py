"""The traces of a workload (`autotune.cost.profile`): made when first needed, or for a search by a child process.

:class:`Profiles` reads them from the home, or makes them in this process. For a search the launcher enters `run_trace`
in a process of its own, like a trial; it touches no device. There families are traced in the order they are asked for
until the processor time for it is spent; one that can't be traced is left out, with the reason. Wall time is limited by
what the search has alone: a busy machine would leave it blind.
"""

from __future__ import annotations

import contextlib
import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import Field, ValidationError

from autotune.cost.family import Family, shape_of
from autotune.cost.profile import Profile
from autotune.errors import InputError
from autotune.storage.home import read_trace, write_trace
from autotune.value import Value, read_value, write_value
from autotune.values.workload import Workload

if TYPE_CHECKING:
    from autotune.cost.profiler import Shallow


class Profiles(Mapping[Family, Profile]):
    """The profiles of one workload by family; one neither `known` nor stored is traced when it is first looked up.

    Attributes:
        failures: Why a family can't be traced.
    """

    def __init__(self, workload: Workload, parameters: int, known: Mapping[Family, Profile] | None = None) -> None:
        self._workload = workload
        self._parameters = parameters
        self._traced: dict[Family, Profile] = dict(known or {})
        self._shallow: dict[tuple[object, ...], Shallow] = {}
        self.failures: dict[Family, InputError] = {}

    def __getitem__(self, family: Family) -> Profile:
        """Return the profile of `family`.

        Raises:
            KeyError: The model can't be traced so; `failures` has the reason.
        """
        if family in self.failures:
            raise KeyError(family)
        if family not in self._traced:
            self._traced[family] = read_trace(self._workload, self._parameters, family) or self._trace(family)
        return self._traced[family]

    def _trace(self, family: Family) -> Profile:
        from autotune.cost.profiler import profile

        model, shape = self._workload.model, shape_of(self._workload)
        try:
            with _muted("transformers", "bitsandbytes", "torch._subclasses.fake_tensor"):
                found = profile(model, family, shape, parameters=self._parameters, known=self._shallow)
        except InputError as error:
            self.failures[family] = error
            raise KeyError(family) from None
        write_trace(self._workload, self._parameters, found)
        return found

    def __iter__(self) -> Iterator[Family]:
        return iter(self._traced)

    def __len__(self) -> int:
        return len(self._traced)


@contextlib.contextmanager
def _muted(*names: str) -> Iterator[None]:
    """Silence libraries: warnings are about real trainings, and an error is raised as well as logged."""
    levels = {logger: logger.level for logger in map(logging.getLogger, names)}
    for logger in levels:
        logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        for logger, level in levels.items():
            logger.setLevel(level)


ENTRY = "autotune.estimates.profiles:run_trace"


class TraceRequest(Value):
    """The families to trace."""

    workload: Workload
    families: tuple[Family, ...]
    parameters: int = Field(description="of the model, by which stored traces are told apart")
    limit_s: float = Field(gt=0, description="processor time; no family is begun after this")
    within_s: float = Field(default=math.inf, gt=0, description="wall time, in the same way")


class Traces(Value):
    """The profiles that were traced, in the same order, and why others weren't."""

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
    """Return the profiles that an ended child had traced, and `failure`."""
    profiles = []
    for path in sorted(directory.glob("profile-*.json")):
        with contextlib.suppress(OSError, ValidationError):
            profiles.append(read_value(Profile, path))
    return Traces(profiles=tuple(profiles), failures=(failure,))


def traces_of(request: TraceRequest, keep: Callable[[Profile], None] = lambda profile: None) -> Traces:
    """Return the profiles of the families, in this process, which comes to load torch; each is given to `keep`."""
    from autotune.cost.profiler import profile

    model, shape = request.workload.model, shape_of(request.workload)
    shallow: dict[tuple[object, ...], Shallow] = {}
    profiles: list[Profile] = []
    failures: dict[str, None] = {}
    started, ends_at = time.process_time(), time.monotonic() + request.within_s
    for done, family in enumerate(request.families):
        if time.process_time() - started > request.limit_s or time.monotonic() > ends_at:
            left = len(request.families) - done
            failures[f"{left} kinds of configurations are tried without one: tracing takes too long"] = None
            break
        try:
            profiles.append(profile(model, family, shape, parameters=request.parameters, known=shallow))
            keep(profiles[-1])
        except InputError as error:
            failures[str(error)] = None
    return Traces(profiles=tuple(profiles), failures=tuple(failures))
