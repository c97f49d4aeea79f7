"""Seconds of a step, on one device and on several, from profiles and rates by hand."""

from dataclasses import replace

import numpy as np
import pytest
from factories import make_config, make_gpu, make_hardware, make_workload
from profiles import MB, ONE_DEVICE, make_family, make_group, make_model, make_profile, make_rates, make_work

from autotune.cost.family import Shape
from autotune.cost.profile import ELEMENTWISE
from autotune.cost.profiler import profile
from autotune.cost.sharding import Network, Spread
from autotune.cost.time import (
    ADDING,
    CLIPPING,
    TRAINER_S,
    StepCost,
    along,
    as_line,
    at,
    dense_peak,
    filled,
    measured_step,
    micro_step_parts,
    optimizer_seconds,
    parameter_key,
    worth_measuring,
)
from autotune.values.config import Parallelism, Precision
from autotune.values.estimate import Timings
from autotune.values.model import Task
from autotune.values.workload import LengthProfile

GPU = make_family(device="cuda")
MIXED = make_family(device="cuda", autocast="bfloat16")


def micro_step_seconds(profile, rates, sizes, *, tf32=False, compiled=False) -> np.ndarray:
    return sum(micro_step_parts(profile, rates, sizes, tf32=tf32, compiled=compiled).values())


def micro(profile, rates=None, *, size=8.0, tf32=False, compiled=False) -> float:
    found = micro_step_seconds(profile, rates or make_rates(), np.array([size]), tf32=tf32, compiled=compiled)
    return float(found[0]) - TRAINER_S


def step(profile, *, size: float, accumulation: float, rates=None, optim="sgd") -> float:
    cost = StepCost(profile, rates or make_rates(), optim, ONE_DEVICE, FAST)
    return float(cost.seconds(np.array([size]), np.array([accumulation]))[0])


def test_moving_bytes_takes_time_where_it_is_longer():
    moving = make_profile(work=(make_work(10 * MB, moved=100 * MB),))
    assert micro(moving, make_rates(bandwidth=1e8), size=8) == pytest.approx(8 * 100 * MB / 1e8)
    assert micro(moving, make_rates(bandwidth=1e10), size=8) == pytest.approx(8 * 10 * MB / 1e8)


def test_16_bits_are_faster_where_their_rate_is_higher_and_tf32_speeds_up_fp32_alone():
    half = make_profile(MIXED, work=(make_work(width=2),))
    assert micro(half) == pytest.approx(micro(make_profile(GPU)) / 4)
    slow = make_rates(matmul_flops={"fp32": 1e8, "bf16": 1e7})
    assert micro(half, slow) == pytest.approx(10 * micro(make_profile(GPU), slow))
    assert micro(half, make_rates(matmul_flops={"fp32": 1e8})) == micro(make_profile(GPU))  # no rate: as in fp32
    tensor_cores = make_rates(matmul_flops={"fp32": 1e8, "tf32": 3e8, "bf16": 4e8})
    assert micro(make_profile(GPU), tensor_cores, tf32=True) == pytest.approx(micro(make_profile(GPU)) / 3)
    assert micro(half, tensor_cores, tf32=True) == micro(half, tensor_cores)
    eighth = make_profile(MIXED, work=(make_work(width=1),))
    assert micro(eighth) == micro(half)  # no rate: as in 16 bits
    assert micro(eighth, make_rates(matmul_flops={"fp32": 1e8, "fp8": 8e8})) == pytest.approx(micro(half) / 2)


def test_launches_hide_behind_large_operators_on_a_gpu_and_add_up_on_a_cpu():
    rates = make_rates(launch_s=1e-3)
    tiny, large = make_profile(GPU, work=(make_work(1.0, count=500),)), (make_work(10 * MB, count=100),)
    assert [micro(tiny, rates, size=size) for size in (1, 2)] == pytest.approx([0.5, 0.5])
    assert micro(make_profile(GPU, work=large), rates) == pytest.approx(80.0)
    assert micro(make_profile(work=large), rates) == pytest.approx(80.0 + 0.1)


def test_compiling_leaves_less_to_move_and_to_launch():
    rates = make_rates(bandwidth=1e8, launch_s=1e-3)
    chain = make_profile(GPU, work=(make_work(0.0, 10 * MB, kind=ELEMENTWISE, count=10),))
    assert micro(chain, rates, compiled=True) < micro(chain, rates)
    products = make_profile(GPU)
    assert micro(products, rates, compiled=True) == micro(products, rates)


def test_adding_gradients_takes_time():
    slow = make_rates(bandwidth=1e6)
    one, two = (step(make_profile(), size=8, accumulation=n, rates=slow) for n in (1, 2))
    assert two - one == pytest.approx(micro(make_profile(), slow) + TRAINER_S + 3 * 4 * MB / 1e6)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_fused_optimizer_is_faster_than_one_of_many_passes(device):
    profile, rates = make_profile(make_family(device=device)), make_rates(bandwidth=1e9)
    assert optimizer_seconds(profile, rates, "adamw_torch_fused") < optimizer_seconds(profile, rates, "adamw_torch")


