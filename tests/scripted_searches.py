"""Searches whose trials take no time: the real conductor, at one place or several, and a function that answers."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from unittest import mock

from factories import (
    SEPARABLE,
    Clock,
    ScriptedRunner,
    make_budget,
    make_config,
    make_plan,
    make_space_file,
    separable_rate,
)

from autotune.cost.model import CostModel
from autotune.search.tuner import Tuner
from autotune.storage.run_directory import RunDirectory
from autotune.values.problem import Event
from autotune.values.result import ResultData
from autotune.values.trial import Outcome, Purpose, TrialRequest, TrialResult


def staggered_s(request: TrialRequest) -> float:
    """Seconds of a trial, so that those that run at once end one by one."""
    return 7.0 if request.number == 0 else 10.0 + request.number % 5 / 2


def interrupted(outcome: Callable[[TrialRequest], Outcome | float], call: int | None):
    """Return a function that gives the same, but is ended by Ctrl-C at its call number `call`, from 0."""
    calls = itertools.count()

    def told(request: TrialRequest) -> Outcome | float:
        if next(calls) == call:
            raise KeyboardInterrupt
        return outcome(request)

    return told


class Search:
    """One search in one run directory, which can be stopped and gone on with.

    `patience`: attempts of the sampler in a space that is exhausted, of which sixty take a second. `duration_s`: of a
    trial; by default 10 at one place, at several `staggered_s`.
    """

    def __init__(
        self,
        directory: Path,
        outcome: Callable[[TrialRequest], Outcome | float] = separable_rate,
        parameters: dict | None = None,
        *,
        places: int = 1,
        model: CostModel | None = None,
        duration_s: Callable[[TrialRequest], float] | None = None,
        starting: dict[str, float] | None = None,
        patience: int = 8,
        **plan,
    ) -> None:
        defaults = {"space": make_space_file(parameters or SEPARABLE), "baseline": make_config()}
        self.plan = make_plan(**{**defaults, "budget": make_budget(max_trials=12), **plan})
        self.directory, self.clock = directory, Clock()
        self.events: list[Event] = []
        self._outcome, self._places, self._model = outcome, places, model
        self._duration_s = duration_s or (staggered_s if places > 1 else lambda request: 10.0)
        self._starting, self._patience = starting, patience
        self.runner = ScriptedRunner(directory, outcome)

    def run(self, *, stop_after: int | None = None) -> ResultData:
        """Run the search with a new runner; a Ctrl-C comes in its trial number `stop_after`."""
        takes = {"duration_s": self._duration_s, "clock": self.clock, "places": self._places}
        self.runner = ScriptedRunner(self.directory, interrupted(self._outcome, stop_after), **takes)
        with mock.patch("autotune.search.sampler.PATIENCE_DRAWS", self._patience):
            tuner = Tuner(
                self.plan, RunDirectory(self.directory), self.runner, self.events.append,
                clock=self.clock, model=self._model, starting=self._starting,
            )  # fmt: skip
            self.study = tuner.study
            return tuner.run()

    @property
    def results(self) -> list[TrialResult]:
        return RunDirectory(self.directory).results()

    @property
    def finished(self) -> list[TrialRequest]:
        return [r.request for r in self.results]

    def count(self, purpose: Purpose) -> int:
        return sum(r.purpose is purpose for r in self.finished)
