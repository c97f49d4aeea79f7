"""What a search maximises: the steady state, or a run with its start."""

import pytest
from factories import make_measurement

from autotune.values.problem import Objective


def measured(step_s: float, first_step_s: float, samples: int = 16):
    return make_measurement(
        step_times_s=(step_s, step_s), first_step_s=first_step_s, samples_per_second=samples / step_s
    )


PLAIN, COMPILED = measured(1.0, 1.5), measured(0.8, 40.8)


def test_the_steady_state_forgets_the_start_a_run_pays_for_it_and_compiling_pays_in_long_runs_alone():
    assert Objective().rate(COMPILED) == COMPILED.samples_per_second
    for steps, pays in ((100, False), (190, False), (210, True)):
        whole = Objective(run_samples=16 * steps)
        assert whole.rate(COMPILED) == pytest.approx(16 * steps / (40.0 + steps * 0.8))
        assert (whole.rate(COMPILED) > whole.rate(PLAIN)) is pays


def test_the_start_is_won_back_by_faster_steps():
    assert COMPILED.break_even_steps(PLAIN) == 198  # 39.5 s more at the start, 0.2 s less a step
    assert measured(1.2, 40.0).break_even_steps(PLAIN) is None
    assert measured(1.6, 41.6, samples=32).break_even_steps(PLAIN) == 99  # 0.4 s less a step, of twice the samples
    assert measured(1.0, 0.5).cold_start_s == 0.0
