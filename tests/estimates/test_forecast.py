"""Configurations that fit a device, and the changes that would; the traces that predictions are based on."""

import logging
import os
import re
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import traced_once
from factories import Clock, make_config, make_facts, make_gpu, make_plan, make_result, make_workload
from plans import planned
from profiles import make_family, make_profile

from autotune.cost import profiler
from autotune.cost.family import Family, family_of, shape_of
from autotune.cost.model import CostModel
from autotune.cost.profiler import profile
from autotune.cost.rates import rates_by_table
from autotune.errors import InputError, NothingFitsError
from autotune.estimates import fitting
from autotune.estimates import forecast as module
from autotune.estimates.estimate import report, shortfall
from autotune.estimates.fitting import ANSWER_FILE, FitRequest, run_fitting, would_fit
from autotune.estimates.forecast import Forecast, Profiles, TraceRequest, Traces, run_trace, traces_left, traces_of
from autotune.estimates.report import Device
from autotune.planning.options import EstimateOptions, options_of
from autotune.space.file import load_space
from autotune.storage.home import add_observations, rates_of
from autotune.training.resolve import resolve
from autotune.units import GIB
from autotune.value import read_value, write_value
from autotune.values.config import Allowance, Parallelism
from autotune.values.techniques import LoraAdapter


def test_the_largest_micro_batch_of_a_free_global_batch_fits_and_the_next_does_not(estimated):
    def estimate(size: int):
        return estimated(global_batch="any", memory_bytes=3 * GIB, fix={"micro-batch": str(size)})

    largest = estimate(1).largest_micro_batch
    assert largest > 1
    assert [estimate(size).predicted.fits_at_all for size in (largest, largest + 1)] == [True, False]


def test_the_largest_micro_batch_of_a_given_global_batch_divides_it(estimated):
    assert estimated(global_batch=48, fix={"micro-batch": "4"}).largest_micro_batch == 48
    taken = estimated(global_batch=96, fix={"micro-batch": "12"}).predicted.memory.device_peak_bytes
    small = estimated(global_batch=96, memory_bytes=taken, fix={"micro-batch": "4"})
    assert small.largest_micro_batch == 12  # which no search tries
    small = estimated(gpu="t4", model="gpt2", seq_len=512, fix={"micro-batch": "8"})
    assert small.largest_micro_batch in (8, 16)
    assert small.predicted.fits_at_all


def test_a_configuration_that_does_not_fit_is_a_report_with_the_one_change_that_would(estimated, wide_llama):
    found = estimated(model=str(wide_llama), memory_bytes=3 * GIB, fix={"micro-batch": "64"})
    assert found.predicted.fits == "no"
    assert found.largest_micro_batch < 64
    assert f"with --fix micro-batch={found.largest_micro_batch} it takes" in found.would_fit
    error = shortfall(found)
    assert isinstance(error, NothingFitsError)
    assert "; the budget is 3.00 GiB; " in str(error)
    assert str(error).endswith("; as it is, it fits rtx-3070 with all of its 7.78 GiB")
    assert found.would_fit in str(error)


def test_a_micro_batch_that_is_refused_is_not_the_largest_and_bars_no_device(estimated):
    fix = {"optim": "lomo", "micro-batch": "64", "precision": "fp16"}  # its gradients can't accumulate
    given = {"model": "gpt2", "gpu": "rtx-4090", "seq_len": 1024, "global_batch": 64}
    assert estimated(**given, fix=fix).largest_micro_batch is None
    rows = estimated(model="gpt2", gpu="all", fix={"optim": "lomo", "precision": "fp16"}, global_batch=64).rows
    assert {row.best.config.per_device_train_batch_size for row in rows if row.best} == {64}


def test_where_the_evaluation_alone_does_not_fit_a_smaller_one_is_named(estimated):
    for how in ({"memory_bytes": GIB, "gpu": None}, {"devices": 4}):
        with pytest.raises(NothingFitsError, match="that of the evaluation: a smaller --eval-batch"):
            estimated(**how, eval_batch=1 << 20)


