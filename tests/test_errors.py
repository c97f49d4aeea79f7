"""The exception tree: exit codes and suggestions."""

import pytest

from autotune import errors
from autotune.errors import AutotuneError, suggestion
from autotune.search.tuner import SearchInterrupted

EXIT_CODES = {
    "AutotuneError": 1,
    "InputError": 2,
    "UnknownModelError": 2,
    "SearchSpaceError": 2,
    "RunDirectoryError": 2,
    "RecordError": 2,
    "MachineError": 3,
    "InfrastructureError": 4,
    "NothingFitsError": 5,
}


def test_exit_codes_are_those_that_are_documented():
    found = {n: c.exit_code for n, c in vars(errors).items() if isinstance(c, type) and issubclass(c, AutotuneError)}
    assert found == EXIT_CODES


def test_the_tree_in_the_docstring_names_every_error():
    for name in EXIT_CODES:
        assert name in (errors.__doc__ or "")


def test_an_interrupted_search_ends_like_an_interrupted_command():
    assert SearchInterrupted.exit_code == errors.EXIT_INTERRUPTED == 130


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("precison", " (did you mean 'precision'?)"),
        ("PRECISION", " (did you mean 'precision'?)"),
        ("gpt", " (did you mean 'GPT-2'?)"),
        ("qqq", ""),
    ],
)
def test_the_nearest_name_is_suggested_as_it_is_written(word, said):
    assert suggestion(word, ["precision", "optim", "GPT-2"]) == said


def test_names_may_come_from_an_iterator():
    assert suggestion("optm", iter(["optim"])) == " (did you mean 'optim'?)"


def test_several_near_names_are_all_offered():
    assert suggestion("adamw_8", ["adamw_8bit", "adamw_4bit"]) == " (did you mean 'adamw_8bit' or 'adamw_4bit'?)"
