"""Other load, stolen time and heat beside the measured steps."""

import os
import signal
import subprocess
import sys
import time
from types import SimpleNamespace
from unittest.mock import Mock

import pytest

from autotune.execution import noise
from autotune.execution.noise import Counters, HostWatch, NvmlWatch, counters, watch
from autotune.values.conditions import Conditions

BEFORE = Counters(cores_s=200.0, busy_s=500.0, stolen_s=10.0, own_s=40.0)


@pytest.mark.parametrize(
    ("later", "others", "stolen"),
    [
        ({"cores_s": 220.0, "busy_s": 515.0, "own_s": 50.0}, 0.25, 0.0),  # beyond this process, of both cores
        ({"cores_s": 220.0, "stolen_s": 12.0}, 0.0, 0.1),
        ({"cores_s": 201.0, "busy_s": 500.4, "own_s": 40.45}, 0.0, 0.0),  # the kernel's ticks are rounded
        ({}, None, None),  # no time
    ],
)
def test_the_load_of_others_is_a_share_of_the_cores_time(monkeypatch, later, others, stolen):
    read = iter([BEFORE, BEFORE._replace(**later)])
    monkeypatch.setattr(noise, "counters", lambda own: next(read))
    host = HostWatch()
    host.begin()
    assert host.conditions() == Conditions(others_share=others, stolen_share=stolen)


def test_the_work_of_a_child_is_this_processs_own():
    """As that of a data loader's workers, while they run and when they have ended."""
    burn = "import time\nwhile time.process_time() < 0.3: pass\nprint(flush=True)\ninput()"
    before = counters()
    child = subprocess.Popen([sys.executable, "-c", burn], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    child.stdout.readline()
    running = counters()
    child.communicate(b"\n")
    ended = counters()
    assert running.own_s - before.own_s >= 0.25
    assert ended.own_s - before.own_s >= 0.25


def test_the_processors_that_count_are_those_of_this_process_though_others_are_offline(tmp_path, monkeypatch):
    ticks = os.sysconf("SC_CLK_TCK")
    lines = [f"cpu{core} {core * ticks} 0 0 50 0 0 0 {2 * core * ticks} 0 0" for core in (0, 2, 3)]
    (tmp_path / "stat").write_text("\n".join(["cpu  1 1 1 1 1 1 1 1 0 0", *lines, "intr 5 0", "btime 1"]))
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {2, 3})
    found = counters(stat=tmp_path / "stat")
    assert (found.busy_s, found.stolen_s) == pytest.approx((5.0, 10.0))
    assert 0 < 2 * time.monotonic() - found.cores_s < 10


class Nvml:
    """NVML, by its own names, of a GPU that gets hot: the second look finds it throttled."""

    NVML_TEMPERATURE_GPU = 0

    class NVMLError(Exception):
        pass

    def __init__(self, *, tells):
        told = ([70, 88], [0x0, 0x20], [SimpleNamespace(gpu=busy) for busy in (100, 90)])
        heat, reasons, busy = (Mock(side_effect=values if tells else self.NVMLError) for values in told)
        self.nvmlDeviceGetTemperature, self.nvmlDeviceGetCurrentClocksEventReasons = heat, reasons
        self.nvmlDeviceGetUtilizationRates = busy


@pytest.mark.parametrize(
    ("tells", "seen"), [(True, (88, {"heat": 0.5}, 0.05)), (False, (None, {}, None))], ids=["tells", "silent"]
)
def test_a_gpu_that_gets_hot_is_recorded_as_its_driver_tells(tells, seen):
    gpu = NvmlWatch("handle", Nvml(tells=tells))
    gpu.begin()
    gpu.look()
    gpu.look()
    found = gpu.conditions()
    assert (found.temperature_c, found.throttled, found.idle_share) == seen
    assert found.others_share is not None
    assert any("slowed down by heat" in warning for warning in found.warnings()) == tells


def test_another_process_takes_its_part_of_the_cores():
    """The shell ends before the process that it has started, which is nobody's child then."""
    script = f"{sys.executable} -c 'while True: pass' >/dev/null 2>&1 & echo $!"
    started = subprocess.run(["sh", "-c", script], capture_output=True, text=True, check=True, timeout=30)
    seen = HostWatch()
    try:
        seen.begin()
        time.sleep(2.0)
    finally:
        os.kill(int(started.stdout), signal.SIGKILL)
    assert seen.conditions().others_share >= 0.5 / len(os.sched_getaffinity(0))


def test_without_nvml_the_host_is_watched():
    assert type(watch("cpu")) is HostWatch
    assert isinstance(watch("cuda:0"), HostWatch)
