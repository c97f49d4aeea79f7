"""Where the time of a search went."""

import pytest
from factories import Clock, make_measurement, make_request

from autotune.values.time_spent import Spent, Stopwatch, wall_s
from autotune.values.trial import Failure, Phases, TrialResult, TrialStatus

STEPS = {"first_step_s": 2.0, "discarded_s": 1.0, "measured_s": 6.0}
SETUP = {"prepare_s": 0.1, "model_s": 0.3, "data_s": 0.1, "trainer_s": 0.2, "closing_s": 0.1}


def completed(number, *, duration_s=10.0, **phases):
    measured = make_measurement().model_copy(update={"phases": Phases(**{**STEPS, **SETUP, **phases})})
    return TrialResult(
        request=make_request(number=number), outcome=measured, duration_s=duration_s, began=100.0 * number
    )


def failed(number, phases):
    outcome = Failure(status=TrialStatus.OUT_OF_MEMORY, cause="x", phases=phases)
    return TrialResult(request=make_request(number=number), outcome=outcome, duration_s=4.0, began=100.0 * number)


def test_the_parts_sum_up_to_the_whole():
    began = Phases(model_s=1.0, first_step_s=2.5)
    results = [completed(0), completed(1, check_s=0.5), failed(2, began), failed(3, None)]
    spent = Spent.of(results, 32.0, {"launching": 8.0, "tracing": 4.0})
    assert spent.total_s == pytest.approx(32.0 + 12.0)
    assert sum(spent.shares().values()) == pytest.approx(1.0)
    assert (spent.measured_s, spent.warm_up_s, spent.checks_s) == (12.0, 2.0, 0.5)
    assert spent.first_steps_s == pytest.approx(2 * 2.0 + 2.5)
    assert (spent.lost_s, spent.own_s) == (4.0, pytest.approx(32.0 - 28.0))


def spans(*spans):
    return [completed(n, duration_s=d).model_copy(update={"began": b}) for n, (b, d) in enumerate(spans)]


def test_of_trials_at_once_the_wall_time_counts_once_and_the_overlap_is_told():
    assert wall_s(spans((0.0, 10.0), (2.0, 3.0), (8.0, 5.0), (20.0, 1.0))) == 14.0
    spent = Spent.of(spans((0.0, 10.0), (0.0, 12.0)), 13.0, {})
    assert (spent.own_s, spent.at_once_s) == (1.0, 10.0)
    assert spent.total_s - spent.at_once_s == pytest.approx(13.0)


def test_every_moment_belongs_to_one_lap():
    clock = Clock()
    clock.now_s = 100.0
    stopwatch = Stopwatch("model", clock=clock)
    for lap, seconds in (("data", 2.0), ("model", 3.0), ("steps", 5.0)):
        clock.now_s += seconds
        stopwatch.enter(lap)
    clock.now_s += 7.0
    assert stopwatch.laps() == {"model": 2.0 + 5.0, "data": 3.0, "steps": 7.0}
    assert sum(stopwatch.laps().values()) == pytest.approx(clock.now_s - stopwatch.started_at)
