"""Values: frozen, strict, and the same after a journey through JSON."""

import math

import pytest
from factories import make_config, make_result, make_workload
from pydantic import ValidationError

from autotune.value import Value
from autotune.values.trial import Interval, TrialResult


class Pair(Value):
    first: int
    second: str = "x"


def test_a_value_cannot_be_changed():
    pair = Pair(first=1)
    with pytest.raises(ValidationError, match="frozen"):
        pair.first = 2


def test_an_unknown_field_is_refused():
    with pytest.raises(ValidationError, match="third"):
        Pair(first=1, third=3)


def test_fields_go_by_keyword_only():
    with pytest.raises(TypeError):
        Pair(1)


def test_equal_values_have_equal_digests_and_hashes():
    assert make_config(8).digest() == make_config(8).digest()
    assert len({make_config(8), make_config(8), make_config(4)}) == 2


def test_digest_depends_on_every_field():
    digests = {Pair(first=1).digest(), Pair(first=2).digest(), Pair(first=1, second="y").digest()}
    assert len(digests) == 3


def test_digest_does_not_depend_on_the_order_of_keys():
    one = make_workload(fixed_arguments={"a": 1, "b": 2})
    other = make_workload(fixed_arguments={"b": 2, "a": 1})
    assert one.digest() == other.digest()


def test_infinity_survives_json():
    interval = Interval(low=0.0, high=math.inf)
    assert Interval.model_validate_json(interval.model_dump_json()) == interval


def test_a_whole_trial_survives_json():
    result = make_result()
    assert TrialResult.model_validate_json(result.model_dump_json()) == result
