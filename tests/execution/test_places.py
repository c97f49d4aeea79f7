"""Parts of a machine that share no device and no core; over how many devices a training is spread."""

import pytest
from factories import make_gpu, make_hardware

from autotune.errors import InputError, MachineError
from autotune.execution import places
from autotune.units import GIB
from autotune.values.problem import Fleet


@pytest.mark.parametrize(
    ("sharing", "holders", "told"),
    [
        ("", {7: 1 << 30}, []),
        ("one", {}, ["exclusive-process mode"]),
        ("one MPS", {7: 1 << 30}, ["MPS", "exclusive-process mode"]),  # it is the server's
        ("MIG", {}, ["MIG"]),
        ("one", {7: None}, "exclusive-process mode, and process 7 has it"),
        ("nobody", {}, "admits no process"),
    ],
)
def test_how_processes_share_a_gpu_is_told_in_a_line_or_refused(monkeypatch, sharing, holders, told):
    monkeypatch.setattr(places, "sharing_of", lambda device: frozenset(sharing.split()))
    monkeypatch.setattr(places, "computing_on", lambda device: holders)
    if isinstance(told, str):
        with pytest.raises(MachineError, match=told):
            places.sharing_notes(["cuda:0", "cuda:1"])
    else:
        notes = places.sharing_notes(["cuda:0", "cuda:1"])
        assert [word in note for word, note in zip(told, notes, strict=True)] == [True] * len(told)


@pytest.fixture
def gpus(monkeypatch):

    def have(*devices) -> None:
        monkeypatch.setattr(places, "cuda_count", lambda: len(devices))
        monkeypatch.setattr(places, "detect", lambda device: devices[int(device[5:])])

    return have


def test_each_place_has_a_device_of_the_same_kind_the_freest_first(gpus):
    a, b, c = (make_gpu(device=f"cuda:{i}", free_bytes=free * GIB) for i, free in enumerate((10, 39, 38)))
    gpus(a, b, c, make_gpu(device="cuda:3", name="another GPU"))
    found = places.places_of(a, 2)
    assert [place.devices for place in found] == [("cuda:1",), ("cuda:2",)]
    assert places.hardware_of(a, found).free_bytes == 38 * GIB
    with pytest.raises(MachineError, match="--workers 4: this machine has 3 x a GPU and 1 of another kind"):
        places.places_of(a, 4)
    with pytest.raises(InputError, match="--workers 2: the CPU runs one trial at a time"):
        places.places_of(make_hardware(), 2)


def test_a_place_may_have_several_devices(gpus):
    devices = [make_gpu(device=f"cuda:{i}", free_bytes=(39 - i) * GIB) for i in range(11)]
    gpus(*devices)
    found = places.places_of(devices[0], 5, each=2)
    assert [place.devices for place in found] == [(f"cuda:{2 * i}", f"cuda:{2 * i + 1}") for i in range(5)]
    assert found[1].shown == "cuda:2+cuda:3"
    own = places.hardware_of(devices[0], found)
    assert (own.count, own.free_bytes) == (2, 30 * GIB)
    with pytest.raises(MachineError, match="--workers 4 --devices 3: this machine has 11 x a GPU"):
        places.places_of(devices[0], 4, each=3)


@pytest.mark.parametrize(
    ("other", "is_alike"),
    [
        *((fields, True) for fields in ({"device": "cuda:3"}, {"free_bytes": GIB}, {"host_memory_bytes": GIB})),
        *((fields, False) for fields in ({"name": "b"}, {"driver": "1"}, {"cores": 64}, {"memory_bytes": GIB})),
        ({"versions": {"torch": "3"}}, False),
    ],
    ids=str,
)
def test_kinds_differ_in_what_a_trial_notices(other, is_alike):
    assert (places.kind_of(make_gpu(**other)) == places.kind_of(make_gpu())) == is_alike


def test_processors_whose_system_keeps_a_little_more_memory_are_alike():
    usual, more, half = (
        places.kind_of(make_hardware(host_memory_bytes=size, memory_bytes=size))
        for size in (16 * GIB, 16 * GIB - (40 << 20), 8 * GIB)
    )
    assert usual == more != half


@pytest.fixture
def four_gpus(monkeypatch):
    """Of which the last is in use."""
    free = {f"cuda:{index}": 39 * GIB for index in range(4)} | {"cuda:3": 10 * GIB}
    monkeypatch.setattr(places, "like_devices", lambda device: tuple(free))
    monkeypatch.setattr(places, "detect", lambda device: make_gpu(device=device, free_bytes=free[device], count=4))
    monkeypatch.setattr(places, "cuda_used_bytes", lambda device: 40 * GIB - free[device])
    return make_gpu(count=4)


