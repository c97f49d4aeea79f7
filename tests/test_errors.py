"""Errors: exit codes, suggestions, and what is wrong with a value in the user's words."""

import re
from typing import get_args

import pytest
from pydantic import ValidationError
from pydantic_core.core_schema import ErrorType
from torch import nn

from autotune import errors
from autotune.errors import AutotuneError, InputError, complaint, explaining_files, first_complaint, suggestion
from autotune.planning.options import SearchOptions, options_of
from autotune.search.tuner import SearchInterrupted

EXIT_CODES = {
    "AutotuneError": 1, "InputError": 2, "UnknownModelError": 2, "SearchSpaceError": 2, "RunDirectoryError": 2,
    "CodeError": 2, "LoopError": 2, "RecordError": 2, "MachineError": 3, "InfrastructureError": 4,
    "NothingFitsError": 5, "NothingPassedError": 6,
}  # fmt: skip


def test_exit_codes_are_those_that_are_documented():
    found = {n: c.exit_code for n, c in vars(errors).items() if isinstance(c, type) and issubclass(c, AutotuneError)}
    assert found == EXIT_CODES
    assert all(vars(errors)[name].__doc__ for name in EXIT_CODES)  # which the page of exit codes tells
    assert SearchInterrupted.exit_code == errors.EXIT_INTERRUPTED == 130


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("precison", " (did you mean 'precision'?)"), ("PRECISION", " (did you mean 'precision'?)"),
        ("gpt", " (did you mean 'GPT-2'?)"), ("adamw_8", " (did you mean 'adamw_8bit' or 'adamw_4bit'?)"), ("qqq", ""),
    ],
)  # fmt: skip
def test_the_nearest_names_are_suggested_as_they_are_written(word, said):
    assert suggestion(word, iter(["precision", "optim", "GPT-2", "adamw_8bit", "adamw_4bit"])) == said


def test_a_current_directory_that_was_removed_is_told(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    tmp_path.rmdir()
    with pytest.raises(InputError, match="the current directory has been removed"), explaining_files():
        tmp_path.cwd()


def refused(**fields) -> ValidationError:
    with pytest.raises(ValidationError) as caught:
        SearchOptions(**{"model": "gpt2", **fields})
    return caught.value


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"effort": "fast"}, "expected quick, standard or thorough"),
        ({"effort": "standrad"}, "expected quick, standard or thorough (did you mean 'standard'?)"),
        ({"allow": "all"}, "expected exact, numerics, optimizer or method"),
        ({"max_trials": 0}, "expected a number above 0"), ({"max_trials": "many"}, "expected a whole number"),
        ({"max_time_s": "long"}, "expected a time such as 90s, 10m or 1h30m"),
        ({"max_time_s": float("inf")}, "expected a finite number"), ({"check_loss": -1}, "expected 0 or more"),
        ({"record": "perhaps"}, "expected true or false"), ({"model": 5}, "expected text"),
        ({"colour": "red"}, "is unknown"), ({"global_batch": "lots"}, "expected a whole number or any"),
    ],
)  # fmt: skip
def test_what_was_expected_is_said_in_a_line(fields, said):
    assert first_complaint(refused(**fields)) == said


def test_an_object_of_somebodys_own_is_named_by_its_type():
    with pytest.raises(InputError, match=r"^--model of type Sequential: expected text$"):
        options_of(SearchOptions, {"model": nn.Sequential(nn.Linear(2, 2))})


def test_every_word_of_ours_fits_an_error_of_pydantic_and_others_are_said_by_who_refuses():
    assert set(errors._WORDS) <= set(get_args(ErrorType))
    error = {"type": "value_error", "loc": (), "msg": "Value error, two of a kind", "input": 1, "ctx": {}}
    assert complaint(error) == "two of a kind"
    assert not re.search("Input should", first_complaint(refused(max_trials=-1)))
