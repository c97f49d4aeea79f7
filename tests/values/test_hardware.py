"""The machine: its device, the devices as CUDA counts them, and drivers that tell less than most."""

from __future__ import annotations

import psutil
import pynvml
import pytest
from factories import make_gpu, make_hardware
from typer.testing import CliRunner

from autotune.cli.main import app
from autotune.errors import InputError, MachineError
from autotune.execution.noise import HostWatch, watch
from autotune.values.conditions import computing_on
from autotune.values.hardware import TF32_VARIABLE, cuda_count, cuda_used_bytes, detect, like_devices, sharing_of

UUIDS = ["GPU-11aa-0", "GPU-11ab-1", "GPU-22cc-2"]
INSTANCES: dict[str, list[str]] = {}  # of devices in MIG mode


@pytest.fixture
def driver(monkeypatch):
    """NVML with three devices; the returned function has a call of it fail with a code."""
    memory = type("Memory", (), {"total": 40 << 30, "free": 39 << 30, "used": 1 << 30})()
    part = type("Memory", (), {"total": 10 << 30, "free": 9 << 30, "used": 0})()

    def fail(code=pynvml.NVML_ERROR_INVALID_ARGUMENT):
        raise pynvml.NVMLError(code)

    def found(handles, key):
        return handles[key] if key in handles else fail(pynvml.NVML_ERROR_NOT_FOUND)

    def by_uuid(uuid):
        whole, parts = {u: f"gpu {i}" for i, u in enumerate(UUIDS)}, {u: u for own in INSTANCES.values() for u in own}
        return found(whole | parts, uuid)

    def is_part(handle):
        return handle.startswith("MIG")

    answers = {
        "nvmlInit": lambda: None,
        "nvmlDeviceGetCount": lambda: 3,
        "nvmlDeviceGetHandleByIndex": lambda i: f"gpu {i}" if i < 3 else fail(),
        "nvmlDeviceGetHandleByUUID": by_uuid,
        "nvmlDeviceGetMigMode": lambda handle: [int(handle in INSTANCES), 0],
        "nvmlDeviceGetComputeMode": lambda handle: {"gpu 0": 0, "gpu 1": 3}.get(handle, 2),
        "nvmlDeviceGetMaxMigDeviceCount": lambda handle: 7,
        "nvmlDeviceGetMigDeviceHandleByIndex": lambda handle, i: found(dict(enumerate(INSTANCES[handle])), i),
        "nvmlDeviceGetDeviceHandleFromMigDeviceHandle": lambda handle: "gpu 2" if is_part(handle) else fail(),
        "nvmlDeviceGetMemoryInfo": lambda handle: part if is_part(handle) else memory,
        "nvmlDeviceGetName": lambda handle: f"name of {handle}",
        "nvmlDeviceGetCudaComputeCapability": lambda handle: fail() if is_part(handle) else (8, 0),
        "nvmlSystemGetDriverVersion": lambda: "580.1",
    }
    for name, answer in answers.items():
        monkeypatch.setattr(pynvml, name, answer)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return lambda name, code: monkeypatch.setattr(pynvml, name, lambda *arguments: fail(code))


@pytest.fixture
def mig(driver, monkeypatch):
    """The last device is in MIG mode."""
    monkeypatch.setitem(INSTANCES, "gpu 2", ["MIG-77-0", "MIG-78-1"])


def test_the_cpu_has_the_memory_and_the_cores_of_this_machine():
    hardware = detect("cpu")
    assert hardware.is_cpu
    assert hardware.memory_bytes == psutil.virtual_memory().total
    assert 0 < hardware.free_bytes <= hardware.memory_bytes
    assert 1 <= hardware.cores <= psutil.cpu_count()
    assert hardware.name


