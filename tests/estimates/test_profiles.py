"""The traces of a workload: made when first needed and kept for the next process; of a search as far as time allows."""

from types import SimpleNamespace

import pytest
from factories import Clock, make_workload
from profiles import make_family, make_profile

from autotune.cost import profiler
from autotune.cost.family import Family
from autotune.errors import InputError
from autotune.estimates import profiles as module
from autotune.estimates.profiles import Profiles, TraceRequest, Traces, run_trace, traces_left, traces_of
from autotune.value import read_value, write_value
from autotune.values.techniques import LoraAdapter

FAMILY = make_family()
FAMILIES = tuple(make_family(adapter=LoraAdapter(rank=rank)) for rank in (4, 8, 16))


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


def test_a_reason_is_not_stored(traced):
    half = make_family(dtype="bfloat16")
    for _ in range(2):
        profiles = Profiles(make_workload(), 10)
        assert half not in profiles
        assert str(profiles.failures[half]) == "tiny: can't be traced"
    assert traced == [half, half]


def request(families: tuple[Family, ...] = FAMILIES, **fields) -> TraceRequest:
    return TraceRequest(
        **{"workload": make_workload(), "families": families, "parameters": 1, "limit_s": 60.0, **fields}
    )


@pytest.fixture
def tracing(monkeypatch):
    """Return a function that puts another one, of a family, in the place of tracing."""

    def put(trace) -> None:
        monkeypatch.setattr(profiler, "profile", lambda spec, family, shape, **options: trace(family))

    return put


def test_every_family_is_traced_in_order(tracing):
    tracing(make_profile)
    traces = traces_of(request())
    assert [p.family for p in traces.profiles] == list(FAMILIES)
    assert traces.failures == ()


def test_a_family_that_can_not_be_traced_is_named_and_the_others_are(tracing):
    def fail_for_the_second(family):
        if family == FAMILIES[1]:
            raise InputError("tiny: can't be traced: no kernel")
        return make_profile(family)

    tracing(fail_for_the_second)
    traces = traces_of(request())
    assert [p.family for p in traces.profiles] == [FAMILIES[0], FAMILIES[2]]
    assert traces.failures == ("tiny: can't be traced: no kernel",)


def test_no_family_is_begun_after_the_limit(tracing, monkeypatch):
    clock = Clock()
    monkeypatch.setattr(module, "time", SimpleNamespace(process_time=clock, monotonic=Clock()))

    def take_40_seconds(family):
        clock.now_s += 40
        return make_profile(family)

    tracing(take_40_seconds)
    traces = traces_of(request(limit_s=60.0))
    assert [p.family for p in traces.profiles] == list(FAMILIES[:2])
    (failure,) = traces.failures
    assert "1 kinds of configurations are tried without one: tracing takes too long" in failure


def test_time_that_other_processes_take_does_not_count(tracing, monkeypatch):
    wall = Clock()
    monkeypatch.setattr(module, "time", SimpleNamespace(process_time=Clock(), monotonic=wall))

    def wait_an_hour(family):
        wall.now_s += 3600
        return make_profile(family)

    tracing(wait_an_hour)
    assert traces_of(request(limit_s=1.0)).failures == ()
    (failure,) = traces_of(request(limit_s=1.0, within_s=5000)).failures  # unless the search has no more of it
    assert failure.startswith("1 kinds of configurations are tried without one")


def test_the_answer_lies_beside_the_request(tracing, tmp_path):
    tracing(make_profile)
    write_value(request(), tmp_path / "request.json")
    run_trace(tmp_path)
    assert read_value(Traces, tmp_path / "answer.json") == traces_of(request())
    assert {path.name for path in tmp_path.iterdir()} == {"request.json", "answer.json"}


def test_what_an_ended_child_had_traced_is_kept(tracing, tmp_path):
    def ended_at_the_third(family):
        if family == FAMILIES[2]:
            raise SystemExit
        return make_profile(family)

    tracing(ended_at_the_third)
    write_value(request(), tmp_path / "request.json")
    with pytest.raises(SystemExit):
        run_trace(tmp_path)
    left = traces_left(tmp_path, "too slow")
    assert [p.family for p in left.profiles] == list(FAMILIES[:2])
    assert left.failures == ("too slow",)
