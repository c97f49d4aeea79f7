"""A failed allocation is recognised in every disguise and told in one line; a log is bounded, and its end is shown."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

from autotune.execution.checking import CheckError
from autotune.execution.failures import (
    HEAD_BYTES,
    TAIL_BYTES,
    BoundedLog,
    first_line,
    is_out_of_memory,
    is_out_of_memory_log,
    place_in,
    read_tail,
    shortage,
)

MIB, GIB = 1 << 20, 1 << 30
# torch 2.11, under a cap of 8 GiB on a device of 80.
CUDA = (
    "CUDA out of memory. Tried to allocate 64.00 MiB. GPU 0 has a total capacity of 80.00 GiB of which 72.42 GiB is "
    "free. Including non-PyTorch memory, this process has 7.58 GiB memory in use. 7.16 GiB allowed; Of the allocated "
    "memory 7.08 GiB is allocated by PyTorch, and 56.14 MiB is reserved by PyTorch but unallocated. If reserved but "
    "unallocated memory is large try setting PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True to avoid fragmentation."
)
CPU = (
    "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to allocate "
    "8388608 bytes. Error code 12 (Cannot allocate memory)"
)


@pytest.mark.parametrize(
    ("error", "in_use", "cause"),
    [
        (RuntimeError(CUDA), 8 * GIB - MIB, "64.00 MiB were asked for with 8.00 GiB in use; the budget is 8.00 GiB"),
        (RuntimeError(CPU), 100 * MIB, "8 MiB were asked for with 100 MiB in use; the budget is 8.00 GiB"),
        (RuntimeError(CPU), None, "8 MiB were asked for; the budget is 8.00 GiB"),
        (MemoryError(), 7 * GIB, "MemoryError with 7.00 GiB in use; the budget is 8.00 GiB"),
        (
            MemoryError("needed 9.00 GiB, more than the budget of 8.00 GiB"),
            9 * GIB,
            "needed 9.00 GiB, more than the budget of 8.00 GiB",
        ),
        (
            RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
            7 * GIB,
            "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)` with 7.00 GiB in use; the "
            "budget is 8.00 GiB",
        ),
    ],
    ids=["cuda", "cpu", "unknown", "python", "over", "library"],
)
def test_what_was_asked_for_and_what_was_in_use_are_told_with_the_budget(error, in_use, cause):
    assert shortage(error, in_use, 8 * GIB) == cause


def test_where_a_check_ran_out_comes_first():
    error = CheckError(f"while evaluating with a batch of 64: {first_line(RuntimeError(CUDA))}")
    assert shortage(error, 7 * GIB, 8 * GIB).startswith("while evaluating with a batch of 64: 64.00 MiB were asked for")


def test_a_long_line_ends_between_words():
    told = first_line(RuntimeError("a library that talks and talks " * 20 + "\nand more"))
    assert len(told) <= 200
    assert told.removesuffix(" ...").split()[-1] in ("talks", "and", "library", "that", "a")


def raised(error: BaseException, *, cause: BaseException | None = None, during: BaseException | None = None):
    """Return `error` as it is after having been raised from `cause`, or while `during` was handled."""
    try:
        if during is None:
            raise error from cause
        try:
            raise during
        except type(during):
            raise error  # noqa: B904
    except type(error) as caught:
        return caught


class OutOfMemoryError(RuntimeError):
    """By its name, as torch.OutOfMemoryError."""


class InductorError(RuntimeError):
    """A compiler's wrapper."""


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError(CPU),
        RuntimeError("could not execute a primitive"),
        RuntimeError("could not create a primitive"),
        MemoryError(),
        OSError(12, "Cannot allocate memory"),
        RuntimeError("std::bad_alloc"),
        OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.10 GiB"),
        RuntimeError("CUDA error: out of memory"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        InductorError("MemoryError: "),
        raised(InductorError("while compiling"), cause=MemoryError()),
        raised(ValueError("on top of it"), during=RuntimeError(CPU)),
        raised(InductorError("outer"), cause=raised(InductorError("inner"), during=MemoryError())),
    ],
    ids=lambda e: f"{type(e).__name__}-{str(e)[:30]}",
)
def test_a_failed_allocation_is_recognised(error):
    assert is_out_of_memory(error)


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("The size of tensor a (3) must match the size of tensor b (4)"),
        ValueError("fp16 needs an accelerator"),
        RuntimeError("CUDA error: an illegal memory access was encountered"),
        RuntimeError("out of resource: shared memory, Required: 131072, Hardware limit: 101376"),
        OSError(28, "No space left on device"),
        raised(KeyError("a"), cause=ValueError("b")),
    ],
    ids=str,
)
def test_another_error_is_not(error):
    assert not is_out_of_memory(error)


