"""Intervals for a handful of timings."""

import math
import random
import statistics

import pytest

from autotune.values.statistics import (
    PROCESS_SPREAD,
    Speedup,
    Spread,
    drift,
    half_width,
    parts_of,
    rate_interval,
    relative_half_width,
    t95,
)
from autotune.values.trial import Interval

UNKNOWN = Interval(low=0.0, high=math.inf)


def test_quantiles_and_half_widths_are_students():
    assert [t95(n) for n in (1, 10, 30)] == [12.706, 2.228, 2.042]
    assert [t95(60), t95(1e6)] == pytest.approx([2.000, 1.960], abs=0.003)
    values = [t95(n / 2) for n in range(2, 200)]
    assert values == sorted(values, reverse=True)
    # mean 2, standard deviation sqrt(2), t(1) = 12.706: 12.706 * sqrt(2) / sqrt(2)
    assert half_width([1.0, 3.0]) == pytest.approx(12.706)
    assert relative_half_width([1.0, 3.0]) == pytest.approx(6.353)
    assert t95(0.9) == half_width([1.0]) == relative_half_width([]) == math.inf


def test_interval_of_a_rate_turns_the_interval_of_the_time_round():
    half, interval = half_width([0.9, 1.0, 1.1]), rate_interval([0.9, 1.0, 1.1], 10)
    assert (interval.low, interval.high) == pytest.approx((10 / (1 + half), 10 / (1 - half)))
    assert rate_interval([0.1, 2.0], 10).high == math.inf
    assert rate_interval([1.0], 10) == UNKNOWN


def test_a_ratio_turned_round_has_the_interval_turned_round_which_trials_that_differ_as_a_whole_widen():
    a, b = [[2.0, 2.1, 1.9], [2.2, 2.0]], [[1.0, 1.05, 0.97], [1.1, 1.0]]
    (ratio, interval), (inverse, turned) = (dict(Speedup.of_means(*sides)).values() for sides in ((a, b), (b, a)))
    assert (inverse, turned.low, turned.high) == pytest.approx((1 / ratio, 1 / interval.high, 1 / interval.low))
    point, none = dict(Speedup.of_means([[2.0, 2.0]], [[1.0, 1.0]])).values()
    assert point == 2.0
    assert 1.93 < none.low < 1.97 < 2.03 < none.high < 2.07, "processes differ where steps don't"
    assert Speedup.of_means([[2.0]], [[1.0]]).interval == UNKNOWN
    together = Speedup.of_means([[2.0, 2.01, 1.99] * 2], [[1.0, 1.01, 0.99] * 2]).interval
    apart = Speedup.of_means([[2.2, 2.21, 2.19], [1.8, 1.81, 1.79]], [[1.1, 1.11, 1.09], [0.9, 0.91, 0.89]]).interval
    assert apart.high - apart.low > together.high - together.low


def run(noise, truth, between, common=0.0):
    """Return the step times of a trial whose luck spreads by `between`, and each of its steps by 0.05."""
    luck = common + noise.gauss(0.0, between)
    return [truth * math.exp(luck + noise.gauss(0.0, 0.05)) for _ in range(10)]


@pytest.mark.parametrize(("between", "drift_by", "least"), [(0.05, 0.0, 0.95), (0.10, 0.0, 0.85), (0.03, 0.3, 0.95)])
def test_intervals_of_ratios_cover_the_truth_however_trials_spread_and_the_machine_changes(between, drift_by, least):
    noise, found, cases = random.Random(3), 0, 150
    for _ in range(cases):
        rounds = [noise.gauss(0.0, drift_by) for _ in range(2)]
        ours, theirs = ([run(noise, truth, between, c) for c in rounds] for truth in (1.0, 2.0))
        interval = Speedup.of_means(theirs, ours).interval
        found += interval.low <= 2.0 <= interval.high
    assert found / cases >= least


def test_the_drift_that_a_round_shares_is_no_spread_of_trials_and_more_configurations_tell_more():
    rounds = [0.0, 0.4]
    steady = [[[math.exp(c) * (1 + d) for d in (-0.01, 0.0, 0.01)] for c in rounds] for _ in range(2)]
    assert Spread.of_trials(steady).deviation < 0.02
    assert Spread.of_trials(steady, by_round=False).deviation > 0.1
    sides = [[[1.0, 1.1], [1.05, 1.0]] for _ in range(3)]
    assert (
        Spread.of_trials(sides).degrees > Spread.of_trials(sides[:2]).degrees > Spread.of_trials(sides[:1]).degrees - 1
    )


def test_the_next_run_falls_into_its_interval():
    noise, found, cases = random.Random(5), 0, 200
    for _ in range(cases):
        sides = [[run(noise, truth, 0.05) for _ in range(2)] for truth in (1.0, 2.0)]
        interval = Spread.of_trials(sides, by_round=False).next_run(sides[0], 4)
        found += interval.low <= 4 / statistics.fmean(run(noise, 1.0, 0.05)) <= interval.high
    assert found / cases >= 0.95