def spread_over(devices, hardware, **options):
    asked = devices if isinstance(devices, tuple) else () if devices is None else (devices,)
    return places.spread(hardware, asked, is_single=Fleet(**options).is_single)


def test_by_default_it_is_one_device_and_idle_ones_are_mentioned_unless_one_was_asked_for(four_gpus):
    hardware, notes = spread_over(None, four_gpus)
    assert hardware.count == 1
    assert notes == ["this machine has 3 such devices idle; --devices 3 searches for all of them together"]
    assert spread_over(1, four_gpus)[1] == []
    assert spread_over(None, four_gpus, workers=4)[1] == []
    assert spread_over(None, make_gpu(count=1)) == (make_gpu(count=1), [])


@pytest.mark.parametrize(("busy", "mentioned"), [("cuda:0", []), ("cuda:1", []), ("cuda:2", ["2"])])
def test_idle_devices_are_mentioned_if_they_are_those_that_would_be_taken(four_gpus, monkeypatch, busy, mentioned):
    monkeypatch.setattr(places, "cuda_used_bytes", lambda device: 9 * GIB * (device == busy))
    assert [note.split()[3] for note in spread_over(None, four_gpus)[1]] == mentioned


def test_several_devices_have_the_memory_that_all_of_them_have_free(four_gpus):
    hardware, notes = spread_over(3, four_gpus)
    assert (hardware.count, hardware.free_bytes) == (3, 39 * GIB)
    assert notes == ["each training is spread over 3 devices: cuda:0, cuda:1, cuda:2"]
    hardware, _ = spread_over("all", four_gpus)
    assert (hardware.count, hardware.free_bytes) == (4, 10 * GIB)


@pytest.mark.parametrize(
    ("there", "asked", "numbers"), [(8, ("all",), (8, 1, 2, 4)), (6, ("all",), (6, 1, 2, 4)), (8, (1, "all"), (1, 8))]
)
def test_all_devices_are_compared_with_fewer_unless_others_are_named(there, asked, numbers):
    assert places.numbers_of(make_gpu(count=there), asked) == numbers


def test_where_several_trials_run_at_a_time_their_places_have_the_devices():
    place = make_gpu(count=2, free_bytes=30 * GIB)
    assert spread_over(2, place, workers=2) == (place, ["each training is spread over 2 devices"])
    assert spread_over(2, place, engine="ray")[0] == place


def test_a_training_over_machines_fills_them_one_by_one():
    eight = make_gpu(count=8, nodes=2)
    hardware, notes = spread_over((4, 8), eight, engine="ray")
    assert hardware == eight
    assert notes == ["each training is spread over 4 or 8 devices, on up to 2 machines"]
    assert [hardware.nodes_of(world) for world in (1, 2, 4, 8)] == [(1, 1), (1, 2), (1, 4), (2, 4)]
    with pytest.raises(InputError, match="--devices 6: whole machines of 4 devices"):
        spread_over((8, 2, 6), eight, engine="ray")
    processes, _ = spread_over(8, make_hardware(cores=4, free_bytes=12 * GIB, count=8, nodes=2), engine="ray")
    assert (processes.count, processes.free_bytes) == (8, 3 * GIB)


def test_on_the_cpu_devices_are_processes_that_share_what_is_there():
    cpu = make_hardware(cores=4, free_bytes=12 * GIB, count=1)
    hardware, notes = spread_over(3, cpu)
    assert (hardware.count, hardware.cores, hardware.free_bytes) == (3, 4, 4 * GIB)
    said = "each training is spread over 3 processes, which share 4 cores; each has the memory budget to itself"
    assert notes == [said]
    for devices in (None, 1):
        assert spread_over(devices, cpu) == (cpu, [])


@pytest.mark.parametrize(
    ("devices", "hardware", "error", "said"),
    [
        (3, make_hardware(cores=2), MachineError, "--devices 3: on the CPU each is a process, and there are 2 cores"),
        ("all", make_hardware(), InputError, "--devices all: the CPU is one device"),
        (5, make_gpu(count=4), MachineError, "--devices 5: there are 4 x a GPU in the machine"),
    ],
)
def test_more_devices_than_there_are_are_refused(devices, hardware, error, said):
    with pytest.raises(error, match=said):
        spread_over(devices, hardware)
