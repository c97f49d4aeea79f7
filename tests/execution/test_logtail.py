"""A trial's log is bounded; its end can be shown, and where a process stood."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from autotune.execution.logtail import HEAD_BYTES, TAIL_BYTES, BoundedLog, place_in, read_tail


def written(tmp_path: Path, *chunks: bytes) -> bytes:
    """Return what a log holds after `chunks` came through a pipe."""
    path = tmp_path / "log.txt"
    read_end, write_end = os.pipe()
    os.set_blocking(read_end, False)
    with BoundedLog(path) as log:
        for chunk in chunks:
            for start in range(0, len(chunk), 1 << 12):  # a pipe holds no more than 64 KiB
                os.write(write_end, chunk[start : start + (1 << 12)])
                assert log.copy_from(read_end)
        assert not log.copy_from(read_end)  # nothing is there now
        os.close(write_end)
        assert not log.copy_from(read_end)  # nor will be
    os.close(read_end)
    return path.read_bytes()


def test_what_is_short_is_kept_whole(tmp_path):
    assert written(tmp_path, b"one\n", b"two\n") == b"one\ntwo\n"


def test_nothing_printed_makes_an_empty_log(tmp_path):
    assert written(tmp_path) == b""


def test_up_to_head_and_tail_together_nothing_is_left_out(tmp_path):
    text = bytes(range(256)) * ((HEAD_BYTES + TAIL_BYTES) // 256)
    assert written(tmp_path, text) == text


@pytest.mark.parametrize("excess", [1, 4096, 100_000])
def test_beyond_that_the_middle_is_left_out_and_counted(tmp_path, excess):
    head, middle, tail = b"h" * HEAD_BYTES, b"m" * excess, b"t" * TAIL_BYTES
    assert written(tmp_path, head, middle, tail) == head + f"\n[... {excess} bytes left out ...]\n".encode() + tail


def tail_of(tmp_path: Path, content: bytes, **options: int) -> str:
    (tmp_path / "log.txt").write_bytes(content)
    return read_tail(tmp_path / "log.txt", **options)


def test_the_tail_is_the_last_lines(tmp_path):
    assert tail_of(tmp_path, b"1\n2\n3\n4\n", lines=2) == "3\n4"


def test_of_a_long_log_only_the_end_is_read(tmp_path):
    assert tail_of(tmp_path, b"x" * 10_000 + b"\nend\n", size=10) == "xxxxx\nend"


def test_empty_lines_are_not_worth_a_place(tmp_path):
    assert tail_of(tmp_path, b"1\n\n  \n2\n\n", lines=2) == "1\n2"


def test_what_cannot_be_printed_is_replaced(tmp_path):
    assert tail_of(tmp_path, b"\x1b[31mred\xff\x00\n") == "\ufffd[31mred\ufffd\ufffd"


def test_tabs_become_spaces_and_a_progress_bar_lines(tmp_path):
    assert tail_of(tmp_path, b"\tat line 3\n 50%\r100%\n") == "    at line 3\n 50%\n100%"


def test_a_log_that_is_missing_or_no_file_has_an_empty_tail(tmp_path):
    assert read_tail(tmp_path / "none.txt") == ""
    assert read_tail(tmp_path) == ""


WRAPPED = """
Stack (most recent call first):
  File "/x/torch/distributed/distributed_c10d.py", line 3098 in broadcast
  File "/x/torch/distributed/c10d_logger.py", line 83 in wrapper
"""
HANDED_ON = """
Stack (most recent call first):
  File "/x/torch/nn/modules/module.py", line 1790 in _call_impl
  File "/x/torch/distributed/c10d_logger.py", line 83 in wrapper
  File "/x/model.py", line 5 in forward
"""


@pytest.mark.parametrize(
    ("log", "place"),
    [
        ("", ""),
        ("Traceback (most recent call last):\n  File 'x', line 3, in y\n", ""),
        (WRAPPED, "broadcast (distributed_c10d.py:3098)"),
        (HANDED_ON, "forward (model.py:5)"),
        (WRAPPED + "a line that is printed later\n" + HANDED_ON, "forward (model.py:5)"),
        ("Stack (most recent call first):\n", ""),
    ],
)
def test_the_innermost_telling_call_of_the_last_stack_is_the_place(log, place):
    assert place_in(log) == place


def test_it_reads_what_faulthandler_really_writes():
    code = "import faulthandler\ndef nap():\n    faulthandler.dump_traceback(all_threads=False)\nnap()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert place_in(done.stderr) == "nap (<string>:3)"
