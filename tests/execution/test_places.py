"""Parts of a machine that share no device and no core."""

from __future__ import annotations

import os

import pytest
from factories import make_gpu, make_hardware

from autotune.errors import InputError, MachineError
from autotune.execution import places
from autotune.execution.places import LAUNCHER_BYTES, Place, core_sets, hardware_of, kind_of, places_of, share_of
from autotune.units import GIB


@pytest.fixture
def cores(monkeypatch):
    """Return a function that gives this process some cores, each with its processor and physical core."""

    def have(topology: dict[int, tuple[int, int]]) -> None:
        monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(topology))
        where = {"physical_package_id": 0, "core_id": 1}
        monkeypatch.setattr(places, "_read", lambda core, what: topology[core][where[what]])

    return have


def test_one_place_is_the_whole_device():
    assert places_of(make_hardware(), 1) == (Place(device="cpu"),)
    assert places_of(make_gpu(), 1) == (Place(device="cuda:0"),)
    assert places_of(make_gpu(), 1)[0].shown == ""


def test_core_sets_share_no_core_and_are_of_one_size(cores):
    cores({core: (0, core) for core in range(7)})
    sets = [place.cores for place in core_sets(3)]
    assert sets == [(0, 1), (2, 3), (4, 5)]


def test_threads_of_a_physical_core_stay_together(cores):
    cores({core: (0, core % 4) for core in range(8)})  # 0 and 4 are one core's
    assert [place.cores for place in core_sets(4)] == [(0, 4), (1, 5), (2, 6), (3, 7)]


def test_processors_are_not_mixed(cores):
    cores({core: (core % 2, core) for core in range(4)})
    assert [place.cores for place in core_sets(2)] == [(0, 2), (1, 3)]


def test_more_places_than_cores_are_refused(cores):
    cores({0: (0, 0), 5: (0, 1)})
    with pytest.raises(MachineError, match="--workers 3: this machine has 2 cores"):
        core_sets(3)


@pytest.mark.parametrize(("asked", "told"), [(None, "2"), ("1", "1"), ("8", "2"), ("4,2", "2")])
def test_a_bound_trial_has_as_many_threads_as_cores_or_what_the_user_asked_for(monkeypatch, asked, told):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if asked is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", asked)
    assert Place(name="0", device="cpu", cores=(2, 3)).environment() == {"OMP_NUM_THREADS": told}
    assert Place(device="cpu").environment() == {}


def test_places_are_called_by_their_cores_or_device():
    assert Place(name="0", device="cpu", cores=(0, 1, 2, 8, 10, 11)).shown == "cores 0-2,8,10-11"
    assert Place(name="cuda1", device="cuda:1").shown == "cuda:1"


def test_trials_that_share_a_processor_share_its_cores_and_free_memory():
    share = share_of(make_hardware(cores=9, free_bytes=8 * GIB + 3 * LAUNCHER_BYTES), 4)
    assert (share.cores, share.free_bytes, share.memory_bytes) == (2, 2 * GIB, 16 * GIB)


def test_too_little_memory_for_so_many_is_refused():
    with pytest.raises(InputError, match="--workers 4"):
        share_of(make_hardware(free_bytes=LAUNCHER_BYTES), 4)


@pytest.fixture
def gpus(monkeypatch):
    """Return a function that puts GPUs into this machine."""

    def have(*devices) -> None:
        monkeypatch.setattr(places, "cuda_count", lambda: len(devices))
        monkeypatch.setattr(places, "detect", lambda device: devices[int(device[5:])])

    return have


def test_each_place_has_a_device_of_the_same_kind_the_freest_first(gpus):
    a, b, c = (make_gpu(device=f"cuda:{i}", free_bytes=free * GIB) for i, free in enumerate((10, 39, 38)))
    gpus(a, b, c, make_gpu(device="cuda:3", name="another GPU"))
    found = places_of(a, 2)
    assert [place.device for place in found] == ["cuda:1", "cuda:2"]
    assert hardware_of(a, found).free_bytes == 38 * GIB


def test_a_place_may_have_several_devices(gpus):
    devices = [make_gpu(device=f"cuda:{i}", free_bytes=(39 - i) * GIB) for i in range(11)]
    gpus(*devices)
    found = places_of(devices[0], 5, each=2)
    assert [place.devices for place in found] == [(f"cuda:{2 * i}", f"cuda:{2 * i + 1}") for i in range(5)]
    assert (found[1].name, found[1].shown) == ("cuda2", "cuda:2+cuda:3")
    own = hardware_of(devices[0], found)
    assert (own.count, own.free_bytes) == (2, 30 * GIB)
    with pytest.raises(MachineError, match="--workers 4 --devices 3: this machine has 11 x a GPU"):
        places_of(devices[0], 4, each=3)


def test_more_places_than_devices_of_a_kind_are_refused(gpus):
    gpus(make_gpu(), make_gpu(device="cuda:1", name="another GPU"))
    with pytest.raises(MachineError, match="--workers 2: this machine has 1 x a GPU and 1 of another kind"):
        places_of(make_gpu(), 2)


@pytest.mark.parametrize(
    "other",
    [
        {"device": "cuda:3"},
        {"free_bytes": GIB},
        {"host_memory_bytes": GIB},
    ],
)
def test_what_a_trial_does_not_notice_makes_no_other_kind(other):
    assert kind_of(make_gpu(**other)) == kind_of(make_gpu())


@pytest.mark.parametrize(
    "other", [{"name": "b"}, {"driver": "1"}, {"cores": 64}, {"memory_bytes": GIB}, {"versions": {"torch": "3"}}]
)
def test_what_decides_speed_or_memory_makes_another_kind(other):
    assert kind_of(make_gpu(**other)) != kind_of(make_gpu())


def test_processors_whose_system_keeps_a_little_more_memory_are_alike():
    usual, more, half = (
        make_hardware(host_memory_bytes=size, memory_bytes=size) for size in (16 * GIB, 16 * GIB - (40 << 20), 8 * GIB)
    )
    assert kind_of(usual) == kind_of(more) != kind_of(half)