def test_a_given_way_that_a_nodes_memory_is_too_small_for_does_not_fit(estimated):
    how = {"devices": 2, "fix": {"sharding": "zero_3", "offload": "optimizer"}}
    assert shortfall(estimated(**how)) is None  # that of a node of the table isn't known
    found = estimated(**how, host_memory_bytes=1 << 10)
    assert "of each node's memory it takes" in str(shortfall(found))
    assert found.notes[0].startswith("does not fit the host: ")


def test_a_gpu_that_fits_what_another_does_not_can_run_it(estimated):
    """The smallest with the memory for it is a T4, which has no bf16."""
    fix = {"micro-batch": "12", "precision": "bf16"}
    given = {"model": "gpt2", "gpu": "rtx-3060", "memory_bytes": 10 * GIB, "seq_len": 512, "global_batch": 48}
    found = estimated(**given, fix=fix)
    assert "as it is, it fits " in found.would_fit
    assert "it fits t4" not in found.would_fit
    assert "it fits t4" in estimated(**given, fix=fix | {"precision": "fp16"}).would_fit
    on_cpu = {"gpu": None, "device": "cpu", "memory_bytes": GIB}
    compiled = estimated(**given | on_cpu, fix={"micro-batch": "1", "compile": "inductor"})
    assert "as it is, it fits " in compiled.would_fit  # of Triton, which a GPU takes, a CPU knows nothing


def test_where_one_change_is_not_enough_several_are_named_that_fit_together(estimated, fix_in):
    fix = fix_in(estimated(model="llama-2-7b", gpu="rtx-4090", fix={"micro-batch": "4"}).would_fit)
    assert len(fix) > 1
    assert estimated(model="llama-2-7b", gpu="rtx-4090", fix=fix).predicted.fits_at_all


def test_changes_that_weights_and_states_alone_rule_out_are_not_traced(estimated, monkeypatch):
    """Of 6,700 million weights only packed ones come near 10 GB."""
    asked, trace = [], traced_once.profile

    def counted(spec, family, shape, **options):
        asked.append(family)
        return trace(spec, family, shape, **options)

    monkeypatch.setattr("autotune.cost.profiler.profile", counted)
    found = estimated(model="llama-2-7b", gpu="rtx-3080", fix={"micro-batch": "1"})
    assert "quantization=nf4" in found.would_fit
    assert {family.quantization for family in asked[1:]} == {"nf4"}


def test_configurations_that_can_not_be_traced_are_left_out_with_the_reason(estimated, monkeypatch, tmp_path):
    reason = "the adapter can't be put on"

    def without_adapters(spec, family, shape, **options):
        if family.adapter is not None:
            raise InputError(reason)
        return traced_once.profile(spec, family, shape, **options)

    monkeypatch.setenv("AUTOTUNE_HOME", str(tmp_path))  # where no trace is stored
    monkeypatch.setattr("autotune.cost.profiler.profile", without_adapters)
    found = estimated(model="llama-2-7b", gpu="rtx-3080", fix={"micro-batch": "1"})
    assert found.would_fit.startswith("no change that was tried makes it fit")
    assert f"not ranked: {reason}" in estimated(allow="method").notes


def test_the_named_configuration_has_the_fastest_micro_batch_that_surely_fits_unless_it_was_given(estimated, fix_in):
    def estimate(**knobs):
        return estimated(model="llama-2-7b", gpu="rtx-4090", fix=knobs)

    with pytest.raises(NothingFitsError) as error:
        estimate()
    fix = fix_in(str(error.value))
    assert int(fix["micro-batch"]) > 1
    chosen, single = estimate(**fix).predicted, estimate(**fix | {"micro-batch": "1"}).predicted
    assert chosen.fits == "yes"
    assert chosen.samples_per_second > single.samples_per_second
    assert "micro-batch=1," in estimate(**{"micro-batch": "1"}).would_fit


