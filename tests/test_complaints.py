"""What is wrong with a value is said in the user's words."""

import re

import pytest
from pydantic import ValidationError

from autotune.errors import complaint, first_complaint
from autotune.planning.options import Options


def refused(**fields) -> ValidationError:
    with pytest.raises(ValidationError) as caught:
        Options(**{"model": "gpt2", **fields})
    return caught.value


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"effort": "fast"}, "expected quick, standard or thorough"),
        ({"effort": "standrad"}, "expected quick, standard or thorough (did you mean 'standard'?)"),
        ({"allow": "all"}, "expected exact, numerics, optimizer or method"),
        ({"max_trials": 0}, "expected a number above 0"),
        ({"max_trials": "many"}, "expected a whole number"),
        ({"max_time_s": "long"}, "expected a number"),
        ({"max_time_s": float("inf")}, "expected a finite number"),
        ({"check_loss": -1}, "expected 0 or more"),
        ({"exhaustive": "perhaps"}, "expected true or false"),
        ({"model": 5}, "expected text"),
        ({"colour": "red"}, "is unknown"),
        ({"global_batch": "lots"}, "expected a whole number or any"),
    ],
)
def test_what_was_expected_is_said_in_a_line(fields, said):
    assert first_complaint(refused(**fields)) == said


def test_every_word_of_ours_fits_an_error_of_pydantic():
    from typing import get_args

    from pydantic_core.core_schema import ErrorType

    from autotune.errors import _WORDS

    assert set(_WORDS) <= set(get_args(ErrorType))


def test_what_has_no_words_of_ours_is_said_by_who_refuses_it():
    error = {"type": "value_error", "loc": (), "msg": "Value error, two of a kind", "input": 1, "ctx": {}}
    assert complaint(error) == "two of a kind"
    assert not re.search("Input should", first_complaint(refused(max_trials=-1)))
