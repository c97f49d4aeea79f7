"""A search at several places at once, with trials that take no time: what runs together."""

from __future__ import annotations

from functools import partial

import pytest
from factories import SEPARABLE_BEST as BEST
from factories import make_budget, make_config
from predicted_space import SPACE, make_model_of
from scripted_searches import Search

from autotune.values.problem import Note, TrialEnded, TrialStarted
from autotune.values.trial import Purpose

BASE = make_config()
at_four = partial(Search, places=4)


@pytest.fixture(scope="module")
def done(tmp_path_factory) -> Search:
    """One whole search of twenty trials."""
    search = at_four(tmp_path_factory.mktemp("done"), budget=make_budget(max_trials=20, finalists=1, final_rounds=2))
    search.result = search.run()
    return search


def test_every_place_is_kept_busy_and_none_runs_two_trials(done):
    begun = [n for n, r in zip(done.runner.together, done.runner.requests, strict=True) if r.purpose.explores]
    assert max(begun) == 4
    assert begun[1:].count(4) > len(begun) / 2


def test_results_are_taken_in_as_they_come(done):
    told = [e.result.request.number for e in done.events if isinstance(e, TrialEnded)]
    assert told == done.runner.ends
    assert told != sorted(told)
    started = [e.request.number for e in done.events if isinstance(e, TrialStarted)]
    assert sorted(told) == started == list(range(len(told)))


def test_the_search_ends_with_the_optimum_that_one_place_finds_after_finals_one_at_a_time(done):
    assert done.result.best.config == BEST
    begun = zip(done.runner.together, done.runner.requests, strict=True)
    together, finals = zip(*((together, r.config) for together, r in begun if not r.purpose.explores), strict=True)
    assert together == (1, 1, 1, 1)
    assert finals in ((BASE, BEST, BEST, BASE), (BEST, BASE, BASE, BEST)), "there and back, the first is drawn"


def test_the_time_of_a_search_is_the_clocks_and_trials_at_once_are_told(done):
    durations = sum(r.duration_s for r in done.results)
    assert done.result.search_time_s == pytest.approx(done.clock.now_s)
    assert durations > 2 * done.clock.now_s
    assert done.result.spent.at_once_s == pytest.approx(durations - done.clock.now_s)
    assert done.result.spent.own_s == pytest.approx(0.0, abs=1e-6)


@pytest.mark.parametrize("trials", [1, 6])
def test_trials_that_run_count_against_the_limit_of_trials(tmp_path, trials):
    search = at_four(tmp_path, budget=make_budget(max_trials=trials))
    search.run()
    assert search.count(Purpose.SEARCH) == trials


guided = partial(at_four, space=SPACE, model=make_model_of(), memory_bytes=100 << 30)


def test_with_predictions_what_is_predicted_to_be_faster_runs_beside_the_baseline(tmp_path):
    search = guided(tmp_path, lambda request: 10.0, budget=make_budget(max_trials=3))
    search.run()
    assert search.runner.together[:3] == [1, 2, 3]  # what they are expected to reach leaves no fourth a chance
    baseline, *others = search.runner.requests[:3]
    assert baseline.config == BASE
    slowest = min(request.prediction.samples_per_second for request in others)
    assert slowest > baseline.prediction.samples_per_second
    assert len({request.config for request in others}) == len(others)


def test_the_guide_ends_the_search_only_when_nothing_runs_any_more(tmp_path):
    model = make_model_of()
    search = guided(tmp_path, lambda request: model.estimate(request.config).samples_per_second)
    result = search.run()
    notes = [e.text for e in search.events if isinstance(e, Note)]
    assert sum("left untried" in text for text in notes) == 1
    assert result.best.config == make_config(16, precision="bf16")


@pytest.mark.slow
def test_the_limit_of_time_is_wall_time(tmp_path):
    budget = make_budget(max_trials=200, max_time_s=120.0, finalists=1, final_rounds=2, trial_timeout_s=60.0)
    search = at_four(tmp_path, budget=budget)
    result = search.run()
    assert search.clock.now_s <= 120.0
    assert sum(r.duration_s for r in search.results) > 1.5 * search.clock.now_s
    assert result.best.confirmed