def test_utilisation_is_a_share_of_the_precisions_peak():
    rates = make_rates(peak_flops={"fp32": 1.0, "tf32": 2.0, "fp16": 3.0, "bf16": 4.0})
    asked = [(p, tf32) for p in ("fp32", "fp16", "bf16", "pure_bf16") for tf32 in (False, True)]
    peaks = [dense_peak(rates, Precision(p), tf32=tf32) for p, tf32 in asked]
    assert peaks == [1.0, 2.0, 3.0, 3.0, 4.0, 4.0, 4.0, 4.0]
    assert dense_peak(make_rates(), Precision.FP32, tf32=False) is None


FAST = Network(devices_per_node=8, link=1e30, node=1e30)
SLOW = Network(devices_per_node=8, link=1e6, node=1e6)
CPU = Network(devices_per_node=8, link=1e30, node=1e30, on_cpu=True)
FOUR, TWO = np.array([4.0]), np.array([2.0])


def cost(network: Network = FAST, *, mixed: bool = False, **fields) -> StepCost:
    profile = make_profile(make_family(device="cuda"), layer=(make_group(1000, 1000),))
    spread = Spread(Parallelism(**fields), mixed)
    return StepCost(profile, make_rates(bandwidth=1e7), "adamw_torch_fused", spread, network)


def seconds(step: StepCost) -> float:
    return float(step.seconds(FOUR, TWO)[0])


def test_one_device_computes_adds_and_steps_without_waiting():
    step = cost(SLOW)
    adding = 3 * step.profile.gradients_bytes / step.rates.bandwidth
    micro = micro_step_seconds(step.profile, step.rates, FOUR)
    assert step.seconds(FOUR, TWO) == 2 * micro + adding + optimizer_seconds(step.profile, step.rates, step.optim)
    assert step.parts(FOUR, TWO)["other devices"] == 0


def test_zero_adds_up_shards_and_what_a_compiler_does_not_keep_is_computed_again():
    def element_wise(sharding):
        return float(cost(world_size=4, sharding=sharding).parts(FOUR, TWO)["element-wise"][0])

    adding = 3 * cost().profile.gradients_bytes / cost().rates.bandwidth
    assert element_wise("zero_1") - element_wise("zero_2") == pytest.approx(adding * 3 / 4)
    kept, half, none = (replace(cost(), kept=share).parts(FOUR, TWO) for share in (1.0, 0.5, 0.0))
    assert none["matrix products"] == pytest.approx(kept["matrix products"] * 4 / 3)
    assert kept["matrix products"] < half["matrix products"] < none["matrix products"]


def test_a_slow_link_is_waited_for():
    assert seconds(cost(SLOW, world_size=4)) > seconds(cost(FAST, world_size=4))
    assert float(cost(SLOW, world_size=4).parts(FOUR, TWO)["other devices"][0]) > 0


def test_of_16_bit_weights_the_fp32_shards_are_updated():
    half, wide = (cost(world_size=4, sharding="fsdp_full", mixed=mixed) for mixed in (False, True))
    assert seconds(half) == seconds(wide)  # the hand-made model is in fp32 already
    narrow = make_profile(MIXED, parameters=(make_group(1000, 1000, element_bytes=2),))
    assert replace(wide, profile=narrow)._stepping() == half._stepping()


def test_processes_of_a_cpu_share_its_cores():
    alone, two = (cost(CPU, world_size=n) for n in (1, 2))
    micro = [micro_step_seconds(c.profile, c._rates, FOUR)[0] for c in (alone, two)]
    assert micro[1] == pytest.approx(2 * micro[0], rel=0.01)
    nodes = cost(replace(CPU, devices_per_node=1), world_size=2)  # each has cores of its own
    assert micro_step_seconds(nodes.profile, nodes._rates, FOUR)[0] == micro[0]


@pytest.mark.parametrize("kind", ["sdpa", "eager"])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_short_samples_among_long_ones_take_the_time_of_a_trace_of_their_own_length(spec_of, kind, device):
    family = make_family(device=device, attn_implementation=kind)
    short, long = (
        profile(spec_of("llama"), family, Shape(task=Task.CAUSAL_LM, length=length)) for length in (256, 2048)
    )
    lengths = LengthProfile(samples=10**6, mean=256.0, minimum=256, median=256, p95=256, maximum=2048)
    hardware = make_hardware() if device == "cpu" else make_gpu()
    exact, mixed = (
        make_model(
            [traced], workload=make_workload(lengths=given), hardware=hardware, rates=make_rates(bandwidth=1e8)
        ).estimate(make_config(4, attn_implementation=kind))
        for traced, given in ((short, None), (long, lengths))
    )
    assert mixed.step_time_s == pytest.approx(exact.step_time_s, rel=0.1)
    assert mixed.flops_per_step == pytest.approx(exact.flops_per_step, rel=0.05)


