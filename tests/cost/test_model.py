"""Predictions of one configuration and of many agree; measurements correct them; what is unknown stays unknown."""

import math
from dataclasses import replace

import numpy as np
import pytest
from factories import (
    CRASHED,
    OUT_OF_MEMORY,
    make_config,
    make_gpu,
    make_limits,
    make_measurement,
    make_result,
    make_workload,
)
from profiles import MB, line, make_family, make_group, make_model, make_profile, make_rates, make_storages, make_work

from autotune.cost.corrections import Z
from autotune.cost.memory import framework_bytes
from autotune.cost.profile import ForwardPass
from autotune.cost.reserve import held_bytes
from autotune.cost.sharding import NCCL_BYTES
from autotune.units import GIB
from autotune.values.config import Parallelism
from autotune.values.trial import Memory
from autotune.values.workload import LengthProfile

LENGTHS = LengthProfile(samples=1000, mean=20.0, minimum=5, median=18, p95=40, maximum=60)


def large_profile(family=None, **fields):
    """Gigabytes, beside which what a process takes is little: 4 GB of weights, 1 GB a sample."""
    gb = 1000 * MB
    defaults = {
        "parameters": (make_group(1000, 1000, count=1000),),
        "storages": make_storages((0, 2, 0, gb), (3, 4, 4 * gb, 0, True), workspaces=(0, 0)),
    }
    return make_profile(family, **{**defaults, **fields})


@pytest.fixture
def model():
    """Of fp32 and bf16 on a CPU, at a global batch of 16."""
    half = make_profile(make_family(autocast="bfloat16"), work=(make_work(width=2),))
    return make_model([make_profile(), half])


@pytest.fixture
def on_gpu():
    return make_model([large_profile(make_family(device="cuda"))], hardware=make_gpu())


CONFIGS = [
    make_config(size, precision=precision, optim=optim)
    for size in (1, 4, 16)
    for precision in ("fp32", "bf16")
    for optim in ("adamw_torch", "adamw_torch_fused")
]


def test_many_at_once_are_predicted_as_each_alone_of_which_an_estimate_is_the_detail(model):
    together = model.predict(CONFIGS)
    for row, config in enumerate(CONFIGS):
        estimate, predicted = model.estimate(config), model.predict([config])
        for name in ("samples_per_second", "log_deviation", "needed_bytes", "needed_deviation"):
            assert getattr(together, name)[row] == pytest.approx(getattr(predicted, name)[0])
        assert estimate.samples_per_second == predicted.samples_per_second[0]
        assert estimate.step_time_s == pytest.approx(16 / estimate.samples_per_second)
        assert estimate.memory.device_peak_bytes == pytest.approx(predicted.needed_bytes[0], abs=1)
        assert estimate.tokens_per_second == pytest.approx(128 * estimate.samples_per_second)


def test_on_a_gpu_the_allocators_leftovers_and_the_context_come_on_top(on_gpu):
    config = make_config(8)
    memory = on_gpu.estimate(config).memory
    unused = held_bytes(on_gpu.profile(config), config.optim, 8, accumulated=True).unused
    assert memory.reserved_peak_bytes == pytest.approx(memory.allocated_peak_bytes + unused, abs=2)
    assert memory.framework_bytes == round(framework_bytes(make_gpu())[0])
    assert memory.device_peak_bytes == pytest.approx(memory.reserved_peak_bytes + memory.framework_bytes, rel=1e-3)


def test_utilisation_is_needed_work_over_the_peak():
    rates, free = make_rates(peak_flops={"fp32": 2e8}), make_workload(global_batch_size=None)
    whole, one_micro_batch = (
        make_model(rates=rates, **given).estimate(make_config(4)) for given in ({}, {"workload": free})
    )
    assert (whole.flops_per_step, one_micro_batch.flops_per_step) == (16 * 10 * MB, 4 * 10 * MB)
    assert whole.mfu == pytest.approx(16 * 10 * MB / whole.step_time_s / 2e8)
    assert make_model().estimate(make_config()).mfu is None


