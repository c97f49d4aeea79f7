"""What knobs bring together beyond the product of what each brings, and how surely."""

import math

import pytest
from factories import make_config

from autotune.values.knob import Allowance
from autotune.values.problem import Change
from autotune.values.result import Contribution, Explanation
from autotune.values.trial import Interval


def part(ratio: float | None, half: float | None = None, basis: str = "in turn") -> Contribution:
    """What one knob brought; `half` is half its interval, in logarithms."""
    change = Change(knob="tf32", before="False", after="True", allowance=Allowance.NUMERICS)
    return Contribution(changes=(change,), config=None, basis=basis, ratio=ratio, interval=around(ratio, half))


def around(ratio: float | None, half: float | None) -> Interval | None:
    if ratio is None or half is None:
        return None
    return Interval(low=ratio * math.exp(-half), high=ratio * math.exp(half))


def explained(total: float | None, *parts: Contribution, half: float | None = None) -> Explanation:
    return Explanation(
        winner=make_config(),
        winner_samples_per_second=total,
        baseline_samples_per_second=1.0,
        total=total,
        total_interval=around(total, half),
        contributions=parts,
    )


def test_together_is_what_the_total_has_beyond_the_product_of_the_parts():
    assert explained(6.0, part(2.0), part(2.0)).together == pytest.approx(1.5)
    assert explained(3.0, part(2.0), part(2.0)).together == pytest.approx(0.75)
    assert explained(3.0, part(2.0), part(None, basis="fails")).together == pytest.approx(1.5)


def test_a_single_knob_is_the_whole_and_without_a_total_or_a_ratio_nothing_is_known():
    assert explained(2.0, part(2.0)).together is None
    assert explained(None, part(2.0), part(2.0)).together is None
    assert explained(2.0, part(None), part(None)).together is None


def test_its_interval_adds_the_variances_of_total_and_parts():
    found = explained(4.0, part(2.0, 0.03), part(2.0, 0.0), half=0.04).together_interval
    assert (found.low, found.high) == pytest.approx((math.exp(-0.05), math.exp(0.05)))


@pytest.mark.parametrize("unsure", [None, math.inf])
def test_it_has_no_interval_where_one_of_them_has_none(unsure):
    open_end = part(2.0, 0.1)
    open_end = open_end.model_copy(update={"interval": unsure and Interval(low=1.0, high=unsure)})
    assert explained(4.0, open_end, part(2.0, 0.1), half=0.1).together_interval is None


def test_it_is_settled_when_no_knob_could_be_measured_better():
    assert explained(4.0, part(2.0), part(None, basis="fails"), part(None, basis="slow")).is_settled
    assert not explained(4.0, part(2.0), part(2.0, basis="once")).is_settled
