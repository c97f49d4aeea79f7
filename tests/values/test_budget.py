"""What a search may take, and what it maximises: the steady state, or a run with its start."""

import pytest
from factories import make_budget, make_measurement
from pydantic import ValidationError

from autotune.values.budget import Budget, Effort, Objective, break_even_steps, cold_start_s


def measured(step_s: float, first_step_s: float, samples: int = 16):
    return make_measurement(
        step_times_s=(step_s, step_s), first_step_s=first_step_s, samples_per_second=samples / step_s
    )


PLAIN, COMPILED = measured(1.0, 1.5), measured(0.8, 40.8)


def test_the_steady_state_forgets_the_start():
    assert Objective().rate(COMPILED) == COMPILED.samples_per_second


def test_a_run_pays_for_its_start():
    steps = 100
    whole = Objective(run_samples=16 * steps)
    assert whole.rate(COMPILED) == pytest.approx(16 * steps / (40.0 + steps * 0.8))


@pytest.mark.parametrize(("steps", "pays"), [(190, False), (210, True)])
def test_compiling_pays_in_long_runs_alone(steps, pays):
    whole = Objective(run_samples=16 * steps)
    assert (whole.rate(COMPILED) > whole.rate(PLAIN)) is pays


def test_the_start_is_won_back_by_faster_steps():
    assert break_even_steps(COMPILED, PLAIN) == 198  # 39.5 s more at the start, 0.2 s less a step


def test_slower_steps_never_win_it_back():
    assert break_even_steps(measured(1.2, 40.0), PLAIN) is None


def test_a_first_step_that_is_no_slower_costs_nothing():
    assert cold_start_s(measured(1.0, 0.5)) == 0.0


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
