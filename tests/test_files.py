"""Values in files: whole or not at all."""

import pytest
from factories import make_config
from pydantic import ValidationError

from autotune.config import TrainConfig
from autotune.files import read_value, write_text, write_value


def test_what_is_written_is_read(tmp_path):
    config = make_config(4, adapter={"rank": 8})
    write_value(config, tmp_path / "config.json")
    assert read_value(TrainConfig, tmp_path / "config.json") == config


def test_a_file_is_replaced_and_nothing_else_is_left(tmp_path):
    path = tmp_path / "text"
    write_text("old and longer", path)
    write_text("new", path)
    assert path.read_text() == "new"
    assert [p.name for p in tmp_path.iterdir()] == ["text"]


def test_a_file_that_can_not_be_finished_leaves_the_old_one(tmp_path):
    path = tmp_path / "text"
    write_text("old", path)
    with pytest.raises(UnicodeEncodeError):
        write_text("half\udc80", path)
    assert path.read_text() == "old"


def test_half_a_file_is_refused(tmp_path):
    path = tmp_path / "config.json"
    write_value(make_config(), path)
    path.write_bytes(path.read_bytes()[:40])
    with pytest.raises(ValidationError):
        read_value(TrainConfig, path)


def test_a_missing_file_is_an_os_error(tmp_path):
    with pytest.raises(FileNotFoundError):
        read_value(TrainConfig, tmp_path / "nothing.json")
