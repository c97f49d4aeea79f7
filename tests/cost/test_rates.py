"""The rates of a device: by its data sheet and never above its peaks, or by that of the nearest GPU."""

import pytest
from factories import make_gpu, make_hardware

from autotune.cost.rates import cpu_rates, rates_by_table, sheet_rates
from autotune.values.catalogue import gpu_named, gpus


def test_every_gpu_attains_less_than_its_data_sheet_says():
    for gpu in gpus():
        rates = rates_by_table(gpu.hardware())
        offered = set(gpu.peak_flops) & {"fp32", "tf32", "fp16", "bf16", "fp8"}
        assert set(rates.matmul_flops) == set(rates.peak_flops) == offered, gpu.name
        for arithmetic, flops in rates.matmul_flops.items():
            assert 0 < flops < rates.peak_flops[arithmetic] == gpu.peak_flops[arithmetic], gpu.name
        assert 0 < rates.bandwidth < gpu.bandwidth, gpu.name
        assert rates.source == f"the data sheet of {gpu.name}"


@pytest.mark.parametrize(
    ("name", "arithmetic", "attained"),
    [
        ("a100-80gb", "fp32", 14.6e12),
        ("rtx-a6000", "fp32", 23.2e12),  # half of its units also do the integers
        ("rtx-a6000", "bf16", 95e12),  # measured, where the sheets have 155 and 65
        ("t4", "fp16", 24e12),
        ("h100-80gb", "fp8", 1276e12),  # where 8 of them train 1.25 times as fast as in bf16
        ("rtx-3090-ti", "bf16", 76e12),  # at half the rate of its tensor cores it reaches nearly all of it
    ],
)
def test_gpus_attain_the_rates_of_their_kind(name, arithmetic, attained):
    assert sheet_rates(gpu_named(name)).matmul_flops[arithmetic] == pytest.approx(attained, rel=0.02)


def test_a_newer_generation_has_the_faster_slot():
    slots = [sheet_rates(gpu_named(name)).host_bandwidth for name in ("t4", "rtx-3090-ti", "h100-sxm")]
    assert slots == sorted(set(slots))


@pytest.mark.parametrize("known", range(5))
def test_a_processor_has_no_peak_and_is_faster_in_bf16_only_in_hardware(known):
    features = ("avx2", "avx512f", "avx512_bf16", "amx_bf16")[:known]
    rates = cpu_rates(features, 4, 2.5e9)
    assert set(rates.matmul_flops) == {"fp32", "bf16"}
    assert min(*rates.matmul_flops.values(), rates.bandwidth, rates.launch_s, rates.host_bandwidth) > 0
    assert not rates.peak_flops
    assert (rates.matmul_flops["bf16"] > rates.matmul_flops["fp32"]) == ("avx512_bf16" in features)


def test_more_cores_compute_more_but_share_the_memory():
    one, many = cpu_rates(("avx2",), 1, 2.5e9), cpu_rates(("avx2",), 64, 2.5e9)
    assert many.matmul_flops["fp32"] == 64 * one.matmul_flops["fp32"]
    assert one.bandwidth < many.bandwidth < 64 * one.bandwidth


def test_a_processors_name_may_tell_its_frequency():
    slow, fast = (rates_by_table(make_hardware(name=f"Xeon @ {ghz}.00GHz", features=("avx2",))) for ghz in (2, 3))
    assert fast.matmul_flops["fp32"] == pytest.approx(1.5 * slow.matmul_flops["fp32"])


def test_an_instance_of_mig_has_its_share_of_its_gpu():
    whole = sheet_rates(gpu_named("a100-40gb"))
    part = rates_by_table(
        make_gpu(name="NVIDIA A100-SXM4-40GB MIG 3g.20gb", memory_bytes=gpu_named("a100-40gb").memory_bytes // 2)
    )
    assert part.bandwidth == pytest.approx(whole.bandwidth / 2, rel=0.01)
    assert part.matmul_flops["bf16"] == pytest.approx(whole.matmul_flops["bf16"] / 2, rel=0.01)
    assert "share of a100-40gb" in part.source


@pytest.mark.parametrize(
    ("device", "nearest"),
    [
        ({"name": "NVIDIA GeForce RTX 4050 Laptop GPU", "capability": (8, 9), "memory_bytes": 6 << 30}, "rtx-4060"),
        ({"name": "NVIDIA GeForce RTX 4090 Laptop GPU", "capability": (8, 9), "memory_bytes": 16 << 30},
         "rtx-4060-ti-16gb"),
        ({"name": "NVIDIA of next year", "capability": (99, 0), "memory_bytes": 16 << 30}, "rtx-5060-ti-16gb"),
    ],
)  # fmt: skip
def test_a_gpu_that_the_table_lacks_has_the_rates_of_the_nearest_and_no_peak(device, nearest):
    rates = rates_by_table(make_gpu(**device))
    assert rates.matmul_flops == sheet_rates(gpu_named(nearest)).matmul_flops
    assert rates.peak_flops == {}  # a utilisation would be another device's
    assert f"{nearest}, the nearest to {device['name']}" in rates.source