@pytest.mark.slow
def test_the_loss_in_chunks_is_named_where_long_samples_have_too_many_logits(estimated):
    long = {"micro-batch": "1", "precision": "bf16", "checkpointing": "full", "adapter": "lora"}
    found = estimated(model="Llama-3.2-1B", gpu="rtx-3080", seq_len=4096, global_batch=8, fix=long)
    assert "chunked-loss=true" in found.would_fit


def test_if_nothing_fits_the_nearest_and_the_change_are_told(estimated, wide_llama, fix_in):
    some_gpu = {"model": str(wide_llama), "gpu": None, "memory_bytes": 1060 << 20}
    with pytest.raises(NothingFitsError) as error:
        estimated(allow="exact", **some_gpu)
    text = str(error.value)
    assert text.startswith("nothing fits: micro-batch 1, checkpointing full comes nearest")  # changed knobs alone
    told = ("a GPU has 1.04 GiB", "(--allow ", "which probably fits; as it is, it fits rtx-3070 (estimate --gpu)")
    assert all(words in text for words in told)
    found = estimated(fix=fix_in(text), **some_gpu)
    assert "; a GPU has " in found.predicted.miss(found.device)
    within = found.device.model_copy(update={"memory_bytes": 1 << 20})
    assert found.predicted.miss(within).endswith("; the budget is 1 MiB")
    assert found.predicted.fits_at_all


def test_of_those_that_take_about_the_least_the_one_with_the_smallest_passes_is_the_tightest():
    taken, held = {1: 1005.0, 8: 1000.0, 16: 2000.0}, SimpleNamespace(paged=0.0)

    def predict(configs):
        return SimpleNamespace(needed_bytes=np.array([taken[c.per_device_train_batch_size] for c in configs]))

    model = SimpleNamespace(predict=predict, share=lambda _: held)
    forecast = Forecast(make_plan(facts=make_facts(parameters=10)), None, model)
    assert forecast.tightest([make_config(size) for size in (16, 8, 1)]) == make_config(1)


def test_measurements_of_earlier_searches_correct_the_estimate(tiny_llama, tmp_path, monkeypatch):
    monkeypatch.setenv("AUTOTUNE_HOME", str(tmp_path))
    options = options_of(EstimateOptions, {"model": str(tiny_llama), "device": "cpu", "fix": {"micro-batch": "8"}})
    before = report(options)
    config, workload, hardware = before.predicted.config, before.workload, before.device.hardware
    traced = profile(workload.model, family_of(config, hardware), shape_of(workload))
    model = CostModel.of(workload, hardware, rates_of(hardware), [traced])
    add_observations(hardware, "llama", [model.observation(make_result(config, workload=workload))])
    after = report(options)
    assert "corrected by 1 trial of earlier searches" in after.notes
    assert after.predicted.speed.samples_per_second != before.predicted.speed.samples_per_second


def test_a_search_is_answered_by_the_change_that_fits_though_it_may_not_make_it(wide_llama, tmp_path, monkeypatch):
    monkeypatch.setattr(fitting, "read_observations", lambda *_: ())  # those of other tests
    plan = planned(model=str(wide_llama), allow=Allowance.EXACT, memory="90MiB")
    traced = profile(plan.workload.model, family_of(plan.baseline, plan.hardware), shape_of(plan.workload))
    configs = tuple(plan.every_config())
    asked = FitRequest(plan=plan, rates=rates_of(plan.hardware), profiles=(traced,), configs=configs)
    write_value(asked, tmp_path / "request.json")
    run_fitting(tmp_path)
    text = (tmp_path / ANSWER_FILE).read_text()
    assert re.match(r"nothing fits: .* comes nearest and takes .* with --fix .*\(--allow ", text)


