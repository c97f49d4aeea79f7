"""A regression that starts from a prior: kept without data, outvoted by many observations."""

import numpy as np
import pytest

from autotune.cost.regression import Regression

PRIORS = {"a": (1.0, 0.5), "b": (2.0, 0.1)}


def test_without_data_the_prior_is_kept():
    mean, deviation = Regression(PRIORS, noise=0.3).predict({"a": 1.0, "b": 2.0})
    assert mean == pytest.approx(5.0)
    assert deviation == pytest.approx((0.5**2 + 0.2**2 + 0.3**2) ** 0.5)


def test_many_observations_reach_the_truth():
    regression = Regression(PRIORS, noise=0.1)
    random = np.random.default_rng(0)
    for a, b in random.uniform(0, 1, (200, 2)):
        regression.observe({"a": a, "b": b}, -3.0 * a + 2.5 * b + random.normal(0, 0.1))
    mean, deviation = regression.predict({"a": 1.0})
    assert mean == pytest.approx(-3.0, abs=0.1)
    assert deviation < 0.12


def test_one_exact_observation_is_believed_over_a_vague_prior():
    regression = Regression({"a": (0.0, 10.0)}, noise=0.01)
    regression.observe({"a": 2.0}, 6.0)
    assert regression.predict({"a": 1.0})[0] == pytest.approx(3.0, rel=1e-4)


def test_what_was_never_observed_keeps_its_prior():
    regression = Regression(PRIORS, noise=0.1)
    before = regression.predict({"b": 1.0})
    regression.observe({"a": 1.0}, 9.0)
    assert regression.predict({"b": 1.0}) == pytest.approx(before)


def test_the_surer_coefficient_moves_less():
    regression = Regression(PRIORS, noise=0.01)
    regression.observe({"a": 1.0, "b": 1.0}, 4.0)
    assert abs(regression.predict({"a": 1.0})[0] - 1.0) > 10 * abs(regression.predict({"b": 1.0})[0] - 2.0)


def test_an_observation_never_makes_a_prediction_less_sure():
    regression = Regression(PRIORS, noise=0.1)
    deviations = []
    for _ in range(5):
        deviations.append(regression.predict({"a": 1.0, "b": 0.5})[1])
        regression.observe({"a": 1.0}, 1.0)
    assert deviations == sorted(deviations, reverse=True)


def test_many_rows_are_predicted_like_one():
    regression = Regression(PRIORS, noise=0.1)
    regression.observe({"a": 1.0}, 2.0)
    rows = [{"a": 1.0}, {}, {"b": 3.0, "a": -1.0}]
    means, deviations = regression.predict_many(rows)
    assert list(zip(means.tolist(), deviations.tolist(), strict=True)) == [
        pytest.approx(regression.predict(row)) for row in rows
    ]


def test_an_unknown_feature_is_refused():
    regression = Regression(PRIORS, noise=0.1)
    with pytest.raises(KeyError, match="'c'"):
        regression.predict({"c": 1.0})
    with pytest.raises(KeyError, match="'c'"):
        regression.observe({"a": 1.0, "c": 1.0}, 0.0)
    assert len(regression) == 0
