"""Limits of a search by its effort."""

import pytest
from factories import make_budget
from pydantic import ValidationError

from autotune.values.budget import Budget, Effort


def test_more_effort_is_more_of_everything():
    quick, standard, thorough = map(Budget.of, Effort)
    for less, more in ((quick, standard), (standard, thorough)):
        assert less.max_trials < more.max_trials
        assert less.max_time_s < more.max_time_s
        assert less.relative_interval > more.relative_interval
        assert less.finalists <= more.finalists


def test_a_quick_search_ends_within_five_minutes():
    assert Budget.of(Effort.QUICK).max_time_s <= 300


def test_a_trial_longer_than_the_search_is_refused():
    with pytest.raises(ValidationError, match="longer than the search"):
        make_budget(max_time_s=10.0, trial_timeout_s=60.0)
