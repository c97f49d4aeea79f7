"""The file that an answer is wanted in, beside the run directory."""

import os
from concurrent.futures import ThreadPoolExecutor

import pytest
from exporting import answer_of
from factories import make_config

from autotune.errors import InputError
from autotune.search.run import deliver, wanted_file
from autotune.tuning_result import TuningResult, load


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
