"""Values: frozen, strict, the same after a journey through JSON; in files whole or not at all."""

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from factories import make_config, make_workload
from pydantic import ValidationError

from autotune.value import Value, check_savable, open_own, read_value, save_bytes, write_text, write_value
from autotune.values.config import TrainConfig


def test_what_is_written_is_read_and_half_of_it_refused(tmp_path):
    config, path = make_config(4, adapter={"rank": 8}), tmp_path / "config.json"
    with pytest.raises(FileNotFoundError):
        read_value(TrainConfig, path)
    write_text("old and longer" * 100, path)
    write_value(config, path)
    assert read_value(TrainConfig, path) == config
    assert [p.name for p in tmp_path.iterdir()] == ["config.json"]
    path.write_bytes(path.read_bytes()[:40])
    with pytest.raises(ValidationError):
        read_value(TrainConfig, path)


def test_a_file_that_can_not_be_finished_leaves_the_old_one(tmp_path):
    path = tmp_path / "text"
    write_text("old", path)
    with pytest.raises(UnicodeEncodeError):
        write_text("half\udc80", path)
    assert path.read_text() == "old"


def test_what_the_user_has_named_is_written_through_a_link_and_a_private_file_stays_private(tmp_path):
    (tmp_path / "folder").mkdir()
    target, link = tmp_path / "folder" / "target", tmp_path / "link"
    link.symlink_to(Path("folder") / "target")
    check_savable(link)
    assert not target.exists()
    save_bytes(b"old", link)
    target.chmod(0o600)
    before = target.stat().st_ino
    save_bytes(b"new", link)
    assert link.is_symlink()
    assert target.read_text() == "new"
    assert target.stat().st_ino != before  # replaced at once, as ever
    assert target.stat().st_mode & 0o777 == 0o600
    assert [p.name for p in target.parent.iterdir()] == ["target"]


def test_a_file_of_ours_follows_no_link_nor_a_temporary_name_that_was_guessed(tmp_path):
    (tmp_path / "target").write_text("another's")
    for name in ("link", f".text.{os.getpid()}", f".saved.{os.getpid()}"):
        (tmp_path / name).symlink_to(tmp_path / "target")
    write_text("new", tmp_path / "link")
    write_text("new", tmp_path / "text")
    save_bytes(b"new", tmp_path / "saved")
    assert (tmp_path / "target").read_text() == "another's"
    assert not (tmp_path / "link").is_symlink()


@pytest.mark.parametrize(
    "make", [os.link, os.symlink, lambda target, path: os.mkfifo(path)], ids=["hard", "symbolic", "pipe"]
)
def test_a_file_that_is_written_in_place_is_no_link(tmp_path, make):
    (tmp_path / "target").write_text("another's")
    make(tmp_path / "target", tmp_path / "log")
    with pytest.raises(OSError, match=r"a link|No such device"):
        open_own(tmp_path / "log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    assert (tmp_path / "target").read_text() == "another's"


def test_a_pipe_that_the_user_has_named_is_written_to(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    content = b"0123456789abcdef" * 10_000  # more than a pipe holds
    with ThreadPoolExecutor() as others:
        check_savable(pipe)  # nobody has to read yet
        read = others.submit(pipe.read_bytes)
        save_bytes(content, pipe)
        assert read.result() == content
    assert pipe.is_fifo()
    assert [p.name for p in tmp_path.iterdir()] == ["pipe"]


def test_a_device_stays_one(tmp_path):
    controller, terminal = os.openpty()
    device = Path(os.ttyname(terminal))
    save_bytes(b"text", device)
    assert os.read(controller, 100) == b"text"
    assert device.is_char_device()
    assert not list(device.parent.glob(f".{device.name}.*"))
    os.close(controller)
    os.close(terminal)


def test_a_folder_is_no_file(tmp_path):
    for write in (check_savable, lambda path: save_bytes(b"text", path)):
        with pytest.raises(IsADirectoryError):
            write(tmp_path)


class Pair(Value):
    first: int
    second: str = "x"


def test_a_value_is_frozen_strict_and_keyword_only():
    with pytest.raises(ValidationError, match="frozen"):
        Pair(first=1).first = 2
    with pytest.raises(ValidationError, match="third"):
        Pair(first=1, third=3)
    with pytest.raises(TypeError):
        Pair(1)


def test_equal_values_have_equal_digests_and_hashes_and_others_have_others():
    assert make_config(8).digest() == make_config(8).digest()
    assert len({make_config(8), make_config(8), make_config(4)}) == 2
    assert len({Pair(first=1).digest(), Pair(first=2).digest(), Pair(first=1, second="y").digest()}) == 3
    one, other = (make_workload(fixed_arguments=dict(items)) for items in ([("a", 1), ("b", 2)], [("b", 2), ("a", 1)]))
    assert one.digest() == other.digest()
