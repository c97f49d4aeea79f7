"""Whether torch can compute on a device is tried, not asked."""

from __future__ import annotations

import pytest
from factories import make_gpu

from autotune import doctor
from autotune.doctor import why_unusable

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
OLD_DRIVER = "raise RuntimeError('The NVIDIA driver on your system is too old (found version 11040).')"
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


def test_a_device_that_computes_is_usable(torch_that):
    torch_that()
    assert why_unusable("cuda:0") is None


def test_a_driver_that_is_too_old_is_told_in_a_line(torch_that):
    torch_that(init=OLD_DRIVER)
    assert why_unusable("cuda:0") == (
        "RuntimeError: The NVIDIA driver on your system is too old (found version 11040)."
    )


def test_an_architecture_without_kernels_is_told_in_a_line(torch_that):
    torch_that(randn=NO_KERNEL)
    told = why_unusable("cuda:0")
    assert told.endswith("CUDA error: no kernel image is available for execution on the device")


def test_a_probe_that_dies_is_told(torch_that):
    torch_that(randn="os._exit(7)")
    assert why_unusable("cuda:0") == "a product on it ended with exit code 7"


def test_the_doctor_finds_a_device_that_the_driver_shows_and_torch_can_not_use(torch_that, monkeypatch):
    """The launcher's way to ask, of NVML alone, would find it."""
    torch_that(init=OLD_DRIVER)
    monkeypatch.setattr(doctor, "cuda_count", lambda: 1)
    (finding,) = doctor._device(make_gpu(driver="470.1"), doctor._libraries())
    assert not finding.available
    assert finding.detail == (
        "torch (CUDA 13.0) can't compute on it with driver 470.1: "
        "RuntimeError: The NVIDIA driver on your system is too old (found version 11040)."
    )


@pytest.mark.cuda
def test_a_real_device_computes():
    assert why_unusable("cuda:0") is None
    assert why_unusable("cuda:7") is not None
