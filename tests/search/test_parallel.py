"""A search at several places at once, with trials that take no time: what runs together, and what survives."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable
from pathlib import Path

import pytest
from factories import (
    SEPARABLE,
    Clock,
    make_budget,
    make_config,
    make_measurement,
    make_plan,
    make_result,
    make_space_file,
)
from factories import SEPARABLE_BEST as BEST
from factories import separable_rate as rate
from predicted_space import SPACE, make_model_of

from autotune.execution.runner import Runner
from autotune.search.tuner import SearchInterrupted, Tuner
from autotune.storage.run_directory import RunDirectory
from autotune.tuning_result import TuningResult
from autotune.value import write_value
from autotune.values.problem import Note, TrialEnded, TrialStarted
from autotune.values.trial import Measurement, Outcome, Purpose, TrialRequest, TrialResult

PLACES = 4
BASE = make_config()


@pytest.fixture(autouse=True)
def _short_patience(monkeypatch):
    monkeypatch.setattr("autotune.search.sampler.PATIENCE_DRAWS", 8)


class ScriptedPool(Runner):
    """Runs trials at several places in no time; a function says what each gives, and results lie on disk at their end.

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
        duration_s = ends_at - began
        result = make_result(request.config, outcome, duration_s=duration_s)
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
    def __init__(self, directory: Path, outcome=rate, *, places: int = PLACES, model=None, **plan) -> None:
        defaults = {"space": make_space_file(SEPARABLE), "baseline": BASE, "budget": make_budget(max_trials=12)}
        self.plan = make_plan(**{**defaults, **plan})
        self.directory = directory
        self.clock = Clock()
        self.events = []
        self._outcome = outcome
        self._places = places
        self._model = model

    def run(self, *, stop_after: int | None = None, outcome=None) -> TuningResult:
        """Run the search; a Ctrl-C comes while trial `stop_after` is waited for."""
        waits = itertools.count()

        def result(request: TrialRequest) -> Outcome | float:
            if next(waits) == stop_after:
                raise KeyboardInterrupt
            return (outcome or self._outcome)(request)

        self.pool = ScriptedPool(self.directory, result, self.clock, self._places)
        directory = RunDirectory(self.directory)
        return Tuner(self.plan, directory, self.pool, self.events.append, clock=self.clock, model=self._model).run()

    @property
    def finished(self) -> list[TrialResult]:
        return RunDirectory(self.directory).results()

    def configs(self, *purposes: Purpose):
        return [r.request.config for r in self.finished if r.request.purpose in purposes]


EXPLORING = (Purpose.BASELINE, Purpose.SEARCH)


@pytest.fixture(scope="module")
def done(tmp_path_factory) -> Search:
    """One whole search of twenty trials."""
    with pytest.MonkeyPatch.context() as patience:
        patience.setattr("autotune.search.sampler.PATIENCE_DRAWS", 8)
        search = Search(tmp_path_factory.mktemp("done"), budget=make_budget(max_trials=20, finalists=1, final_rounds=2))
        search.result = search.run()
    return search


def test_the_search_ends_with_the_optimum_that_one_place_finds(done):
    assert done.result.best.config == BEST


def test_every_place_is_kept_busy_and_none_runs_two_trials(done):
    explored = [n for n, r in zip(done.pool.together, done.pool.requests, strict=True) if r.purpose.explores]
    assert max(explored) == PLACES
    assert explored[1:].count(PLACES) > len(explored) / 2


def test_results_are_taken_in_as_they_come(done):
    told = [e.result.request.number for e in done.events if isinstance(e, TrialEnded)]
    assert told == done.pool.ends
    assert told != sorted(told)
    assert sorted(told) == [e.number for e in done.events if isinstance(e, TrialStarted)] == list(range(len(told)))


def test_finals_run_one_at_a_time_in_turn(done):
    begun = zip(done.pool.together, done.pool.requests, strict=True)
    finals = [(together, r.config) for together, r in begun if not r.purpose.explores]
    assert finals == [(1, BASE), (1, BEST), (1, BEST), (1, BASE)]  # there and back


