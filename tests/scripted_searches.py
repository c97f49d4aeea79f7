"""Searches whose trials take no time: the real conductor, at one place or several, and a function that answers."""

from __future__ import annotations

import heapq
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
    make_result,
    make_space_file,
    separable_rate,
)

from autotune.cost.model import CostModel
from autotune.execution.runner import Runner
from autotune.search.tuner import Tuner
from autotune.storage.run_directory import RunDirectory
from autotune.value import write_value
from autotune.values.problem import Event
from autotune.values.result import ResultData
from autotune.values.trial import Outcome, Purpose, TrialRequest, TrialResult


class ScriptedPool(Runner):
    """Runs trials at several places; results lie on disk at their end.

    Trial 0 takes 7 s, the others 10 s and up to 2 s more, so that ends come one by one.
    """

    def __init__(self, directory: Path, outcome: Callable[[TrialRequest], Outcome | float], clock: Clock, places: int):
        self._directory = directory
        self._outcome = outcome
        self._clock = clock
        self._places = places
        self._running: list[tuple[float, int, float, TrialRequest]] = []
        self.requests: list[TrialRequest] = []
        self.together: list[int] = []  # how many trials ran when each was begun, itself included
        self.ends: list[int] = []

    def free(self) -> int:
        return self._places - len(self._running)

    def begin(self, request: TrialRequest) -> None:
        assert self.free()
        seconds = 7.0 if request.number == 0 else 10.0 + request.number % 5 / 2
        heapq.heappush(self._running, (self._clock.now_s + seconds, request.number, self._clock.now_s, request))
        self.requests.append(request)
        self.together.append(len(self._running))

    def wait(self) -> TrialResult:
        ends_at, _, began, request = heapq.heappop(self._running)
        outcome = self._outcome(request)
        self._clock.now_s = ends_at
        result = make_result(request.config, outcome, duration_s=ends_at - began)
        result = result.model_copy(update={"request": request, "began": began})
        directory = self._directory / "trials" / f"{request.number:04d}"
        directory.mkdir(parents=True, exist_ok=True)
        write_value(result, directory / "result.json")
        self.ends.append(request.number)
        return result

    def run(self, request: TrialRequest) -> TrialResult:
        assert not self._running
        self.begin(request)
        return self.wait()


class Search:
    """One search in one run directory, which can be stopped and gone on with.

    `patience`: attempts of the sampler in a space that is exhausted, of which sixty take a second.
    """

    def __init__(
        self,
        directory: Path,
        outcome: Callable[[TrialRequest], Outcome | float] = separable_rate,
        parameters: dict | None = None,
        *,
        places: int = 1,
        model: CostModel | None = None,
        duration_s: Callable[[TrialRequest], float] = lambda request: 10.0,
        starting: dict[str, float] | None = None,
        patience: int = 8,
        **plan,
    ) -> None:
        defaults = {"space": make_space_file(parameters or SEPARABLE), "baseline": make_config()}
        self.plan = make_plan(**{**defaults, "budget": make_budget(max_trials=12), **plan})
        self.directory = directory
        self.clock = Clock()
        self.events: list[Event] = []
        self.runner: ScriptedRunner | ScriptedPool = ScriptedRunner(directory, outcome)
        self._outcome, self._duration_s = outcome, duration_s
        self._places, self._model = places, model
        self._starting, self._patience = starting, patience

    def run(self, *, stop_after: int | None = None) -> ResultData:
        """Run the search with a new runner; a Ctrl-C comes in its trial number `stop_after`."""
        runs = itertools.count()

        def outcome(request: TrialRequest) -> Outcome | float:
            if next(runs) == stop_after:
                raise KeyboardInterrupt
            return self._outcome(request)

        self.runner = ScriptedRunner(self.directory, outcome, duration_s=self._duration_s, clock=self.clock)
        if self._places > 1:
            self.runner = ScriptedPool(self.directory, outcome, self.clock, self._places)
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
