"""What fits a device, and what would; what a prediction stands on."""

import re
from types import SimpleNamespace

import pytest
import traced_once
from factories import Clock, make_result, make_workload
from plans import planned
from profiles import make_family, make_profile

from autotune.cost import profiler
from autotune.cost.family import Family, family_of, shape_of
from autotune.cost.model import CostModel
from autotune.cost.profiler import profile
from autotune.errors import InputError, NothingFitsError
from autotune.estimates import fitting
from autotune.estimates import forecast as module
from autotune.estimates.estimate import report, shortfall
from autotune.estimates.fitting import FitAnswer, FitRequest, run_fitting
from autotune.estimates.forecast import Profiles, TraceRequest, Traces, run_trace, traces_left, traces_of
from autotune.estimates.request import EstimateOptions
from autotune.planning.options import options_of
from autotune.storage.home import add_observations, rates_of
from autotune.units import GIB
from autotune.value import read_value, write_value
from autotune.values.config import Allowance
from autotune.values.techniques import LoraAdapter

GPU = "rtx-3070"  # 7.8 GiB


def test_the_largest_micro_batch_of_a_free_global_batch_fits_and_the_next_does_not(estimated):
    memory_bytes = 3 * GIB
    found = estimated(global_batch="any", memory_bytes=memory_bytes, fix={"micro-batch": "1"})
    largest = found.largest_micro_batch

    def peak(size: int) -> int:
        fix = {"micro-batch": str(size)}
        again = estimated(global_batch="any", memory_bytes=memory_bytes, fix=fix)
        return again.predicted.memory.device_peak_bytes

    assert largest > 1
    assert peak(largest) <= memory_bytes < peak(largest + 1)


def test_the_largest_micro_batch_of_a_given_global_batch_is_on_its_lattice(estimated):
    assert estimated(global_batch=48, fix={"micro-batch": "4"}).largest_micro_batch == 48
    small = estimated(gpu="t4", model="gpt2", seq_len=512, fix={"micro-batch": "8"})
    assert small.largest_micro_batch in (8, 16)
    assert small.predicted.fits_at_all


def test_what_does_not_fit_is_a_report_with_the_one_change_that_would(estimated, wide_llama):
    found = estimated(model=str(wide_llama), memory_bytes=3 * GIB, fix={"micro-batch": "64"})
    assert found.predicted.fits == "no"
    assert found.largest_micro_batch < 64
    assert f"with --fix micro-batch={found.largest_micro_batch} it takes" in found.would_fit
    error = shortfall(found)
    assert isinstance(error, NothingFitsError)
    assert "rtx-3070 has 3.00 GiB" in str(error)
    assert found.would_fit in str(error)


def test_where_one_change_is_not_enough_several_are_named_that_fit_together(estimated):
    found = estimated(model="llama-2-7b", gpu="rtx-4090", fix={"micro-batch": "4"})
    (named,) = re.findall(r"with --fix (\S+) \(--allow method\)|with --fix (\S+) it takes", found.would_fit)
    fix = dict(pair.split("=") for pair in next(filter(None, named)).split(","))
    assert len(fix) > 1
    assert estimated(model="llama-2-7b", gpu="rtx-4090", fix=fix).predicted.fits_at_all  # as it can be pasted


def test_what_weights_and_states_alone_rule_out_is_not_traced_to_find_what_would_fit(estimated, monkeypatch):
    """Of 6,700 million weights only packed ones come near 10 GB."""
    asked, trace = [], traced_once.profile

    def counted(spec, family, shape, **options):
        asked.append(family)
        return trace(spec, family, shape, **options)

    monkeypatch.setattr("autotune.cost.profiler.profile", counted)
    found = estimated(model="llama-2-7b", gpu="rtx-3080", fix={"micro-batch": "1"})
    assert "quantization=nf4" in found.would_fit
    assert {family.quantization for family in asked[1:]} == {"nf4"}