def test_the_time_of_a_search_is_the_clocks_and_trials_at_once_are_told(done):
    durations = sum(r.duration_s for r in done.finished)
    assert done.result.search_time_s == pytest.approx(done.clock.now_s)
    assert durations > 2 * done.clock.now_s
    assert done.result.spent.at_once_s == pytest.approx(durations - done.clock.now_s)
    assert done.result.spent.own_s == pytest.approx(0.0, abs=1e-6)


@pytest.mark.parametrize("trials", [1, 6])
def test_trials_that_run_count_against_the_limit_of_trials(tmp_path, trials):
    search = Search(tmp_path, budget=make_budget(max_trials=trials))
    search.run()
    assert len(search.configs(Purpose.SEARCH)) == trials


def guided(directory: Path, **plan) -> Search:
    """A search whose every point has a prediction."""
    return Search(directory, space=SPACE, model=make_model_of(), **plan)


def test_with_predictions_what_is_predicted_to_be_faster_runs_beside_the_baseline(tmp_path):
    search = guided(tmp_path, outcome=lambda request: 10.0, memory_bytes=100 << 30, budget=make_budget(max_trials=3))
    search.run()
    assert search.pool.together[:3] == [1, 2, 3]  # what they are expected to reach leaves no fourth a chance
    baseline, *others = search.pool.requests[:3]
    assert baseline.config == BASE
    slowest = min(request.prediction.samples_per_second for request in others)
    assert slowest > baseline.prediction.samples_per_second
    assert len({request.config for request in others}) == len(others)


def test_the_guide_ends_the_search_only_when_nothing_runs_any_more(tmp_path):
    model = make_model_of()
    search = guided(tmp_path, outcome=lambda request: as_predicted(model, request), memory_bytes=100 << 30)
    result = search.run()
    notes = [e.text for e in search.events if isinstance(e, Note)]
    assert sum("left untried" in text for text in notes) == 1
    assert result.best.config == make_config(16, precision="bf16")


def as_predicted(model, request: TrialRequest) -> Measurement:
    return make_measurement(model.estimate(request.config).samples_per_second)


@pytest.mark.parametrize("stop_after", [5, *(pytest.param(n, marks=pytest.mark.slow) for n in (0, 1, 12))])
def test_an_interrupted_search_goes_on_without_measuring_anything_again(tmp_path, stop_after):
    search = Search(tmp_path)
    with pytest.raises(SearchInterrupted):
        search.run(stop_after=stop_after)
    before = {r.request.number: r for r in search.finished}
    assert len(before) == stop_after
    result = search.run()
    again = {r.request.number: r for r in search.finished}
    assert {number: again[number] for number in before} == before
    explored = search.configs(*EXPLORING)
    assert len(set(explored)) == len(explored) == 13
    assert result.best.config == BEST


@pytest.mark.slow
def test_a_search_of_one_place_can_go_on_at_four_and_the_other_way_round(tmp_path):
    search = Search(tmp_path)
    with pytest.raises(SearchInterrupted):
        search.run(stop_after=6)
    pool = ScriptedPool(tmp_path, rate, search.clock, 1)
    result = Tuner(search.plan, RunDirectory(tmp_path), pool, search.events.append, clock=search.clock).run()
    assert result.best.config == BEST
    explored = search.configs(*EXPLORING)
    assert len(set(explored)) == len(explored)


@pytest.mark.slow
def test_going_on_counts_the_time_that_passed_and_not_the_trials(tmp_path):
    search = Search(tmp_path)
    with pytest.raises(SearchInterrupted):
        search.run(stop_after=10)
    passed_s = search.clock.now_s
    search.clock = Clock()
    result = search.run()
    assert result.search_time_s == pytest.approx(passed_s + search.clock.now_s)


@pytest.mark.slow
def test_the_limit_of_time_is_wall_time(tmp_path):
    budget = make_budget(max_trials=200, max_time_s=120.0, finalists=1, final_rounds=2, trial_timeout_s=60.0)
    search = Search(tmp_path, budget=budget)
    result = search.run()
    assert search.clock.now_s <= 120.0
    assert sum(r.duration_s for r in search.finished) > 1.5 * search.clock.now_s
    assert result.best.confirmed
