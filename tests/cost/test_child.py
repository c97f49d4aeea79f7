"""The families of a search are traced in order, as far as time allows; what can't be traced is named."""

from types import SimpleNamespace

import pytest
from factories import Clock, make_workload
from profiles import make_family, make_profile

from autotune.cost import child, profiler
from autotune.cost.child import TraceRequest, Traces, run_trace, traces_left, traces_of
from autotune.cost.family import Family
from autotune.errors import InputError
from autotune.value import read_value, write_value
from autotune.values.adapters import LoraAdapter

FAMILIES = tuple(make_family(adapter=LoraAdapter(rank=rank)) for rank in (4, 8, 16))


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


def test_the_same_reason_is_named_once(tracing):
    def fail(family):
        raise InputError("tiny: can't be traced: no kernel")

    tracing(fail)
    assert traces_of(request()) == Traces(profiles=(), failures=("tiny: can't be traced: no kernel",))


def test_no_family_is_begun_after_the_limit(tracing, monkeypatch):
    clock = Clock()
    monkeypatch.setattr(child, "time", SimpleNamespace(process_time=clock, monotonic=Clock()))

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
    monkeypatch.setattr(child, "time", SimpleNamespace(process_time=Clock(), monotonic=wall))

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


def test_a_real_models_profile_survives_its_file(profile_of, tmp_path):
    traces = Traces(profiles=(profile_of("llama", device="cuda", autocast="bfloat16"),))
    write_value(traces, tmp_path / "answer.json")
    assert read_value(Traces, tmp_path / "answer.json") == traces


def test_a_real_model_is_traced(profile_of, facts_of, spec_of):
    workload = make_workload(model=spec_of("llama"), sequence_length=64)
    traces = traces_of(request((make_family(),), workload=workload, parameters=facts_of("llama").parameters))
    assert traces == Traces(profiles=(profile_of("llama"),))