def test_what_would_fit_has_the_fastest_micro_batch_that_surely_fits_unless_it_was_given(estimated):
    with pytest.raises(NothingFitsError) as error:
        estimated(model="llama-2-7b", gpu="rtx-4090")
    (named,) = re.findall(r"with --fix (\S+) ", str(error.value))
    fix = dict(pair.split("=") for pair in named.split(","))
    assert int(fix["micro-batch"]) > 1
    by_size = {
        size: estimated(model="llama-2-7b", gpu="rtx-4090", fix={**fix, "micro-batch": str(size)}).predicted
        for size in (1, int(fix["micro-batch"]))
    }
    chosen = by_size[int(fix["micro-batch"])]
    assert chosen.fits == "yes"
    assert chosen.samples_per_second > by_size[1].samples_per_second
    given = estimated(model="llama-2-7b", gpu="rtx-4090", fix={"micro-batch": "1"})
    assert "micro-batch=1," in given.would_fit


@pytest.mark.slow
def test_the_loss_in_chunks_is_named_where_long_samples_have_too_many_logits(estimated):
    long = {"micro-batch": "1", "precision": "bf16", "checkpointing": "full", "adapter": "lora"}
    found = estimated(model="Llama-3.2-1B", gpu="rtx-3080", seq_len=4096, global_batch=8, fix=long)
    assert "chunked-loss=true" in found.would_fit


def test_if_nothing_fits_the_nearest_and_the_change_are_told(estimated, wide_llama):
    with pytest.raises(NothingFitsError) as error:
        estimated(model=str(wide_llama), allow="exact", gpu=None, memory_bytes=1060 << 20)
    text = str(error.value)
    assert text.startswith("nothing fits: micro-batch 1, checkpointing full comes nearest")  # what differs
    assert "a GPU has 1.04 GiB" in text
    assert "(--allow " in text
    assert "which probably fits; as it is, it fits rtx-3070 (--gpu)" in text
    (named,) = re.findall(r"with --fix (\S+) ", text)
    fix = dict(pair.split("=") for pair in named.split(","))
    assert estimated(model=str(wide_llama), gpu=None, memory_bytes=1060 << 20, fix=fix).predicted.fits_at_all


def test_what_earlier_searches_measured_corrects_the_estimate(tiny_llama, tmp_path, monkeypatch):
    monkeypatch.setenv("AUTOTUNE_HOME", str(tmp_path))
    options = options_of(EstimateOptions, {"model": str(tiny_llama), "device": "cpu", "fix": {"micro-batch": "8"}})
    before = report(options)
    config, workload = before.predicted.config, before.workload
    hardware = before.device.hardware
    traced = profile(workload.model, family_of(config, hardware), shape_of(workload))
    model = CostModel.of(workload, hardware, rates_of(hardware), [traced])
    add_observations(hardware, "llama", [model.observation(make_result(config, workload=workload))])
    after = report(options)
    assert "corrected by 1 trial of earlier searches" in after.notes
    assert after.predicted.speed.samples_per_second != before.predicted.speed.samples_per_second


def test_the_answer_names_the_change_that_fits_though_the_search_may_not_make_it(wide_llama, tmp_path, monkeypatch):
    monkeypatch.setattr(fitting, "read_observations", lambda *_: ())  # those of other tests
    plan = planned(model=str(wide_llama), allow=Allowance.EXACT, memory="90MiB")
    traced = profile(plan.workload.model, family_of(plan.baseline, plan.hardware), shape_of(plan.workload))
    write_value(
        FitRequest(plan=plan, rates=rates_of(plan.hardware), profiles=(traced,), configs=tuple(plan.every_config())),
        tmp_path / "request.json",
    )
    run_fitting(tmp_path)
    text = read_value(FitAnswer, tmp_path / "answer.json").text
    assert text.startswith("nothing fits: ")
    assert " comes nearest and takes " in text
    assert "with --fix " in text
    assert "(--allow " in text


# The traces of a workload: made when first needed and kept for the next process; of a search as time allows

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
