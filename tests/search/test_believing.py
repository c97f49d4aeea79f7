"""A running trial is taken to give what is predicted of it."""

import pytest
from factories import make_config, make_plan, make_request
from predicted_space import SPACE, make_model_of

from autotune.search.guide import Guide
from autotune.search.parallel import believed
from autotune.space.history import History
from autotune.values.config import TrainConfig
from autotune.values.trial import Prediction

BEST = make_config(16, precision="bf16")


@pytest.fixture
def guide() -> Guide:
    """What leads a search of twenty points, before anything has run."""
    plan = make_plan(space=SPACE, memory_bytes=100 << 30)
    return Guide(make_model_of(), plan, plan.search_space())


def test_without_a_prediction_nothing_is_believed():
    assert believed(make_request(), None) is None


def test_what_is_believed_is_the_predicted_rate_and_nothing_of_memory():
    result = believed(make_request(), Prediction(samples_per_second=8.0, peak_bytes=1 << 30))
    assert result.measurement.samples_per_second == 8.0
    assert result.measurement.step_times_s == (2.0,)  # 16 samples
    assert not result.measurement.memory.is_known


def believing(guide: Guide, *running: TrainConfig) -> tuple[Guide, History]:
    """Return guide and history as if `running` had ended as predicted."""
    expected = [believed(make_request(config), guide.prediction(config)) for config in running]
    return guide.believing(expected), History().with_results(expected)


def test_the_guide_looks_elsewhere_than_where_a_trial_runs(guide):
    assert guide.next(History(), lambda config: True) == BEST
    other, history = believing(guide, BEST)
    assert other.next(history, lambda config: config != BEST) not in (BEST, None)


def test_the_guide_is_not_changed_by_it(guide):
    expected = guide.prediction(BEST)
    believing(guide, BEST, make_config(8, precision="bf16"))
    assert guide.prediction(BEST) == expected


def test_what_is_believed_of_one_configuration_moves_the_expectation_of_no_other(guide):
    neighbour = make_config(8, precision="bf16")
    other, _ = believing(guide, BEST)
    before, after = guide.prediction(neighbour), other.prediction(neighbour)
    assert after.samples_per_second == pytest.approx(before.samples_per_second)
    assert after.peak_bytes == before.peak_bytes


def test_a_history_with_more_leaves_the_first_as_it_is(guide):
    history = History()
    assert len(history.with_results([believed(make_request(BEST), guide.prediction(BEST))])) == 1
    assert len(history) == 0