def test_devices_that_share_the_tokens_are_named_where_a_short_search_leaves_them_out():
    spec, gpus = resolve("meta-llama/Llama-3.2-1B"), make_gpu(name="NVIDIA A100-SXM4-80GB", count=2)
    spread = Parallelism(world_size=2, sharding="fsdp_full")
    lightest = {"precision": "bf16", "checkpointing": "full", "attn_implementation": "sdpa", "parallelism": spread}
    plan = make_plan(
        workload=make_workload(model=spec, sequence_length=65536, global_batch_size=2),
        facts=make_facts(has_self_attn=True, parameters=1_235_814_400),
        hardware=gpus, baseline=make_config(1, **lightest), space=load_space("fsdp"), allowance=Allowance.NUMERICS,
    )  # fmt: skip
    assert not any("sequence" in dimension.name for dimension in plan.search_space.dimensions)
    traced = profile(spec, family_of(plan.baseline, gpus), shape_of(plan.workload))
    model = CostModel.of(plan.workload, gpus, rates_by_table(gpus), [traced])
    model = replace(model, profiles=Profiles(plan.workload, None, known=model.profiles))
    device = Device(name="two", hardware=gpus, memory_bytes=0, rates="a data sheet")
    shared = plan.baseline.model_copy(update={"parallelism": spread.model_copy(update={"sequence_parallel": 2})})
    estimates = (Forecast(plan, device, model).estimate(config) for config in (plan.baseline, shared))
    needed = [estimate.memory.device_peak_bytes for estimate in estimates]
    device = device.model_copy(update={"memory_bytes": sum(needed) // 2})
    text = would_fit(Forecast(plan, device, model), plan.baseline, Allowance.NUMERICS, whole=False)
    assert "sequence-parallel=2 it takes " in text


# The traces of a workload: made when first needed and kept for the next process; of a search as time allows

FAMILY = make_family()
FAMILIES = tuple(make_family(adapter=LoraAdapter(rank=rank)) for rank in (4, 8, 16))


@pytest.fixture
def tracing(monkeypatch, tmp_path_factory):
    """Return a function that puts another one, of a family, in the place of tracing; it returns the traced families."""
    monkeypatch.setenv("AUTOTUNE_HOME", str(tmp_path_factory.mktemp("home")))

    def put(trace) -> list[Family]:
        traced = []

        def profile(_spec, family, _shape, **_):
            traced.append(family)
            return trace(family)

        monkeypatch.setattr(profiler, "profile", profile)
        return traced

    return put


def fail_for_the_second(family):
    if family == FAMILIES[1]:
        raise InputError("tiny: can't be traced: no kernel")
    return make_profile(family)


def test_a_family_is_traced_once_for_all_processes_and_again_for_a_model_of_another_size(tracing):
    traced = tracing(make_profile)
    for parameters in (10, 10, 11):
        assert Profiles(make_workload(), parameters)[FAMILY] == make_profile(FAMILY)
    assert traced == [FAMILY, FAMILY]


def test_inductors_programs_are_traced_where_that_is_asked_for_and_then_known_everywhere(tracing):
    tracing(make_profile)
    compiled = make_family(device="cuda", compiled=True)
    assert compiled not in Profiles(make_workload(), 10)
    assert compiled in Profiles(make_workload(), 10, compiles=True)
    assert compiled in Profiles(make_workload(), 10)


def test_threads_trace_one_after_the_other(tracing):
    inside = []

    def trace(family):
        inside.append(family)
        time.sleep(0.05)
        assert inside == [family]
        return make_profile(inside.pop())

    tracing(trace)
    with ThreadPoolExecutor() as pool:
        assert all(pool.map(lambda family: family in Profiles(make_workload(), 10), FAMILIES))


def test_a_reason_is_not_stored(tracing):
    traced, family = tracing(fail_for_the_second), FAMILIES[1]
    for _ in range(2):
        profiles = Profiles(make_workload(), 10)
        assert family not in profiles
        assert str(profiles.failures[family]) == "tiny: can't be traced: no kernel"
    assert traced == [family, family]


def request(**limits) -> TraceRequest:
    about = {"workload": make_workload(), "families": FAMILIES, "parameters": 1, "limit_s": 60.0}
    return TraceRequest(**{**about, **limits})


def test_families_are_traced_in_order_and_one_that_can_not_be_is_named(tracing):
    tracing(fail_for_the_second)
    traces = traces_of(request())
    assert [p.family for p in traces.profiles] == [FAMILIES[0], FAMILIES[2]]
    assert traces.failures == ("tiny: can't be traced: no kernel",)


def test_no_family_is_begun_after_the_limit_of_processor_time_or_the_time_that_the_search_has(tracing, monkeypatch):
    processor, wall = Clock(), Clock()
    monkeypatch.setattr(module, "time", SimpleNamespace(process_time=processor, monotonic=wall))

    def take_long_on_a_busy_machine(family):
        processor.now_s += 40
        wall.now_s += 3600
        return make_profile(family)

    tracing(take_long_on_a_busy_machine)
    assert traces_of(request(limit_s=100.0)).left == 0
    for limits in ({"parameters": 2}, {"parameters": 3, "limit_s": 100.0, "within_s": 5000}):  # none is stored yet
        traces = traces_of(request(**limits))
        assert [p.family for p in traces.profiles] == list(FAMILIES[:2])
        assert (traces.failures, traces.left) == ((), 1)


def test_the_answer_lies_beside_the_request_and_the_traces_are_stored(tracing, tmp_path):
    traced = tracing(make_profile)
    write_value(request(), tmp_path / "request.json")
    run_trace(tmp_path)
    answer = read_value(Traces, tmp_path / "answer.json")
    assert {profile.family for profile in answer.profiles} == set(FAMILIES)
    assert set(answer.profiles) == set(traces_of(request()).profiles)
    assert traced == []  # here: the child's processes have stored them
    assert {path.name for path in tmp_path.iterdir()} == {"request.json", "answer.json"}


@pytest.mark.parametrize("cores", [1, 2, 8])
def test_families_that_share_a_pass_are_traced_by_one_process(cores, tracing, tmp_path, monkeypatch):
    monkeypatch.setattr(module.os, "sched_getaffinity", lambda _: set(range(cores)))

    def note_and_fail_for_the_second(family):
        with (tmp_path / f"by-{os.getpid()}").open("a") as file:
            file.write(f"{family.adapter.rank}\n")
        return fail_for_the_second(family)

    tracing(note_and_fail_for_the_second)
    families = tuple(f.model_copy(update={"checkpointing": kind}) for kind in ("none", "full") for f in FAMILIES)
    write_value(request(families=families), tmp_path / "request.json")
    run_trace(tmp_path)
    traced = [path.read_text().split() for path in tmp_path.glob("by-*")]
    assert len(traced) <= cores  # a process that is soon done takes another one's share
    for rank in ("4", "8", "16"):
        assert max(ranks.count(rank) for ranks in traced) == 2
    answer = read_value(Traces, tmp_path / "answer.json")
    assert {p.family for p in answer.profiles} == {f for f in families if f != FAMILIES[1]}
    assert answer.failures == ("tiny: can't be traced: no kernel",)


def test_warnings_of_libraries_stay_out_of_the_log_by_which_a_search_tells_that_tracing_failed(tracing, caplog):
    def warn(family):
        logging.getLogger("bitsandbytes").warning("a real training would be slow so")
        return make_profile(family)

    tracing(warn)
    assert traces_of(request()).failures == ()
    assert caplog.text == ""


def test_the_profiles_of_an_ended_child_are_kept(tracing, tmp_path):
    def end_at_the_third(family):
        if family == FAMILIES[2]:
            while len([*tmp_path.glob("profile-*.json")]) < 2:  # another process may trace the second
                time.sleep(0.01)
            raise SystemExit
        return make_profile(family)

    tracing(end_at_the_third)
    write_value(request(), tmp_path / "request.json")
    with pytest.raises(SystemExit):
        run_trace(tmp_path)
    left = traces_left(tmp_path, "too slow")
    assert {p.family for p in left.profiles} == set(FAMILIES[:2])
    assert left.failures == ("too slow",)
