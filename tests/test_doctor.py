"""The doctor: findings about the machine, and whether torch can compute on a device."""

from __future__ import annotations

import json

import pytest
from factories import make_gpu, make_hardware

from autotune import doctor
from autotune.doctor import why_unusable
from autotune.storage.home import add_timings
from autotune.values.estimate import Timings
from autotune.values.hardware import detect

LIBRARIES = dict.fromkeys(("bitsandbytes", "peft", "datasets", "flash_attn", "liger_kernel", "triton"), "")


@pytest.fixture
def quick_home(monkeypatch, own_home):
    """A home of the test's own, and a machine that is examined in no time."""
    monkeypatch.setattr(doctor, "_libraries", lambda: {**LIBRARIES, "cuda_build": None})
    return own_home


@pytest.fixture
def examine(command, quick_home):
    return lambda *arguments: command("doctor", "--device", "cpu", *arguments)


def found_in(report: dict, name: str) -> tuple[bool, str]:
    return next((f["available"], f["detail"]) for f in report["findings"] if f["name"] == name)


def test_it_tells_whether_operators_were_measured_on_the_device(examine, quick_home):
    report = json.loads(examine("--json").stdout)
    none = f"none yet, a search measures them; until then {report['rates']['source']}"
    assert found_in(report, "measured operators") == (False, none)
    assert not quick_home.exists()
    add_timings(detect("cpu"), Timings(operator_s=1e-6, micro_step_s=1e-3))
    assert found_in(json.loads(examine("--json").stdout), "measured operators")[0]
    (file,) = quick_home.rglob("*.json")
    file.write_text("{")  # a broken file does not stop the doctor
    assert not found_in(json.loads(examine("--json").stdout), "measured operators")[0]


@pytest.mark.parametrize("has_cc", [True, False])
def test_triton_without_a_c_compiler_is_told_of_all_that_needs_it(monkeypatch, quick_home, has_cc):
    monkeypatch.setattr(doctor, "detect", lambda device: make_gpu(has_cc=has_cc))
    found = {f.name: f for f in doctor.examine("cuda:0").findings}
    for name in ("torch.compile", "Liger kernels"):
        assert found[name].available is has_cc
        assert ("C compiler" in found[name].detail) is not has_cc


@pytest.mark.parametrize(
    ("machine", "name", "told"),
    [
        (make_gpu(capability=(7, 5)), "flash attention", "needs compute capability 8.0 or newer"),
        (make_gpu(capability=(6, 0)), "torch.compile", "needs compute capability 7.0 or newer"),
        (make_hardware(), "Liger kernels", "needs CUDA; the model's own"),
        (make_gpu(capability=(8, 6)), "fp8", "needs compute capability 8.9 or newer"),
    ],
)
def test_what_the_rules_refuse_is_not_available(monkeypatch, quick_home, machine, name, told):
    monkeypatch.setattr(doctor, "detect", lambda device: machine)
    found = {f.name: f for f in doctor.examine(machine.device).findings}
    assert (found[name].available, found[name].detail) == (False, told)


# A torch whose driver shows a device, as NVML tells, and which fails when something is computed there.
TORCH = """
import os
class cuda:
    @staticmethod
    def init():
        {init}
    @staticmethod
    def is_available():
        return os.environ.get("PYTORCH_NVML_BASED_CUDA_CHECK") == "1"
    @staticmethod
    def synchronize(device): pass
class version:
    cuda = "13.0"
def randn(*shape, device):
    {randn}
"""
TOO_OLD = "RuntimeError: The NVIDIA driver on your system is too old (found version 11040)."
OLD_DRIVER = f"raise RuntimeError({TOO_OLD.removeprefix('RuntimeError: ')!r})"
NO_KERNEL = (
    "raise RuntimeError('CUDA error: no kernel image is available for execution on the device\\n"
    "For debugging consider passing CUDA_LAUNCH_BLOCKING=1\\nCompile with `TORCH_USE_CUDA_DSA` ...')"
)


@pytest.fixture
def torch_that(monkeypatch, tmp_path):
    def make(*, init="pass", randn="raise SystemExit(0)"):
        (tmp_path / "torch.py").write_text(TORCH.format(init=init, randn=randn))
        monkeypatch.setenv("PYTHONPATH", str(tmp_path))
        monkeypatch.setenv("PYTORCH_NVML_BASED_CUDA_CHECK", "1")

    return make


@pytest.mark.parametrize(
    ("fails", "told"),
    [
        ({}, None),
        ({"init": OLD_DRIVER}, TOO_OLD),
        ({"randn": NO_KERNEL}, "RuntimeError: CUDA error: no kernel image is available for execution on the device"),
        ({"randn": "os._exit(7)"}, "a product on it ended with exit code 7"),
    ],
    ids=["computes", "old driver", "no kernels", "dies"],
)
def test_why_a_device_is_of_no_use_is_told_in_a_line(torch_that, fails, told):
    torch_that(**fails)
    assert why_unusable("cuda:0") == told


def test_the_doctor_finds_a_device_that_the_driver_shows_and_torch_can_not_use(torch_that, monkeypatch):
    """The launcher's way to ask, of NVML alone, would find it."""
    torch_that(init=OLD_DRIVER)
    monkeypatch.setattr(doctor, "cuda_count", lambda: 1)
    name, available, detail = doctor._device(make_gpu(driver="470.1"), doctor._libraries())
    assert (name, available) == ("CUDA device", False)
    assert detail == f"torch (CUDA 13.0) can't compute on it with driver 470.1: {TOO_OLD}"


@pytest.mark.cuda
def test_a_real_device_computes():
    assert why_unusable("cuda:0") is None
    assert why_unusable("cuda:7") is not None


def test_a_torch_for_amd_gpus_is_said_to_be_of_no_use(examine, monkeypatch):
    monkeypatch.setattr(doctor, "cuda_count", lambda: 0)
    monkeypatch.setattr("autotune.values.hardware.installed_versions", lambda: {"torch": "2.13.0+rocm7.0"})
    assert "AMD GPUs" in found_in(json.loads(examine("--json").stdout), "CUDA device")[1]
