"""The traces of a workload (`autotune.cost.profile`): read from the home, or made in this process when first needed."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from autotune.cost.family import Family, shape_of
from autotune.cost.profile import Profile
from autotune.errors import InputError
from autotune.storage.home import read_trace, write_trace
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
    loggers = [logging.getLogger(name) for name in names]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
