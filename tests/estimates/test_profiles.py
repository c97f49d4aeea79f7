"""The traces of a workload: made when they are first needed, and read from the home by the next process."""

import pytest
from factories import make_workload
from profiles import make_family, make_profile

from autotune.cost import profiler
from autotune.errors import InputError
from autotune.estimates.profiles import Profiles

FAMILY = make_family()


@pytest.fixture
def traced(monkeypatch, tmp_path):
    """The families that were traced; tracing needs no model here."""
    monkeypatch.setenv("AUTOTUNE_HOME", str(tmp_path))
    families = []

    def profile(_spec, family, _shape, **_):
        families.append(family)
        if family.dtype == "bfloat16":
            raise InputError("tiny: can't be traced")
        return make_profile(family)

    monkeypatch.setattr(profiler, "profile", profile)
    return families


def test_a_family_is_traced_once_for_all_processes(traced):
    assert Profiles(make_workload(), 10)[FAMILY] == make_profile(FAMILY)
    assert Profiles(make_workload(), 10)[FAMILY] == make_profile(FAMILY)
    assert traced == [FAMILY]


def test_a_model_of_another_size_is_traced(traced):
    Profiles(make_workload(), 10)[FAMILY]
    Profiles(make_workload(), 11)[FAMILY]
    assert traced == [FAMILY, FAMILY]


def test_profiles_that_are_known_are_neither_read_nor_traced(traced):
    known = {FAMILY: make_profile(FAMILY)}
    assert dict(Profiles(make_workload(), 10, known)) == known
    assert traced == []


def test_a_reason_is_not_stored(traced):
    half = make_family(dtype="bfloat16")
    for _ in range(2):
        profiles = Profiles(make_workload(), 10)
        assert half not in profiles
        assert str(profiles.failures[half]) == "tiny: can't be traced"
    assert traced == [half, half]
