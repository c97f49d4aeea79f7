"""Where the trials of a search run, what can't go together with several at once, and where its answer is wanted."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor

import pytest
from exporting import answer_of
from factories import make_config

from autotune.errors import InputError, MachineError
from autotune.execution.pool import LocalPool, OnePlace
from autotune.planning.options import SearchOptions
from autotune.planning.planner import outline
from autotune.search.run import backend_of, check, deliver, wanted_file
from autotune.tuning_result import TuningResult, load
from autotune.units import GIB
from autotune.values.placement import Fleet

CORES = len(os.sched_getaffinity(0))
two_cores = pytest.mark.skipif(CORES < 2, reason="needs two cores")


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"address": "auto"}, "--address auto: this is about a cluster; add --engine ray"),
        ({"kind": "H100"}, "--kind H100: this is about a cluster; add --engine ray"),
        ({"workers": 2, "exhaustive": True}, "--exhaustive: every point is measured alone.*leave out --workers 2"),
        ({"engine": "ray", "exhaustive": True}, "--exhaustive.*leave out --engine ray"),
        ({"workers": 2, "devices": "all"}, "--devices all: with --workers 2 say how many"),
        ({"workers": 2, "device": "cuda:1"}, "--device cuda:1: names one device alone; with --workers 2 say --device"),
    ],
)
def test_what_can_not_go_together_is_refused(fields, said):
    with pytest.raises(InputError, match=said):
        check(SearchOptions(model="m", **fields))


@pytest.mark.parametrize(
    "fields",
    [{}, {"workers": 1, "exhaustive": True}, {"workers": 4}, {"engine": "ray", "address": "auto", "kind": "A"}],
)
def test_anything_else_is_not(fields):
    check(SearchOptions(model="m", **fields))


@pytest.mark.parametrize("workers", [None, 1])
def test_one_place_is_a_pool_of_one(tmp_path, workers):
    with backend_of(Fleet(workers=workers), tmp_path, device="cpu") as made:
        assert isinstance(made.pool, OnePlace)
        assert made.pool.free() == 1
        assert made.allotment.hardware.cores == CORES
        assert not made.allotment.is_shared


@two_cores
def test_several_places_are_a_pool_and_each_trial_has_its_share(tmp_path):
    with backend_of(Fleet(workers=2), tmp_path, device="cpu") as made:
        assert isinstance(made.pool, LocalPool)
        share = made.allotment.hardware
        assert share.cores == CORES // 2
        assert share.free_bytes < share.memory_bytes / 2
        assert made.allotment.is_shared
        assert f"the answer is for training on {share.cores} core" in made.allotment.notes[0]


@two_cores
def test_a_search_goes_on_with_what_its_trials_had(tmp_path):
    with backend_of(Fleet(workers=2), tmp_path, device="cpu") as made:
        began = made.allotment.hardware
    with backend_of(Fleet(workers=2), tmp_path, planned=began) as made:
        assert made.allotment.hardware == began
    with (
        pytest.raises(MachineError, match="with 64 cores"),
        backend_of(Fleet(workers=2), tmp_path, planned=began.model_copy(update={"cores": 64})),
    ):
        pass


@two_cores
def test_the_default_memory_is_a_share_and_more_than_that_is_refused(tmp_path):
    with backend_of(Fleet(workers=2), tmp_path, device="cpu") as made:
        share = made.allotment
    usual = outline(SearchOptions(model="gpt2", workers=2), share)
    assert usual.memory_bytes < share.hardware.free_bytes
    assert usual.is_shared
    assert share.notes[0] in usual.notes
    with pytest.raises(InputError, match="each of 2 trials at a time can have"):
        outline(SearchOptions(model="gpt2", workers=2, memory_bytes=share.hardware.free_bytes + GIB), share)


def test_it_is_known_by_its_place_wherever_the_search_is_gone_on_with(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert wanted_file("best.json") == str(tmp_path / "best.json")
    assert not (tmp_path / "best.json").exists()
    assert wanted_file(None) is None


def test_what_it_held_stays_until_there_is_an_answer(tmp_path):
    path = tmp_path / "best.json"
    path.write_text("of yesterday")
    deliver(None, wanted_file(path))
    assert path.read_text() == "of yesterday"
    result = answer_of(make_config(16))
    deliver(result, wanted_file(path))
    assert load(path) == result
    deliver(result, None)


def test_a_file_that_can_not_be_written_is_refused_before_and_after(tmp_path):
    with pytest.raises(InputError, match="--output no/such/place"):
        wanted_file("no/such/place.json")
    with pytest.raises(InputError, match="can't be written"):
        deliver(answer_of(make_config(16)), str(tmp_path / "gone" / "best.json"))


def test_a_pipe_or_a_link_is_written_to(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to(tmp_path / "target")
    result = answer_of(make_config(16))
    pipe, link = wanted_file(tmp_path / "pipe"), wanted_file(tmp_path / "link")
    assert (tmp_path / "link").is_symlink()
    assert not (tmp_path / "target").exists()
    with ThreadPoolExecutor() as others:
        read = others.submit((tmp_path / "pipe").read_text)
        deliver(result, pipe)
        assert TuningResult.model_validate_json(read.result()) == result
    deliver(result, link)
    assert load(tmp_path / "target") == result
    assert (tmp_path / "link").is_symlink()
