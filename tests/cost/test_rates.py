"""The rates of a device: measured in a process of their own, or by its data sheet and never above its peaks."""

import re
import subprocess
import sys

import pytest
from factories import make_gpu, make_hardware

from autotune.cost.rates import beyond_data_sheet, calibrate, cpu_rates, rates_by_table, sheet_rates
from autotune.errors import InfrastructureError, MachineError
from autotune.storage.home import rates_of, write_rates
from autotune.values.catalogue import gpu_named, gpus, hypothetical
from autotune.values.estimate import Rates
from autotune.values.hardware import cuda_count

A100 = make_gpu(name="NVIDIA A100-SXM4-80GB")  # 312 TFLOP/s in bf16, 19.5 in fp32, 2,039 GB/s by its data sheet


def measured(**fields):
    usual = {"matmul_flops": {"fp32": 18e12, "bf16": 250e12}, "bandwidth": 1.7e12, "launch_s": 4e-6}
    return Rates(**{**usual, "host_bandwidth": 2e10, "source": "measured", **fields})


def test_every_gpu_attains_less_than_its_data_sheet_says():
    for gpu in gpus():
        rates, offered = rates_by_table(hypothetical(gpu)), set(gpu.peak_flops) & {"fp32", "tf32", "fp16", "bf16"}
        assert set(rates.matmul_flops) == set(rates.peak_flops) == offered, gpu.name
        for arithmetic, flops in rates.matmul_flops.items():
            assert 0 < flops < rates.peak_flops[arithmetic] == gpu.peak_flops[arithmetic], gpu.name
        assert 0 < rates.bandwidth < gpu.bandwidth, gpu.name
        assert rates.source == "table"


@pytest.mark.parametrize(
    ("name", "arithmetic", "attained"),
    [
        ("a100-80gb", "fp32", 14.6e12),
        ("rtx-a6000", "fp32", 23.2e12),  # half of its units also do the integers
        ("rtx-a6000", "bf16", 95e12),  # measured, where the sheets have 155 and 65
        ("t4", "fp16", 24e12),
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


@pytest.mark.slow
def test_a_cpu_is_measured_in_another_process():
    rates = calibrate(make_hardware())
    assert rates.source == "measured"
    assert set(rates.matmul_flops) == {"fp32", "bf16"}
    assert min(*rates.matmul_flops.values(), rates.bandwidth, rates.launch_s, rates.host_bandwidth) > 0


@pytest.mark.skipif(cuda_count() > 0, reason="about a machine without a GPU")
def test_a_device_that_torch_can_not_use_is_the_machines_lack():
    with pytest.raises(MachineError, match="torch can't use cuda:0"):
        calibrate(make_gpu())


@pytest.mark.parametrize("interpreter", ["/bin/false", "/no/such/python"])
def test_a_process_that_fails_is_infrastructure(monkeypatch, interpreter):
    monkeypatch.setattr(sys, "executable", interpreter)
    with pytest.raises(InfrastructureError, match="measuring cpu"):
        calibrate(make_hardware())


def test_an_unknown_gpu_has_none_until_it_is_measured():
    with pytest.raises(MachineError, match=r"next year.*autotune doctor --calibrate"):
        rates_by_table(make_gpu(name="NVIDIA of next year"))


def test_a_device_may_run_a_little_faster_than_its_data_sheet_says():
    assert beyond_data_sheet(measured(), A100) is None
    assert beyond_data_sheet(measured(matmul_flops={"bf16": 1.1 * 312e12}), A100) is None
    for without_sheet in (make_gpu(name="next year's"), make_hardware()):
        assert beyond_data_sheet(measured(bandwidth=1e15), without_sheet) is None


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"matmul_flops": {"fp32": 18e12, "bf16": 100_684e12}}, "100,684 TFLOP/s in bf16, where {} has 312"),
        ({"bandwidth": 9e12}, "9,000 GB/s of bandwidth, where {} has 2,039"),
    ],
    ids=["products", "bandwidth"],
)
def test_rates_beyond_the_data_sheet_are_refused_with_the_reason(monkeypatch, fields, told):
    done = subprocess.CompletedProcess([], 0, stdout=measured(**fields).model_dump_json(), stderr="")
    monkeypatch.setattr(subprocess, "run", lambda *arguments, **named: done)
    told = re.escape(told.format("the data sheet of a100-80gb"))
    with pytest.raises(InfrastructureError, match=f"measuring cuda:0 gave {told}: not stored"):
        calibrate(A100)


def test_stored_rates_beyond_the_data_sheet_are_ignored(monkeypatch, tmp_path, caplog):
    monkeypatch.setenv("AUTOTUNE_HOME", str(tmp_path))
    write_rates(measured(bandwidth=9e12), A100)
    assert rates_of(A100).source == "table"
    assert "is ignored" in caplog.text