@pytest.mark.parametrize("part", ["allocated", "reserved", "device"])
def test_a_compiled_models_activations_may_be_few_or_three_times_as_many(on_gpu, part):
    plain, compiled = (make_config(8, torch_compile_backend=name) for name in (None, "inductor"))
    estimate = on_gpu.estimate(compiled)
    memory = estimate.memory
    assert estimate.notes
    interval, moving = getattr(memory, f"{part}_interval"), memory.activations_bytes + memory.temporaries_bytes
    peak = getattr(memory, f"{part}_peak_bytes")
    assert memory.weights_bytes <= interval.low < peak - 0.7 * moving
    assert interval.high > peak + 2.0 * moving
    assert peak == getattr(on_gpu.estimate(plain).memory, f"{part}_peak_bytes")


def test_a_compiled_model_whose_programs_are_traced_is_predicted_as_any_other(on_gpu):
    config = make_config(8, torch_compile_backend="inductor")
    light = large_profile(make_family(device="cuda", compiled=True))
    light = light.model_copy(update={"storages": make_storages((0, 2, 0, 250 * MB), (3, 4, 4000 * MB, 0, True))})
    learned = on_gpu.with_profile(light)
    by_rule, traced = (one.estimate(config) for one in (on_gpu, learned))
    assert by_rule.notes
    assert not traced.notes
    assert traced.memory.activations_bytes < 0.5 * by_rule.memory.activations_bytes
    spread = traced.memory.allocated_interval
    assert spread.high - spread.low < 0.1 * traced.memory.allocated_peak_bytes
    assert learned.predict([config]).surely_bytes[0] == 0.0
    assert learned.estimate(make_config(8)) == on_gpu.estimate(make_config(8))


def test_a_compiled_model_may_fit_in_half_of_its_prediction_but_in_no_less(on_gpu):
    found = on_gpu.predict([make_config(16, torch_compile_backend="inductor")])
    needed = found.needed_bytes[0]
    assert found.least_bytes[0] == pytest.approx(needed / 2)
    assert found.chance_to_fit(0.45 * needed)[0] == 0.0 < found.chance_to_fit(0.55 * needed)[0]


@pytest.mark.parametrize("factor", [0.3, 2.6])
def test_compiled_models_teach_nothing_of_models_as_written(on_gpu, factor):
    trial = compiled_trial(on_gpu, factor)
    learned = on_gpu.observe(trial)
    (plain, before), (plain_after, after) = (
        [one.estimate(config).memory.allocated_peak_bytes for config in (make_config(8), trial.request.config)]
        for one in (on_gpu, learned)
    )
    assert plain_after == pytest.approx(plain, rel=0.005)
    measured = trial.measurement.memory.allocated_bytes
    assert abs(after - measured) < 0.7 * abs(before - measured)


@pytest.mark.parametrize("factor", [0.3, 2.0])
def test_one_compiled_model_does_not_refuse_another_that_fits_as_written(on_gpu, factor):
    learned = on_gpu.observe(compiled_trial(on_gpu, factor))
    least = learned.predict([make_config(16, torch_compile_backend="inductor")]).least_bytes[0]
    assert least < on_gpu.predict([make_config(16)]).needed_bytes[0]


def compiled_trial(model, factor):
    """A trial whose activations take `factor` times what they take as the model is written."""
    config = make_config(8, torch_compile_backend="inductor")
    memory = model.estimate(config).memory
    more = (factor - 1) * (memory.activations_bytes + memory.temporaries_bytes)
    peaks = {f"{p}_bytes": int(getattr(memory, f"{p}_peak_bytes") + more) for p in ("allocated", "reserved", "device")}
    return make_result(config, make_measurement(5.0, memory=Memory(**peaks)))


def test_an_unknown_family_has_no_prediction(model):
    unknown = make_config(attn_implementation="eager")
    assert model.profile(unknown) is None
    assert model.estimate(unknown) is None
    predicted = model.predict([make_config(), unknown])
    chances = predicted.chance_to_fit(GIB)
    for array in (predicted.samples_per_second, predicted.log_deviation, predicted.least_bytes, chances):
        assert np.isnan(array).tolist() == [False, True]
    assert len(model.predict([]).samples_per_second) == 0


