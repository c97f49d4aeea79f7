"""What of a trial's surroundings is worth a warning."""

import os
import signal
import subprocess
import sys

import pytest
from factories import make_gpu, make_hardware

from autotune.values import conditions
from autotune.values.conditions import Conditions, other_processes, throttle_reasons, worst_of


def test_a_quiet_machine_is_worth_no_word():
    assert Conditions().warnings() == ()
    assert Conditions(others_share=0.01, stolen_share=0.0, waited_share=0.4).warnings() == ()
    assert Conditions(clock_mhz=1900, max_clock_mhz=1980, temperature_c=60).warnings() == ()


def test_other_processes_and_the_hypervisor_are_told_apart():
    assert Conditions(others_share=0.31).warnings() == (
        "other processes took 31% of the cores' time while it was measured",
    )
    assert "hypervisor took 7%" in Conditions(stolen_share=0.07).warnings()[0]


@pytest.mark.parametrize(("idle", "taken"), [(0.0, 0.0), (0.02, 0.02), (0.5, 0.31), (None, 0.31)])
def test_others_on_the_cores_cost_a_gpu_no_more_than_it_stood_idle(idle, taken):
    found = Conditions(others_share=0.31, stolen_share=0.01, idle_share=idle)
    assert found.taken_share == taken
    assert bool(found.warnings()) is (taken >= 0.05)


def test_of_several_ranks_the_worst_of_each_kind_counts():
    ranks = [Conditions(idle_share=0.1, clock_mhz=900, throttled={"heat": 0.5}), Conditions(idle_share=0.4)]
    worst = worst_of([*ranks, Conditions(clock_mhz=1000, throttled={"heat": 0.2, "power cap": 0.1})])
    assert worst == Conditions(idle_share=0.4, clock_mhz=900, throttled={"heat": 0.5, "power cap": 0.1})
    assert worst_of([]) is None


def test_throttling_is_told_with_its_reason_its_extent_and_the_heat():
    (line,) = Conditions(
        throttled={"heat": 0.5, "power cap": 1.0}, temperature_c=91, clock_mhz=900, max_clock_mhz=1980
    ).warnings()
    assert line == "the GPU was slowed down by heat (50% of the time), power cap (100% of the time), at 91 °C"


def test_a_slow_clock_without_a_reason_is_told():
    assert Conditions(clock_mhz=900, max_clock_mhz=1980).warnings() == (
        "the GPU ran at 900 of 1980 MHz without saying why",
    )


@pytest.mark.parametrize(
    ("bits", "reasons"),
    [
        (0x0, ()),
        (0x1, ()),  # idle
        (0x2 | 0x10 | 0x100, ()),  # settings: application clocks, sync boost, display clocks
        (0x4, ("power cap",)),
        (0x20 | 0x40 | 0x8, ("hardware slowdown", "heat", "heat (hardware)")),
    ],
)
def test_only_what_disturbs_is_a_reason(bits, reasons):
    assert throttle_reasons(bits) == reasons


BURN = "import time\nprint(flush=True)\nwhile True: pass"


def test_neither_this_process_nor_one_that_it_started_is_somebody_else():
    with subprocess.Popen([sys.executable, "-c", BURN], stdout=subprocess.PIPE) as own:
        own.stdout.readline()
        found = [p.pid for p in other_processes(make_hardware())]
        own.kill()
    assert not {os.getpid(), own.pid} & {*found}


@pytest.fixture
def strangers():
    """The pids of two processes whose parent has ended: one computes, the other sleeps."""
    script = f"{sys.executable} -c '{BURN}' >/dev/null 2>&1 & echo $!; sleep 600 >/dev/null 2>&1 & echo $!"
    started = subprocess.run(["sh", "-c", script], capture_output=True, text=True, check=True, timeout=30)
    pids = [int(pid) for pid in started.stdout.split()]
    yield pids
    for pid in pids:
        os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize("hardware", [make_hardware(), make_gpu()])
def test_somebody_elses_process_is_busy_if_it_takes_processor_time(hardware, strangers, monkeypatch):
    computing, sleeping = strangers
    monkeypatch.setattr(conditions, "computing_on", lambda device: dict.fromkeys(strangers, 38 << 20))
    found = [p.pid for p in other_processes(hardware, within_s=1.0)]
    assert computing in found
    assert sleeping not in found