def test_without_a_driver_the_device_is_the_cpu_and_another_one_is_named(driver):
    driver("nvmlInit", pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)
    assert cuda_count() == 0
    assert detect("auto").is_cpu
    with pytest.raises(MachineError, match="--device cuda:1: this machine has no CUDA device"):
        detect("cuda:1")


@pytest.mark.usefixtures("driver")
def test_with_a_driver_the_device_is_the_first_gpu_and_one_beyond_the_last_is_refused():
    hardware = detect("auto")
    assert (hardware.device, hardware.name, hardware.capability) == ("cuda:0", "name of gpu 0", (8, 0))
    assert cuda_used_bytes("cuda:0") == 1 << 30
    with pytest.raises(MachineError, match=r"--device cuda:3: this machine has 3 CUDA device\(s\)"):
        detect("cuda:3")


@pytest.mark.usefixtures("driver")
def test_devices_of_the_same_name_and_memory_are_alike_the_named_one_first(monkeypatch):
    names = {"gpu 0": "A100", "gpu 1": "T4", "gpu 2": "A100"}
    monkeypatch.setattr(pynvml, "nvmlDeviceGetName", names.get)
    assert like_devices("cuda:2") == ("cuda:2", "cuda:0")
    assert [detect(f"cuda:{index}").count for index in range(3)] == [2, 1, 2]
    assert [detect(f"cuda:{index}").peers for index in range(3)] == [("cuda:2",), (), ("cuda:0",)]
    monkeypatch.setattr(pynvml, "nvmlDeviceGetName", lambda handle: "A100")
    assert [detect(f"cuda:{index}").peers for index in range(2)] == [None, ("cuda:0", "cuda:2")]
    assert detect("cpu").count == 1


@pytest.mark.parametrize("device", ["tpu", "cuda:x", "cuda:", "CUDA", ""])
def test_a_device_of_another_name_is_refused(device):
    with pytest.raises(InputError, match="expected auto, cpu, cuda or cuda:N"):
        detect(device)


def test_the_fingerprint_is_the_machines_and_not_the_moments():
    usual = make_gpu()
    for same in ({"free_bytes": 1, "count": 1}, {"free_bytes": 2, "count": 8}, {"has_cc": False}):
        assert make_gpu(**same).fingerprint == usual.fingerprint
    for changed in ({"driver": "590"}, {"name": "other"}, {"versions": {}}, {"cores": 3}, {"starts_with_tf32": True}):
        assert make_gpu(**changed).fingerprint != usual.fingerprint


@pytest.mark.usefixtures("driver")
def test_an_environment_that_has_torch_begin_with_tf32_is_seen(monkeypatch):
    monkeypatch.delenv(TF32_VARIABLE, raising=False)
    assert not detect("cuda:0").starts_with_tf32
    for value, is_on in (("0", False), ("1", True)):
        monkeypatch.setenv(TF32_VARIABLE, value)
        assert detect("cuda:0").starts_with_tf32 is is_on