def test_errors_that_refer_to_each_other_are_looked_at_once():
    first, second = ValueError("1"), ValueError("2")
    first.__context__, second.__context__ = second, first
    assert not is_out_of_memory(first)


def test_the_real_error_of_torch_is_recognised():
    import torch

    with pytest.raises(RuntimeError) as caught:
        torch.empty(1 << 60)
    assert is_out_of_memory(caught.value)


@pytest.mark.parametrize(
    ("log", "expected"),
    [
        ("step 3\n\nlibgomp: Thread creation failed: Resource temporarily unavailable\n", True),
        ("cannot allocate memory for thread-local data: ABORT", True),
        ("terminate called after throwing an instance of 'std::bad_alloc'", True),
        ("ValueError: bad value", False),
        ("tip: if you run out of memory, use a smaller batch", False),
        ("", False),
    ],
)
def test_the_last_words_of_a_process_are_recognised(log, expected):
    assert is_out_of_memory_log(log) is expected


def test_a_message_in_a_frame_is_told_by_its_first_words():
    assert first_line(LookupError("\n******\n  Resource punkt not found.\n******")) == "Resource punkt not found."
    assert first_line(ValueError("***")) == "ValueError"


def written(tmp_path: Path, *chunks: bytes) -> bytes:
    """Return what a log holds after `chunks` came through a pipe."""
    path = tmp_path / "log.txt"
    read_end, write_end = os.pipe()
    os.set_blocking(read_end, False)
    with contextlib.closing(BoundedLog(path)) as log:
        for chunk in chunks:
            for start in range(0, len(chunk), 1 << 12):  # a pipe holds no more than 64 KiB
                os.write(write_end, chunk[start : start + (1 << 12)])
                assert log.copy_from(read_end)
        assert not log.copy_from(read_end)  # nothing is there now
        os.close(write_end)
        assert not log.copy_from(read_end)  # nor will be
    os.close(read_end)
    return path.read_bytes()


@pytest.mark.parametrize(
    "chunks", [(), (b"one\n", b"two\n"), (bytes(range(256)) * ((HEAD_BYTES + TAIL_BYTES) // 256),)]
)
def test_up_to_head_and_tail_together_nothing_is_left_out(tmp_path, chunks):
    assert written(tmp_path, *chunks) == b"".join(chunks)


@pytest.mark.parametrize("excess", [1, 4096, 100_000])
def test_beyond_that_the_middle_is_left_out_and_counted(tmp_path, excess):
    head, middle, tail = b"h" * HEAD_BYTES, b"m" * excess, b"t" * TAIL_BYTES
    assert written(tmp_path, head, middle, tail) == head + f"\n[... {excess} bytes left out ...]\n".encode() + tail


@pytest.mark.parametrize(
    ("content", "options", "tail"),
    [
        (b"1\n2\n3\n4\n", {"lines": 2}, "3\n4"),
        (b"x" * 10_000 + b"\nend\n", {"size": 10}, "xxxxx\nend"),
        (b"1\n\n  \n2\n\n", {"lines": 2}, "1\n2"),
        (b"\x1b[31mred\xff\x00\n", {}, "\ufffd[31mred\ufffd\ufffd"),
        (b"\tat line 3\n 50%\r100%\n", {}, "    at line 3\n 50%\n100%"),  # a progress bar returns
    ],
    ids=["last lines", "end of a long log", "no empty lines", "unprintable", "tabs and progress bars"],
)
def test_the_tail_is_the_last_lines_as_they_can_be_shown(tmp_path, content, options, tail):
    (tmp_path / "log.txt").write_bytes(content)
    assert read_tail(tmp_path / "log.txt", **options) == tail


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
