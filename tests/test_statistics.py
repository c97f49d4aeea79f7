"""Intervals for a handful of timings."""

import math
import random

import pytest

from autotune.statistics import half_width, rate_interval, ratio_of_means, relative_half_width, t95


def test_quantiles_are_those_of_the_table():
    assert t95(1) == 12.706
    assert t95(10) == 2.228
    assert t95(30) == 2.042
    assert t95(60) == pytest.approx(2.000, abs=0.003)
    assert t95(1e6) == pytest.approx(1.960, abs=0.001)


def test_quantiles_fall_as_degrees_of_freedom_grow():
    values = [t95(n / 2) for n in range(2, 200)]
    assert values == sorted(values, reverse=True)


def test_nothing_is_known_without_a_degree_of_freedom():
    assert t95(0.9) == math.inf
    assert half_width([1.0]) == math.inf
    assert relative_half_width([]) == math.inf


def test_half_width_of_two_values_is_students():
    # mean 2, standard deviation sqrt(2), t(1) = 12.706: 12.706 * sqrt(2) / sqrt(2)
    assert half_width([1.0, 3.0]) == pytest.approx(12.706)
    assert relative_half_width([1.0, 3.0]) == pytest.approx(6.353)


def test_interval_of_a_rate_turns_the_interval_of_the_time_round():
    interval = rate_interval([0.9, 1.0, 1.1], 10)
    half = half_width([0.9, 1.0, 1.1])
    assert interval.low == pytest.approx(10 / (1 + half))
    assert interval.high == pytest.approx(10 / (1 - half))


def test_interval_of_a_rate_is_everything_where_one_step_is_known():
    interval = rate_interval([1.0], 10)
    assert (interval.low, interval.high) == (0.0, math.inf)


def test_interval_of_a_rate_is_open_above_where_the_time_may_be_zero():
    assert rate_interval([0.1, 2.0], 10).high == math.inf


def test_ratio_of_equal_times_is_one_and_inside_its_interval():
    ratio, interval = ratio_of_means([[1.0, 1.1, 0.9]], [[1.0, 1.1, 0.9]])
    assert ratio == pytest.approx(1.0)
    assert interval.low < 1.0 < interval.high


def test_ratio_without_any_noise_has_an_interval_of_a_point():
    ratio, interval = ratio_of_means([[2.0, 2.0]], [[1.0, 1.0]])
    assert (ratio, interval.low, interval.high) == (2.0, 2.0, 2.0)


def test_ratio_turned_round_has_the_interval_turned_round():
    a, b = [[2.0, 2.1, 1.9], [2.2, 2.0]], [[1.0, 1.05, 0.97], [1.1, 1.0]]
    ratio, interval = ratio_of_means(a, b)
    inverse, turned = ratio_of_means(b, a)
    assert inverse == pytest.approx(1 / ratio)
    assert turned.low == pytest.approx(1 / interval.high)
    assert turned.high == pytest.approx(1 / interval.low)


def test_ratio_of_single_steps_is_not_known_at_all():
    _, interval = ratio_of_means([[2.0]], [[1.0]])
    assert (interval.low, interval.high) == (0.0, math.inf)


def test_trials_that_differ_as_a_whole_widen_the_interval():
    together = ratio_of_means([[2.0, 2.01, 1.99] * 2], [[1.0, 1.01, 0.99] * 2])[1]
    apart = ratio_of_means([[2.2, 2.21, 2.19], [1.8, 1.81, 1.79]], [[1.1, 1.11, 1.09], [0.9, 0.91, 0.89]])[1]
    assert apart.high - apart.low > together.high - together.low


def test_intervals_of_ratios_cover_the_truth_about_as_often_as_they_say():
    noise, covered, rounds = random.Random(1), 0, 400
    for _ in range(rounds):
        ours = [[noise.lognormvariate(0.0, 0.05) for _ in range(6)]]
        theirs = [[2 * noise.lognormvariate(0.0, 0.05) for _ in range(6)]]
        _, interval = ratio_of_means(theirs, ours)
        covered += interval.low <= 2.0 <= interval.high
    assert 0.92 <= covered / rounds <= 0.98
