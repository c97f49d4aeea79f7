"""Rates by the data sheets: never above the peaks, and what a device is known to be bad at."""

import pytest

from autotune.cost.attainable import cpu_rates, table_rates
from autotune.values.catalogue.gpus import gpu_named, gpus

PEAKS = {"fp32": 20e12, "tf32": 150e12, "bf16": 300e12, "fp8": 600e12}


def rates_of_gpu(gpu):
    return table_rates(gpu.peak_flops, gpu.bandwidth, gpu.capability, name=gpu.name)


@pytest.mark.parametrize("gpu", gpus(), ids=lambda gpu: gpu.name)
def test_a_gpu_attains_less_than_its_data_sheet_says(gpu):
    rates = rates_of_gpu(gpu)
    assert set(rates.matmul_flops) == set(rates.peak_flops) == set(gpu.peak_flops) & {"fp32", "tf32", "fp16", "bf16"}
    for arithmetic, flops in rates.matmul_flops.items():
        assert 0 < flops < rates.peak_flops[arithmetic] == gpu.peak_flops[arithmetic]
    assert 0 < rates.bandwidth < gpu.bandwidth
    assert rates.source == "table"


def test_arithmetics_that_no_training_uses_are_left_out():
    assert list(table_rates(PEAKS, 1e12, (8, 0)).matmul_flops) == ["fp32", "tf32", "bf16"]


def test_units_shared_with_integers_attain_less_of_their_fp32_peak():
    whole, shared = table_rates(PEAKS, 1e12, (8, 0)), table_rates(PEAKS, 1e12, (8, 6))
    assert shared.matmul_flops["fp32"] < whole.matmul_flops["fp32"]
    assert shared.matmul_flops["bf16"] < whole.matmul_flops["bf16"]


def test_tensor_cores_at_half_their_rate_reach_most_of_it():
    card, workstation = (rates_of_gpu(gpu_named(name)) for name in ("rtx-3090-ti", "rtx-a6000"))
    assert card.matmul_flops["bf16"] > 0.9 * card.peak_flops["bf16"]
    assert workstation.matmul_flops["bf16"] == pytest.approx(95e12, rel=0.01)  # measured, where the sheet has 155


def test_a_newer_generation_has_the_faster_slot():
    slots = [table_rates(PEAKS, 1e12, c).host_bandwidth for c in ((7, 5), (8, 6), (9, 0))]
    assert slots == sorted(set(slots))


def test_a_t4_is_held_back_by_its_power():
    rates = rates_of_gpu(gpu_named("t4"))
    assert rates.matmul_flops["fp16"] == pytest.approx(24e12, rel=0.02)


CPUS = {
    "nothing known": (),
    "avx2": ("avx2",),
    "avx512": ("avx2", "avx512f"),
    "avx512-bf16": ("avx2", "avx512f", "avx512_bf16"),
    "amx": ("avx2", "avx512f", "avx512_bf16", "amx_bf16"),
}


@pytest.mark.parametrize("features", CPUS.values(), ids=CPUS)
def test_a_processor_has_rates_of_fp32_and_bf16_and_no_peak(features):
    rates = cpu_rates(features, 4, 2.5e9)
    assert set(rates.matmul_flops) == {"fp32", "bf16"}
    assert min(*rates.matmul_flops.values(), rates.bandwidth, rates.launch_s, rates.host_bandwidth) > 0
    assert not rates.peak_flops


@pytest.mark.parametrize("features", CPUS.values(), ids=CPUS)
def test_bf16_is_the_faster_one_only_in_hardware(features):
    flops = cpu_rates(features, 4, 2.5e9).matmul_flops
    assert (flops["bf16"] > flops["fp32"]) == bool({"avx512_bf16", "amx_bf16"} & set(features))


def test_more_cores_compute_more_but_share_the_memory():
    one, many = cpu_rates(("avx2",), 1, 2.5e9), cpu_rates(("avx2",), 64, 2.5e9)
    assert many.matmul_flops["fp32"] == 64 * one.matmul_flops["fp32"]
    assert one.bandwidth < many.bandwidth < 64 * one.bandwidth
