"""The memory budget is enforced for real, and the peak is read."""

import resource

from autotune.execution.guard import CpuGuard

MIB = 1 << 20


def test_the_budget_is_enforced_until_it_is_relaxed(bench):
    seen = bench.seen(bench.misbehave("use_memory", memory_bytes=300 * MIB))
    assert 100 * MIB <= seen["peak_within"] < 110 * MIB
    assert seen["recognised"]
    assert seen["over"] == ["needed 304 MiB, more than the budget of 300 MiB"] * 2, "the limit had room for it"
    assert seen["peak_anew"] < 10 * MIB, "an attempt that was given up can be forgotten"
    assert seen["peak_relaxed"] < 100 * MIB


def test_an_environment_of_the_users_own_is_not_relaxed(monkeypatch):
    """A malloc threshold of the user is set in training, too."""
    monkeypatch.setenv("MALLOC_MMAP_THRESHOLD_", str(4 * MIB))
    with CpuGuard(1 << 50) as guard:
        guard.relax()
        limit = resource.getrlimit(resource.RLIMIT_DATA)[0]
    assert limit >= 1 << 50


def test_the_imported_libraries_do_not_count(bench):
    """They take hundreds of MiB; a trial that trains next to nothing takes next to none."""
    assert bench.measured().memory.resident_bytes < 60 * MIB


def test_a_limit_that_the_user_has_set_stays(bench):
    before, within, after = bench.seen(bench.misbehave("keep_the_users_limit"))
    assert within[0] < before[0]
    assert within[1] == before[1]
    assert after == before