def test_memory_with_experts_leaves_a_margin_for_uneven_routing():
    even, uneven = (make_model([large_profile()], experts=experts) for experts in (0, 8))
    configs = [make_config(size) for size in (1, 2, 4, 8)]
    peaks = even.predict(configs).needed_bytes
    memories = [Memory(resident_bytes=round(peak)) for peak in peaks]
    learned = [make_result(c, make_measurement(memory=m)) for c, m in zip(configs, memories, strict=True)]
    sure, unsure = (m.observe(*learned).predict(configs[2:3]) for m in (even, uneven))
    assert unsure.needed_bytes == sure.needed_bytes
    margin = 0.03 * sure.needed_bytes[0]
    assert Z * sure.needed_deviation[0] < margin == pytest.approx(Z * unsure.needed_deviation[0], rel=0.01)


@pytest.mark.parametrize("knobs", [{"train_sampling_strategy": "group_by_length"}, {"packing": True}])
def test_without_padding_samples_are_faster_and_need_as_much_memory(knobs):
    padded = make_model(workload=make_workload(lengths=LENGTHS))
    config = make_config(8)
    plain, saving = padded.predict([config]), padded.predict([config.model_copy(update=knobs)])
    assert saving.samples_per_second > 1.2 * plain.samples_per_second
    assert saving.needed_bytes == plain.needed_bytes


def test_balanced_micro_batches_are_faster_and_need_the_memory_of_the_largest():
    padded = make_model([large_profile()], workload=make_workload(lengths=LENGTHS))
    config = make_config(8)
    saving = config.model_copy(update={"train_sampling_strategy": "batch_rebalance"})
    plain, balanced = (padded.predict([one]) for one in (config, saving))
    assert balanced.samples_per_second > 1.1 * plain.samples_per_second
    assert balanced.needed_bytes < plain.needed_bytes
    assert padded.estimate(saving).memory.device_peak_bytes < padded.estimate(config).memory.device_peak_bytes


def measured(model, config, *, slower: float = 1.0, more: float = 1.0, **fields):
    """The result of a trial that takes so many times the predicted seconds and memory."""
    estimate = model.estimate(config)
    memory = Memory(resident_bytes=int(estimate.memory.device_peak_bytes * more))
    return make_result(config, make_measurement(estimate.samples_per_second / slower, memory=memory), **fields)


def test_a_measurement_moves_the_prediction_towards_it(model):
    config = make_config(8)
    learned = model.observe(measured(model, config, slower=2.0))
    before, after = (one.estimate(config) for one in (model, learned))
    assert after.step_time_s == pytest.approx(2 * before.step_time_s, rel=0.1)
    interval = after.samples_per_second_interval, before.samples_per_second_interval
    assert interval[0].high / interval[0].low < interval[1].high / interval[1].low


def test_observations_are_of_the_uncorrected_prediction_and_without_a_memory_of_the_time_alone(model):
    """Otherwise what is kept for the next search would depend on the order of trials."""
    result = measured(model, make_config(8), slower=2.0)
    assert model.observe(result).observation(result) == model.observation(result)
    unknown = result.outcome.model_copy(update={"memory": Memory()})
    found = model.observation(result.model_copy(update={"outcome": unknown}))
    assert found.memory == found.memory_features == {}
    assert found.log_time == model.observation(result).log_time


def test_a_crash_and_running_out_of_memory_where_it_was_expected_teach_nothing():
    model = make_model([large_profile()])
    short = make_result(make_config(8), OUT_OF_MEMORY, limits=make_limits(memory_bytes=GIB))
    assert model.observe(make_result(make_config(), CRASHED), short) is model


def test_running_out_of_memory_unexpectedly_teaches_that_more_is_needed_and_a_peak_that_was_seen_how_much():
    model = make_model([large_profile()])
    config, other = make_config(4), make_config(4, optim="adamw_torch")
    budget = int(1.02 * model.predict([config]).needed_bytes[0])
    short = make_result(config, OUT_OF_MEMORY, limits=make_limits(memory_bytes=budget))
    learned = model.observe(short)
    assert model.predict([config]).chance_to_fit(budget)[0] > 0.8
    assert learned.predict([config]).chance_to_fit(budget)[0] < 0.6
    assert learned.predict([other]).needed_bytes[0] > model.predict([other]).needed_bytes[0]
    assert math.isclose(learned.estimate(config).samples_per_second, model.estimate(config).samples_per_second)
    memory = Memory(resident_bytes=int(1.1 * budget))
    seen = model.observe(short.model_copy(update={"outcome": short.outcome.model_copy(update={"memory": memory})}))
    assert seen.predict([config]).needed_bytes > 1.05 * learned.predict([config]).needed_bytes


