"""Devices as CUDA counts them, and drivers that tell less than most: in a value or in one clear line."""

from __future__ import annotations

import psutil
import pynvml
import pytest
from typer.testing import CliRunner

from autotune.cli.main import app
from autotune.errors import MachineError
from autotune.execution.noise import HostWatch, watch
from autotune.values.conditions import other_processes
from autotune.values.hardware import cuda_count, cuda_used_bytes, detect, like_devices, used_bytes

UUIDS = ["GPU-11aa-0", "GPU-11ab-1", "GPU-22cc-2"]
INSTANCES = {"gpu 2": ["MIG-77-0", "MIG-78-1"]}  # of a device in MIG mode


@pytest.fixture
def driver(monkeypatch):
    """NVML with three devices, the last in MIG mode; what a test sets in the returned dictionary it answers instead."""
    memory = type("Memory", (), {"total": 40 << 30, "free": 39 << 30, "used": 1 << 30})()
    part = type("Memory", (), {"total": 10 << 30, "free": 9 << 30, "used": 0})()

    def fail(code):
        raise pynvml.NVMLError(code)

    def by_uuid(uuid):
        if uuid in UUIDS:
            return f"gpu {UUIDS.index(uuid)}"
        if any(uuid in own for own in INSTANCES.values()):
            return uuid
        return fail(pynvml.NVML_ERROR_NOT_FOUND)

    def no_instance(handle):
        return fail(pynvml.NVML_ERROR_INVALID_ARGUMENT) if handle.startswith("MIG") else (8, 0)

    answers = {
        "nvmlInit": lambda: None,
        "nvmlDeviceGetCount": lambda: 3,
        "nvmlDeviceGetHandleByIndex": lambda i: f"gpu {i}" if i < 3 else fail(pynvml.NVML_ERROR_INVALID_ARGUMENT),
        "nvmlDeviceGetHandleByUUID": by_uuid,
        "nvmlDeviceGetUUID": lambda handle: handle if handle.startswith("MIG") else UUIDS[int(handle[-1])],
        "nvmlDeviceGetMigMode": lambda handle: [int(handle in INSTANCES), 0],
        "nvmlDeviceGetMaxMigDeviceCount": lambda handle: 7,
        "nvmlDeviceGetMigDeviceHandleByIndex": lambda handle, i: (
            INSTANCES[handle][i] if i < len(INSTANCES[handle]) else fail(pynvml.NVML_ERROR_NOT_FOUND)
        ),
        "nvmlDeviceGetDeviceHandleFromMigDeviceHandle": lambda handle: "gpu 2",
        "nvmlDeviceGetMemoryInfo": lambda handle: part if handle.startswith("MIG") else memory,
        "nvmlDeviceGetName": lambda handle: f"name of {handle}",
        "nvmlDeviceGetCudaComputeCapability": no_instance,
        "nvmlSystemGetDriverVersion": lambda: "580.1",
    }
    for name, answer in answers.items():
        monkeypatch.setattr(pynvml, name, answer)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return lambda name, code: monkeypatch.setattr(pynvml, name, lambda *arguments: fail(code))


@pytest.mark.usefixtures("driver")
@pytest.mark.parametrize(
    ("visible", "names"),
    [
        ("0,7,1", ["gpu 0"]),  # stale: CUDA sees what stands before it
        ("7", []),
        ("GPU-11ab-1", ["gpu 1"]),
        ("GPU-11ab,GPU-11aa-0", ["gpu 1", "gpu 0"]),
        ("GPU-11", []),  # fits two
        ("GPU-99", []),
        ("NoDevFiles", []),
        ("MIG-78-1", ["MIG-78-1"]),
        ("MIG-77", ["MIG-77-0"]),
        ("2", ["MIG-77-0"]),  # a device in MIG mode is its first instance
    ],
)
def test_entries_that_are_short_or_stale_are_read_as_cuda_reads_them(monkeypatch, visible, names):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert [detect(f"cuda:{i}").name for i in range(cuda_count())] == [f"name of {n}" for n in names]


@pytest.mark.usefixtures("driver")
def test_an_instance_has_its_own_memory_and_the_capability_of_its_device(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-77-0")
    found = detect("cuda")
    assert (found.memory_bytes, found.free_bytes, found.capability) == (10 << 30, 9 << 30, (8, 0))


def test_a_device_that_shares_the_hosts_memory_has_the_hosts(driver):
    driver("nvmlDeviceGetMemoryInfo", pynvml.NVML_ERROR_NOT_SUPPORTED)
    found = detect("cuda:0")
    assert found.memory_bytes == psutil.virtual_memory().total
    assert 0 < found.free_bytes <= found.memory_bytes
    assert cuda_used_bytes("cuda:0") is None
    assert 0 < used_bytes(found) < found.memory_bytes
    assert like_devices("cuda:0")[0] == "cuda:0"


@pytest.mark.parametrize("name", ["nvmlDeviceGetMemoryInfo", "nvmlDeviceGetName", "nvmlSystemGetDriverVersion"])
def test_a_driver_that_does_not_answer_is_one_line(driver, name):
    driver(name, pynvml.NVML_ERROR_NO_PERMISSION)
    with pytest.raises(MachineError, match="cuda:0: the NVIDIA driver doesn't report it: Insufficient Permissions; "):
        detect("cuda:0")
    done = CliRunner().invoke(app, ["doctor", "--device", "cuda:0"])
    assert done.exit_code == MachineError.exit_code
    assert "Traceback" not in done.output


def test_a_gpu_that_was_lost_is_one_line(driver):
    found = detect("cuda:0")
    driver("nvmlDeviceGetHandleByIndex", pynvml.NVML_ERROR_GPU_IS_LOST)
    with pytest.raises(MachineError, match="GPU is lost"):
        cuda_used_bytes("cuda:0")
    assert other_processes(found) == []
    assert isinstance(watch("cuda:0"), HostWatch)


@pytest.mark.usefixtures("driver")
def test_a_device_that_is_no_longer_visible_is_one_line(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "-1")
    with pytest.raises(MachineError, match=r"cuda:0: no such device is visible \(CUDA_VISIBLE_DEVICES=-1\)"):
        cuda_used_bytes("cuda:0")
