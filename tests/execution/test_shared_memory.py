"""What killed processes leave in shared memory is removed, and what anybody uses is left alone."""

from __future__ import annotations

import mmap

import pytest

from autotune.execution.shared_memory import names, remove_orphans


@pytest.fixture
def folder(tmp_path):
    """In place of /dev/shm, with a file of an earlier process."""
    (tmp_path / "torch_1_old_0").write_bytes(b"x")
    return tmp_path


def test_new_files_that_nobody_uses_are_removed(folder):
    before = names(folder)
    for name in ("torch_42_new_0", "nccl-AbCdEf", "deepspeed_allreduce_buffer_0"):
        (folder / name).write_bytes(b"x" * 8192)
    assert remove_orphans(before, folder) == ("deepspeed_allreduce_buffer_0", "nccl-AbCdEf", "torch_42_new_0")
    assert names(folder) == before


def test_files_that_were_there_before_and_files_of_other_programs_stay(folder):
    before = names(folder)
    (folder / "sem.mp-1").write_bytes(b"x")
    (folder / "torch_folder").mkdir()
    assert remove_orphans(before, folder) == ()
    assert names(folder) == before | {"sem.mp-1", "torch_folder"}


def test_a_file_that_is_open_or_mapped_stays(folder):
    before = names(folder)
    (folder / "torch_open").write_bytes(b"x" * 4096)
    (folder / "torch_mapped").write_bytes(b"x" * 4096)
    with (folder / "torch_mapped").open("r+b") as file:
        mapped = mmap.mmap(file.fileno(), 4096)
    with (folder / "torch_open").open("rb"), mapped:
        assert remove_orphans(before, folder) == ()
    assert remove_orphans(before, folder) == ("torch_mapped", "torch_open")


def test_a_machine_without_shared_memory_has_nothing_to_remove(tmp_path):
    assert remove_orphans(names(tmp_path / "none"), tmp_path / "none") == ()