def test_the_next_run_falls_into_the_interval_of_two_trials_in_turn_on_a_machine_that_drifts():
    """Steps deviate by 9 %, the machine by 6 % for some steps, and between a search and a run by 6.7 %."""
    noise, held, widths, cases = random.Random(5), 0, [], 400

    def steps(count: int, level: float) -> list[float]:
        found = []
        for _ in range(count):
            level = 0.8 * level + noise.gauss(0.0, 0.06 * math.sqrt(1 - 0.8**2))
            found.append(math.exp(level + noise.gauss(0.0, 0.09)))
        return found

    for _ in range(cases):
        sides = [parts_of(steps(20, noise.gauss(0.0, 0.06))) for _ in range(2)]
        interval = Spread.of_parts(sides).next_run(sides[0], 1, later=0.067)
        at_another_time = math.exp(noise.gauss(0.0, 0.067))
        next_run = statistics.fmean(steps(8, noise.gauss(0.0, 0.06))) * at_another_time
        held += interval.low <= 1 / next_run <= interval.high
        widths.append(interval.high / interval.low)
    assert held / cases >= 0.95
    assert 1.4 < statistics.median(widths) < 1.7


def test_the_next_run_is_less_sure_than_the_mean_and_a_trial_of_few_steps_has_one_part():
    trials = [[1.0, 1.02, 0.98, 1.01], [1.01, 0.99, 1.0, 1.02]]
    mean = rate_interval([t for trial in trials for t in trial], 1)
    following = Spread.of_trials([trials]).next_run(trials, 1)
    assert following.high - following.low > mean.high - mean.low
    assert parts_of([1.0] * 9) == [[1.0] * 9]
    assert [len(part) for part in parts_of([1.0] * 13)] == [2, 2, 2, 2, 5]


def test_a_drift_is_told_where_the_steps_do_not_explain_it():
    assert drift([[1.0, 1.01, 0.99], [1.12, 1.13, 1.11]]) == pytest.approx(0.12)
    assert drift([[1.0, 1.3, 0.7], [1.12, 1.42, 0.82]]) == 0.0
    assert drift([[1.0, 1.01]]) == drift([]) == drift([[1.0], [2.0]]) == 0.0


def test_a_slow_moment_that_both_of_a_pair_share_cancels_out():
    pairs = [(2.0 * slow, 1.0 * slow) for slow in (1.0, 1.5, 3.0, 1.2, 1.0, 2.0, 1.1, 1.0)]
    ratio, interval = dict(Speedup.of_pairs([pairs])).values()
    assert ratio == pytest.approx(2.0)
    assert interval.low == pytest.approx(2.0 * math.exp(-t95(9) * PROCESS_SPREAD))
    others = ([(above * more, below) for above, below in pairs] for more in (1, 1.1))
    alike, apart = (Speedup.of_pairs([pairs, other]).interval for other in others)
    assert alike.high / alike.low < interval.high / interval.low < apart.high / apart.low


def test_of_twelve_pairs_one_may_be_disturbed_however_much_and_few_have_no_interval():
    pairs = [(2.0 + 0.01 * n, 1.0) for n in range(11)]
    for disturbed in (4.0, 400.0):
        interval = Speedup.of_pairs([[*pairs, (disturbed, 1.0)]]).interval
        assert 2.0 < interval.low < 2.05 < interval.high < 2.15
    assert Speedup.of_pairs([]).interval == Speedup.of_pairs([[(2.0, 1.0)] * 5]).interval == UNKNOWN


@pytest.mark.parametrize("least", [8, 19])
def test_intervals_of_pairs_hold_the_truth_under_drift_and_bursts(least):
    """Turns whose noise lasts over several of them, on a machine that drifts; measuring ends when it is narrow."""
    noise, held, cases = random.Random(5), 0, 300
    for _ in range(cases):
        drift = burst = 0.0
        left, kept, pairs, interval = 0, noise.gauss(0.0, PROCESS_SPREAD), [], None
        while interval is None or (interval.high > 1.1 * interval.low and len(pairs) < 2 * least):
            drift += noise.gauss(0.0, 0.03)
            times = []
            for level in (0.0, kept - math.log(1.2)):
                if noise.random() < 0.15:
                    left, burst = noise.randint(1, 4), noise.uniform(0.0, 0.5)
                left -= 1
                times.append(math.exp(drift + level + noise.gauss(0.0, 0.08) + (burst if left >= 0 else 0.0)))
            pairs.append((times[0], times[1]))
            if len(pairs) >= least:
                interval = Speedup.of_pairs([pairs]).interval
        held += interval.low <= 1.2 <= interval.high
    assert held / cases >= 0.95


def test_the_quotient_of_two_comparisons_holds_the_truth_as_often_as_they_do():
    """Two configurations, 1.5 and 1.2 times as fast as a third, each beside it at another time."""
    random.seed(4)

    def beside(ratio: float) -> list[tuple[float, float]]:
        return [(math.exp(random.gauss(0, 0.05)) * ratio, math.exp(random.gauss(0, 0.05))) for _ in range(16)]

    found = [Speedup.of_pairs([beside(1.5)]).over(Speedup.of_pairs([beside(1.2)])) for _ in range(300)]
    assert statistics.fmean(c.ratio for c in found) == pytest.approx(1.25, rel=0.01)
    assert sum(c.interval.low <= 1.25 <= c.interval.high for c in found) >= 0.93 * len(found)
    assert Speedup.of_pairs([beside(1.5)[:2]]).over(found[0]).interval.high == math.inf
