"""The memory budget is enforced for real, and running out of it is recognised in every disguise."""

from __future__ import annotations

import json
import resource

import pytest

from autotune.execution.cuda_guard import CudaGuard
from autotune.execution.guard import CpuGuard, is_out_of_memory, is_out_of_memory_log, memory_guard

MIB = 1 << 20


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


CPU_ALLOCATOR = (
    "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to allocate "
    "8388608 bytes. Error code 12 (Cannot allocate memory)"
)


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError(CPU_ALLOCATOR),
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
        raised(ValueError("on top of it"), during=RuntimeError(CPU_ALLOCATOR)),
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


def test_each_device_has_its_guard():
    assert isinstance(memory_guard("cpu", 1), CpuGuard)
    assert isinstance(memory_guard("cuda:1", 1), CudaGuard)


@pytest.fixture(scope="module")
def seen(bench) -> dict:
    """What a real process saw that takes memory under a budget of 300 MiB; see `misbehaving.use_memory`."""
    result = bench.misbehave("use_memory", memory_bytes=300 * MIB)
    return json.loads((bench.directory(result) / "seen.json").read_text())


def test_an_allocation_within_the_budget_succeeds_and_is_the_peak(seen):
    assert 100 * MIB <= seen["peak_within"] < 110 * MIB


def test_an_allocation_beyond_the_budget_fails_as_out_of_memory(seen):
    assert seen["recognised"]


def test_a_peak_that_the_limit_had_room_for_is_out_of_memory_as_soon_as_it_is_known(seen):
    assert seen["over"] == ["needed 304 MiB, more than the budget of 300 MiB"] * 2


def test_an_attempt_that_was_given_up_can_be_forgotten(seen):
    assert seen["peak_anew"] < 10 * MIB


def test_the_peak_outlasts_the_memory(seen):
    assert seen["peak_after_freeing"] > 99 * MIB


def test_a_relaxed_guard_limits_nothing_and_keeps_the_peak_it_knew(seen):
    assert seen["peak_relaxed"] < 100 * MIB


def test_an_environment_of_the_users_own_is_not_relaxed(monkeypatch):
    """Who sets malloc's threshold has it in training too."""
    monkeypatch.setenv("MALLOC_MMAP_THRESHOLD_", str(4 * MIB))
    with CpuGuard(1 << 50) as guard:
        guard.relax()
        limit = resource.getrlimit(resource.RLIMIT_DATA)[0]
    assert limit >= 1 << 50


def test_nothing_is_limited_after_the_guard(seen):
    assert seen["allocated_after"] == 600 * MIB


def test_the_imported_libraries_do_not_count(seen, bench):
    """They take hundreds of MiB; a trial that trains next to nothing takes next to none."""
    result = bench.run()
    assert result.outcome.memory.resident_bytes < 60 * MIB


def test_a_limit_that_the_user_has_set_stays(bench):
    result = bench.misbehave("keep_the_users_limit")
    before, within, after = json.loads((bench.directory(result) / "seen.json").read_text())
    assert within[0] < before[0]
    assert within[1] == before[1]
    assert after == before
