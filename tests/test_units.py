"""Human units in and out."""

import pytest

from autotune.errors import InputError
from autotune.units import GIB, parse_memory, parse_time_s, show_memory, show_rate, show_time


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("24GiB", 24 << 30),
        ("24gib", 24 << 30),
        ("24GB", 24 * 10**9),
        ("1.5 GB", 1_500_000_000),
        (" 800MiB ", 800 << 20),
        ("2TiB", 2 << 40),
        ("1k", 1000),
        ("4096", 4096),
    ],
)
def test_memory_is_read_in_binary_and_decimal_units(text, value):
    assert parse_memory(text) == value


@pytest.mark.parametrize("text", ["", "GiB", "0", "0GiB", "-1GiB", "1.GiB", "24 GiB 3", "24GiBs", "1e9", "9" * 400])
def test_what_is_no_memory_is_refused_with_the_option_and_an_example(text):
    with pytest.raises(InputError, match=r"^--memory .*24GiB"):
        parse_memory(text)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("90", 90), ("90s", 90), ("1.5m", 90), ("10M", 600), ("1h30m", 5400), ("1h 30m", 5400), ("1d", 86400)],
)
def test_a_time_is_a_sum_of_parts_and_seconds_without_a_unit(text, seconds):
    assert parse_time_s(text) == seconds


@pytest.mark.parametrize("text", ["", "m", "-5m", "5 parsecs", "1h-5m", "0s", "9" * 400])
def test_what_is_no_time_is_refused_with_the_option(text):
    with pytest.raises(InputError, match=r"^--patience .*expected a time"):
        parse_time_s(text, option="--patience")


@pytest.mark.parametrize(
    ("value", "text"), [(GIB, "1.00 GiB"), (1.5 * GIB, "1.50 GiB"), (800 << 20, "800 MiB"), (0, "0 MiB")]
)
def test_memory_is_shown_in_gib_and_below_that_in_mib(value, text):
    assert show_memory(value) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.4, "0 s"),
        (89, "89 s"),
        (90, "1 min 30 s"),
        (285, "4 min 45 s"),
        (720, "12 min"),
        (3599, "59 min 59 s"),
        (7500, "2 h 05 min"),
    ],
)
def test_a_duration_is_shown_in_the_largest_unit_that_says_enough(seconds, text):
    assert show_time(seconds) == text


@pytest.mark.parametrize(
    ("value", "text"), [(0.01234, "0.0123"), (9.876, "9.88"), (99.97, "100"), (123.4, "123"), (12345.6, "12,346")]
)
def test_a_rate_has_three_digits_or_is_whole(value, text):
    assert show_rate(value) == text


def test_what_is_shown_can_be_read_again():
    assert parse_memory(show_memory(6.25 * GIB)) == 6.25 * GIB
