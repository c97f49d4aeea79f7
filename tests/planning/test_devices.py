"""Over how many devices a search spreads trainings, and what is refused."""

from __future__ import annotations

import pytest
from factories import make_gpu, make_hardware

from autotune.errors import InputError, MachineError
from autotune.planning.devices import check_global_batch, default_global_batch, spread
from autotune.planning.options import SearchOptions
from autotune.units import GIB
from autotune.values import hardware as machine


@pytest.fixture
def four_gpus(monkeypatch):
    """Of which the last is in use."""
    free = {f"cuda:{index}": 39 * GIB for index in range(4)} | {"cuda:3": 10 * GIB}
    monkeypatch.setattr(machine, "like_devices", lambda device: tuple(free))
    monkeypatch.setattr(machine, "detect", lambda device: make_gpu(device=device, free_bytes=free[device], count=4))
    monkeypatch.setattr(machine, "cuda_used_bytes", lambda device: 40 * GIB - free[device])
    return make_gpu(count=4)


def spread_over(devices, hardware, **options):
    return spread(SearchOptions(model="tiny", devices=devices, **options), hardware)


def test_by_default_it_is_one_device_and_idle_ones_are_mentioned(four_gpus):
    hardware, notes = spread_over(None, four_gpus)
    assert hardware.count == 1
    assert notes == ["this machine has 3 such devices idle; --devices 3 searches for all of them together"]


def test_who_asks_for_one_is_not_told_of_others(four_gpus):
    assert spread_over(1, four_gpus)[1] == []
    assert spread_over(None, four_gpus, workers=4)[1] == []


def test_a_device_that_has_no_like_says_nothing():
    assert spread_over(None, make_gpu(count=1)) == (make_gpu(count=1), [])


def test_several_devices_have_the_memory_that_all_of_them_have_free(four_gpus):
    hardware, notes = spread_over(3, four_gpus)
    assert (hardware.count, hardware.free_bytes) == (3, 39 * GIB)
    assert notes == ["each training is spread over 3 devices: cuda:0, cuda:1, cuda:2"]
    hardware, _ = spread_over("all", four_gpus)
    assert (hardware.count, hardware.free_bytes) == (4, 10 * GIB)


def test_more_devices_than_there_are_is_refused(four_gpus):
    with pytest.raises(MachineError, match="--devices 5: there are 4 x a GPU in the machine"):
        spread_over(5, four_gpus)


def test_where_several_trials_run_at_a_time_their_places_have_the_devices():
    place = make_gpu(count=2, free_bytes=30 * GIB)
    assert spread_over(2, place, workers=2) == (place, ["each training is spread over 2 devices"])
    assert spread_over(2, place, engine="ray")[0] == place


def test_on_the_cpu_devices_are_processes_that_share_what_is_there():
    cpu = make_hardware(cores=4, free_bytes=12 * GIB, count=1)
    hardware, notes = spread_over(3, cpu)
    assert (hardware.count, hardware.cores, hardware.free_bytes) == (3, 4, 4 * GIB)
    assert notes == [
        "each training is spread over 3 processes, which share 4 cores; each has the memory budget to itself"
    ]
    for devices in (None, 1):
        assert spread_over(devices, cpu) == (cpu, [])


def test_on_the_cpu_there_are_no_more_processes_than_cores_and_no_all():
    with pytest.raises(MachineError, match="--devices 3: on the CPU each is a process, and there are 2 cores"):
        spread_over(3, make_hardware(cores=2))
    with pytest.raises(InputError, match="--devices all: the CPU is one device"):
        spread_over("all", make_hardware())


@pytest.mark.parametrize(
    ("asked", "ranks", "nearest"), [(16, 3, "15 and 18 do"), (2, 4, "4 does"), (10, 8, "8 and 16 do")]
)
def test_a_global_batch_that_cannot_be_shared_evenly_is_refused_with_the_nearest(asked, ranks, nearest):
    with pytest.raises(InputError, match=f"--global-batch {asked}: {ranks} devices can't share it evenly; {nearest}"):
        check_global_batch(asked, ranks)


def test_a_default_global_batch_can_be_shared_evenly():
    assert [default_global_batch(64, ranks) for ranks in (1, 2, 3, 8)] == [64, 64, 66, 64]
    check_global_batch(default_global_batch(64, 5), 5)
