"""The rates of a device: measured in a process of their own, or by its data sheet."""

import re
import subprocess
import sys

import pytest
from factories import make_gpu, make_hardware

from autotune.cost.calibrate import TINY_SIZES, beyond_data_sheet, calibrate, rates_by_table
from autotune.errors import InfrastructureError, MachineError
from autotune.storage.home import rates_of, read_rates, write_rates
from autotune.values.catalogue.gpus import gpu_named, hypothetical
from autotune.values.estimate import Rates
from autotune.values.hardware import cuda_count

MEASURED = Rates(
    matmul_flops={"fp32": 1.5e11, "bf16": 4e11}, bandwidth=3e10, launch_s=4e-6, host_bandwidth=1e10, source="measured"
)


@pytest.fixture(autouse=True)
def own_home(monkeypatch, tmp_path):
    monkeypatch.setenv("AUTOTUNE_HOME", str(tmp_path))
    return tmp_path


@pytest.mark.slow
def test_a_cpu_is_measured_in_another_process():
    rates = calibrate(make_hardware(), TINY_SIZES)
    assert rates.source == "measured"
    assert set(rates.matmul_flops) == {"fp32", "bf16"}
    assert min(*rates.matmul_flops.values(), rates.bandwidth, rates.launch_s, rates.host_bandwidth) > 0


@pytest.mark.skipif(cuda_count() > 0, reason="about a machine without a GPU")
def test_a_device_that_torch_can_not_use_is_the_machines_lack():
    with pytest.raises(MachineError, match="torch can't use cuda:0"):
        calibrate(make_gpu(), TINY_SIZES)


@pytest.mark.parametrize("interpreter", ["/bin/false", "/no/such/python"])
def test_a_process_that_fails_is_infrastructure(monkeypatch, interpreter):
    monkeypatch.setattr(sys, "executable", interpreter)
    with pytest.raises(InfrastructureError, match="measuring cpu"):
        calibrate(make_hardware(), TINY_SIZES)


def test_a_processors_name_may_tell_its_frequency():
    slow = rates_by_table(make_hardware(name="Xeon @ 2.00GHz", features=("avx2",)))
    fast = rates_by_table(make_hardware(name="Xeon @ 3.00GHz", features=("avx2",)))
    assert fast.matmul_flops["fp32"] == pytest.approx(1.5 * slow.matmul_flops["fp32"])


def test_a_known_gpu_has_the_rates_of_its_data_sheet():
    gpu = gpu_named("a100-80gb")
    rates = rates_of(hypothetical(gpu))
    assert rates.source == "table"
    assert rates.peak_flops["bf16"] == gpu.peak_flops["bf16"]


def test_an_unknown_gpu_has_none_until_it_is_measured():
    hardware = make_gpu(name="NVIDIA of next year")
    with pytest.raises(MachineError, match=r"next year.*autotune doctor --calibrate"):
        rates_of(hardware)
    write_rates(MEASURED, hardware)
    assert rates_of(hardware) == MEASURED


A100 = make_gpu(name="NVIDIA A100-SXM4-80GB")  # 312 TFLOP/s in bf16, 19.5 in fp32, 2,039 GB/s by its data sheet


def measured(**fields):
    usual = {"matmul_flops": {"fp32": 18e12, "bf16": 250e12}, "bandwidth": 1.7e12, "launch_s": 4e-6}
    return Rates(**{**usual, "host_bandwidth": 2e10, "source": "measured", **fields})


def test_what_a_device_can_attain_is_kept_be_its_clock_a_little_faster():
    assert beyond_data_sheet(measured(), A100) is None
    assert beyond_data_sheet(measured(matmul_flops={"bf16": 1.1 * 312e12}), A100) is None


TOO_MUCH = [
    (
        {"matmul_flops": {"fp32": 18e12, "bf16": 100_684e12}},
        "100,684 TFLOP/s in bf16, where the data sheet of a100-80gb has 312",
    ),
    ({"bandwidth": 9e12}, "9,000 GB/s of bandwidth, where the data sheet of a100-80gb has 2,039"),
]


@pytest.mark.parametrize(("fields", "told"), TOO_MUCH, ids=["products", "bandwidth"])
def test_what_no_such_device_can_do_is_refused_with_the_reason(monkeypatch, fields, told):
    done = subprocess.CompletedProcess([], 0, stdout=measured(**fields).model_dump_json(), stderr="")
    monkeypatch.setattr(subprocess, "run", lambda *arguments, **named: done)
    with pytest.raises(InfrastructureError, match=re.escape(f"measuring cuda:0 gave {told}: not stored")):
        calibrate(A100, TINY_SIZES)


def test_without_a_data_sheet_nothing_is_refused():
    for hardware in (make_gpu(name="next year's"), make_hardware()):
        assert beyond_data_sheet(measured(bandwidth=1e15), hardware) is None


def test_what_was_kept_without_a_doubt_is_ignored(caplog):
    write_rates(measured(bandwidth=9e12), A100)
    assert read_rates(A100) is None
    assert "is ignored" in caplog.text
    assert rates_of(A100).source == "table"