@pytest.mark.parametrize("spread", [{}, {"world_size": 2, "ddp_find_unused_parameters": False}])
@pytest.mark.parametrize("over", [0.96, 0.98, 1.0, 1.02, 1.04])
def test_running_out_of_memory_never_teaches_that_less_is_needed(on_gpu, spread, over):
    """The allocator's replay, which is learned from, may need more than the closed form, which is predicted."""
    config = make_config(4, parallelism=Parallelism(**spread))
    budget = int(over * on_gpu.predict([config]).needed_bytes[0])
    learned = on_gpu.observe(make_result(config, OUT_OF_MEMORY, limits=make_limits(memory_bytes=budget)))
    before, after = (model.predict([config]).needed_bytes[0] for model in (on_gpu, learned))
    assert before <= after <= max(before, 1.01 * budget + 2)


def test_configurations_are_counted_once_and_anew_for_another_device(model, monkeypatch):
    configs = [make_config(size) for size in (4, 8)]
    before = model.predict(configs)
    learned = model.observe(make_result(configs[0], 5.0))
    monkeypatch.setattr("autotune.cost.memory.components", None)
    again, corrected = model.predict(configs), learned.predict(configs)
    assert again.samples_per_second.tolist() == before.samples_per_second.tolist()
    assert corrected.samples_per_second.tolist() != before.samples_per_second.tolist()
    with pytest.raises(TypeError):
        replace(model, rates=make_rates(launch_s=1.0)).predict(configs)


def test_a_sharded_configuration_is_predicted_like_any_other():
    matrix = make_group(1000, 1000)
    model = make_model([make_profile(layer=(matrix,), parameters=(matrix,))])
    alone, sharded = (make_config(parallelism=p) for p in (Parallelism(), Parallelism(world_size=2, sharding="zero_3")))
    predicted = model.predict([alone, sharded])
    found = [model.estimate(config) for config in (alone, sharded)]
    assert [one.samples_per_second for one in found] == pytest.approx(predicted.samples_per_second.tolist())
    assert not np.isnan(predicted.needed_bytes).any()
    assert found[0].memory.communication_bytes == 0 < found[1].memory.communication_bytes


def test_each_device_of_a_gpu_machine_does_its_part_of_the_batch_and_holds_nccls_buffers():
    ddp_clones_outputs = [make_profile(make_family(device="cuda", clones_outputs=clones)) for clones in (False, True)]
    model = make_model(ddp_clones_outputs, hardware=make_gpu())
    configs = [make_config(2, parallelism=Parallelism(world_size=n)) for n in (1, 2, 4)]
    rates = model.predict(configs).samples_per_second
    assert rates[0] < rates[1] < rates[2] < 4 * rates[0]
    assert model.estimate(configs[2]).parts["other devices"] > 0
    assert [sum(model.estimate(config).parts.values()) for config in configs] == pytest.approx([1, 1, 1])
    alone, *spread = (model.estimate(config).memory.framework_bytes for config in configs)
    assert spread == pytest.approx([alone + NCCL_BYTES] * 2, abs=1)


def test_offloaded_states_are_said_by_host_and_device():
    model = make_model([make_profile()])
    config = make_config(parallelism=Parallelism(world_size=2, sharding="zero_2", offload="optimizer"))
    assert model.share(config).host == model.estimate(config).host_bytes > 0
    assert model.estimate(config).memory.optimizer_state_bytes == 0


def test_the_evaluation_that_is_shown_has_the_users_own_batch():
    forward = ForwardPass(storages=make_storages((0, 1, 0, 2 * MB)), outputs_bytes=line(0, 0))
    profile = make_profile(evaluation=forward)

    def shown(**arguments):
        workload = make_workload(fixed_arguments=arguments)
        phases = replace(make_model([profile]), workload=workload).estimate(make_config(4)).memory.phases
        return next(p.allocated_bytes for p in phases if p.name == "evaluation")

    assert shown(per_device_eval_batch_size=64) - shown() == (64 - 8) * 2 * MB
