"""What a trial that ran out of memory is told to have asked for: one line, whatever the library wrote."""

from __future__ import annotations

import pytest

from autotune.execution.checking import CheckError
from autotune.execution.shortage import first_line, shortage

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
