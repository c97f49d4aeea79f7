"""Calls at any micro-batch, and what is taken for operators that were measured, or not."""

import numpy as np
import pytest
from profiles import make_family, make_group, make_profile, make_rates, make_work

from autotune.cost.time import (
    ADDING,
    CLIPPING,
    along,
    as_line,
    at,
    filled,
    micro_step_seconds,
    optimizer_seconds,
    parameter_key,
    stepping,
    worth_measuring,
)
from autotune.values.estimate import Timings


def timings(**fields):
    return Timings(**{"operator_s": 0.0, "micro_step_s": 0.0, **fields})


def test_sizes_of_a_call_are_lines_in_the_micro_batch():
    call = as_line("mm [64, 32] 0.5", "mm [128, 32] 0.5", (2, 4))
    assert [at(call, samples) for samples in (1, 2, 16)] == ["mm [32, 32] 0.5", "mm [64, 32] 0.5", "mm [512, 32] 0.5"]


@pytest.mark.parametrize("other", ["mm [65, 32]", "mm [64, 32, 1]", "bmm [64, 32]"])
def test_a_call_whose_sizes_are_no_lines_is_not_known(other):
    assert as_line("mm [64, 32]", other, (2, 4)) == ""


def test_what_was_not_measured_has_the_rate_of_the_nearest_of_its_kind():
    expected = np.array([[1.0], [10.0], [12.0], [12.0]])
    seconds = np.array([[3.0], [20.0], [np.nan], [np.nan]])
    kinds = np.array([1, 1, 1, 2])
    assert filled(seconds, expected, kinds)[:, 0].tolist() == [3.0, 20.0, 24.0, 12.0]


def test_time_is_a_line_between_sizes_and_beyond_them():
    found = along(np.array([1.0, 2.5, 4.0, 8.0]), (1, 4), np.array([1.0, 4.0]))
    assert found.tolist() == [1.0, 2.5, 4.0, 8.0]


@pytest.mark.parametrize(("seconds", "expected"), [((1.0, 4.0), 0.25), ((1.0, 2.5), 0.625), ((1.0, 7.0), 0.25)])
def test_a_short_sample_takes_a_part_of_what_one_of_full_length_takes(seconds, expected):
    assert along(np.array([0.25]), (1, 4), np.array(seconds)).tolist() == [expected]


def test_a_measured_operator_takes_what_it_took():
    profile = make_profile(make_family(), work=(make_work(count=3, call="mm [<0:1>]"),))
    taken = {f"mm [{size}]": size * 1e-3 for size in (1, 4, 16, 64, 256)}
    rates = make_rates(timings=timings(operators=taken, operator_s=1e-4, micro_step_s=0.5))
    seconds = micro_step_seconds(profile, rates, np.array([1.0, 10.0]), tf32=False, compiled=False)
    assert seconds.tolist() == pytest.approx([0.5 + 3 * 1.1e-3, 0.5 + 3 * 10.1e-3])


def test_a_measured_optimizer_takes_what_it_took_and_larger_parameters_more():
    small, large = make_group(10, 10, count=2), make_group(100, 100)
    known = {parameter_key(what, small): 1e-3 for what in ("sgd", CLIPPING, ADDING)}
    profile = make_profile(make_family(), parameters=(small, large))
    found = optimizer_seconds(profile, make_rates(timings=timings(optimizers=known)), "sgd")
    assert found == pytest.approx(2 * (2e-3 + 100e-3))
    assert stepping(profile.parameters, "adafactor", timings(optimizers=known)) is None


def test_a_small_parameters_step_is_a_launch_and_no_measure_of_a_large_one():
    small, large = make_group(1024), make_group(150_000, 1024)
    profile = make_profile(make_family(), parameters=(small, large))
    known = {parameter_key(what, small): 5e-6 for what in ("sgd", CLIPPING)}
    rates = make_rates(bandwidth=4e12, launch_s=5e-6, timings=timings(optimizers=known))
    bytes_s = 3 * 4 * large.elements / rates.bandwidth
    assert optimizer_seconds(profile, rates, "sgd") == pytest.approx(2 * bytes_s, rel=0.1)


def test_the_costliest_calls_are_measured_first_and_none_again():
    cheap, dear = make_work(call="cheap", flops=1), make_work(call="dear [<0:1>]", flops=1e12)
    profile = make_profile(make_family(), work=(cheap, dear))
    assert worth_measuring([profile], make_rates(), 4) == ["dear [1]", "dear [4]", "cheap"]
    known = make_rates(timings=timings(operators={"dear [4]": 1.0, "cheap": 1.0}))
    assert worth_measuring([profile], known, 4) == ["dear [1]"]