@pytest.mark.usefixtures("driver")
@pytest.mark.parametrize(
    ("there", "named", "is_found"),
    [("g++", None, False), ("gcc", None, True), ("clang", None, True), ("icx", "icx", True), ("gcc", "icx", False)],
)
def test_a_c_compiler_is_looked_for_as_triton_does(monkeypatch, tmp_path, there, named, is_found):
    (tmp_path / there).touch(mode=0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    if named is not None:
        monkeypatch.setenv("CC", named)
    assert detect("cuda:0").has_cc is is_found


def test_ampere_and_newer_have_tf32_and_bf16_and_ada_and_newer_fp8():
    gpus = [make_gpu(capability=capability) for capability in ((7, 5), (8, 0), (10, 0))]
    assert [gpu.has_fp8 for gpu in (*gpus, make_gpu(capability=(8, 9)))] == [False, False, True, True]
    assert [gpu.has_tf32 for gpu in (make_hardware(), *gpus)] == [False, False, True, True]
    assert [gpu.has_bf16 for gpu in (make_hardware(), *gpus)] == [True, False, True, True]


@pytest.mark.usefixtures("mig")
@pytest.mark.parametrize(
    ("visible", "names"),
    [
        ("0,7,1", ["gpu 0"]),  # stale: CUDA sees what stands before it
        ("7", []), ("0,1,2", ["gpu 0", "gpu 1", "MIG-77-0"]), ("1, 0", ["gpu 1", "gpu 0"]), ("1,-1,2", ["gpu 1"]),
        ("-1", []), ("", []), ("GPU-11ab-1", ["gpu 1"]), ("GPU-11ab-1,GPU-11aa-0", ["gpu 1", "gpu 0"]), ("GPU-99", []),
        ("NoDevFiles", []), ("MIG-78-1", ["MIG-78-1"]),
        ("2", ["MIG-77-0"]),  # a device in MIG mode is its first instance
    ],
)  # fmt: skip
def test_devices_are_counted_as_cuda_counts_them(monkeypatch, visible, names):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert [detect(f"cuda:{i}").name for i in range(cuda_count())] == [f"name of {n}" for n in names]


@pytest.mark.usefixtures("mig")
def test_an_instance_has_its_own_memory_and_the_capability_of_its_device(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-77-0")
    found = detect("cuda")
    assert (found.memory_bytes, found.free_bytes, found.capability) == (10 << 30, 9 << 30, (8, 0))


@pytest.mark.usefixtures("driver")
def test_how_processes_share_a_device_is_asked_of_its_driver(monkeypatch, tmp_path):
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", str(tmp_path))
    assert [sharing_of(f"cuda:{index}") for index in range(4)] == [{*()}, {"one"}, {"nobody"}, {*()}]
    monkeypatch.setitem(INSTANCES, "gpu 2", ["MIG-77-0"])
    (tmp_path / "control").touch()
    assert [sharing_of(f"cuda:{index}") for index in (0, 2)] == [{"MPS"}, {"MPS", "MIG", "nobody"}]


def test_a_device_that_shares_the_hosts_memory_has_the_hosts(driver):
    driver("nvmlDeviceGetMemoryInfo", pynvml.NVML_ERROR_NOT_SUPPORTED)
    found = detect("cuda:0")
    assert found.memory_bytes == psutil.virtual_memory().total
    assert 0 < found.free_bytes <= found.memory_bytes
    assert cuda_used_bytes("cuda:0") is None
    assert like_devices("cuda:0")[0] == "cuda:0"


@pytest.mark.parametrize("name", ["nvmlDeviceGetMemoryInfo", "nvmlDeviceGetName", "nvmlSystemGetDriverVersion"])
def test_a_driver_that_does_not_answer_is_one_line(driver, name):
    driver(name, pynvml.NVML_ERROR_NO_PERMISSION)
    with pytest.raises(MachineError, match="cuda:0: the NVIDIA driver doesn't report it: Insufficient Permissions; "):
        detect("cuda:0")
    done = CliRunner().invoke(app, ["doctor", "--device", "cuda:0"])
    assert done.exit_code == MachineError.exit_code
    assert "Traceback" not in done.output


def test_a_gpu_that_was_lost_or_is_no_longer_visible_is_one_line(driver, monkeypatch):
    with monkeypatch.context() as hidden:
        hidden.setenv("CUDA_VISIBLE_DEVICES", "-1")
        with pytest.raises(MachineError, match=r"cuda:0: no such device is visible \(CUDA_VISIBLE_DEVICES=-1\)"):
            cuda_used_bytes("cuda:0")
    driver("nvmlDeviceGetHandleByIndex", pynvml.NVML_ERROR_GPU_IS_LOST)
    with pytest.raises(MachineError, match="GPU is lost"):
        cuda_used_bytes("cuda:0")
    assert computing_on("cuda:0") == {}
    assert type(watch("cuda:0")) is HostWatch