def timings(**fields):
    return Timings(**{"operator_s": 0.0, "micro_step_s": 0.0, **fields})


def test_sizes_of_a_call_are_lines_in_the_micro_batch():
    call = as_line("mm [64, 32] 0.5", "mm [128, 32] 0.5", (2, 4))
    assert [at(call, samples) for samples in (1, 2, 16)] == ["mm [32, 32] 0.5", "mm [64, 32] 0.5", "mm [512, 32] 0.5"]


@pytest.mark.parametrize("other", ["mm [65, 32]", "mm [64, 32, 1]", "bmm [64, 32]"])
def test_a_call_whose_sizes_are_no_lines_is_not_known(other):
    assert as_line("mm [64, 32]", other, (2, 4)) == ""


def test_unmeasured_operators_have_the_rate_of_the_nearest_of_their_kind():
    expected = np.array([[1.0], [10.0], [12.0], [12.0]])
    seconds = np.array([[3.0], [20.0], [np.nan], [np.nan]])
    assert filled(seconds, expected, np.array([1, 1, 1, 2]))[:, 0].tolist() == [3.0, 20.0, 24.0, 12.0]


def test_a_launch_says_nothing_of_the_rate_of_a_large_operator():
    seconds, expected = np.array([[5e-6], [6e-6], [np.nan], [np.nan]]), np.array([[1e-9], [1e-6], [1e-3], [2e-9]])
    found = filled(seconds, expected, np.full(4, 1))[:, 0]
    assert found.tolist() == pytest.approx([5e-6, 6e-6, 1e-3 + 5e-6, 5e-6], rel=1e-3)


@pytest.mark.parametrize(("last", "of_a_quarter"), [(4.0, 0.25), (2.5, 0.625), (7.0, 0.25)])
def test_time_is_a_line_between_sizes_and_beyond_them_and_a_part_of_a_sample_takes_a_part_of_it(last, of_a_quarter):
    slope = (last - 1) / 3
    found = along(np.array([0.25, 1.0, 2.5, 4.0, 8.0]), (1, 4), np.array([1.0, last]))
    assert found.tolist() == [of_a_quarter, 1.0, 1 + 1.5 * slope, last, 1 + 7 * slope]


def test_a_measured_operator_takes_its_measured_time():
    profile = make_profile(work=(make_work(count=3, call="mm [<0:1>]"),))
    taken = {f"mm [{size}]": size * 1e-3 for size in (1, 4, 16, 64, 256)}
    rates = make_rates(timings=timings(operators=taken, operator_s=1e-4, micro_step_s=0.5))
    seconds = micro_step_seconds(profile, rates, np.array([1.0, 10.0]))
    assert seconds.tolist() == pytest.approx([0.5 + 3 * 1.1e-3, 0.5 + 3 * 10.1e-3])


def test_a_measured_optimizer_takes_its_measured_time_and_larger_parameters_more():
    small, large = make_group(10, 10, count=2), make_group(100, 100)
    known = {parameter_key(what, small): 1e-3 for what in ("sgd", CLIPPING, ADDING)}
    profile = make_profile(parameters=(small, large))
    rates = make_rates(timings=timings(optimizers=known))
    assert optimizer_seconds(profile, rates, "sgd") == pytest.approx(2 * (2e-3 + 100e-3))
    assert measured_step(profile.parameters, "adafactor", rates) is None


def test_a_small_parameters_step_is_a_launch_and_no_measure_of_a_large_one():
    small, large = make_group(1024), make_group(150_000, 1024)
    profile = make_profile(parameters=(small, large))
    known = {parameter_key(what, small): 5e-6 for what in ("sgd", CLIPPING)}
    rates = make_rates(bandwidth=4e12, launch_s=5e-6, timings=timings(optimizers=known))
    bytes_s = 3 * 4 * large.elements / rates.bandwidth
    assert optimizer_seconds(profile, rates, "sgd") == pytest.approx(2 * bytes_s, rel=0.1)


def test_the_costliest_calls_are_measured_first_and_none_again():
    cheap, dear = make_work(call="cheap", flops=1), make_work(call="dear [<0:1>]", flops=1e12)
    profile = make_profile(work=(cheap, dear))
    assert worth_measuring([profile], make_rates(), 4) == ["dear [1]", "dear [4]", "cheap"]
    known = make_rates(timings=timings(operators={"dear [4]": 1.0, "cheap": 1.0}))
    assert worth_measuring([profile], known, 4) == ["dear [1]"]
