"""The memory budget is enforced for real, and the peak is read."""

from __future__ import annotations

import json
import resource

import pytest

from autotune.execution.guard import CpuGuard

MIB = 1 << 20


@pytest.fixture(scope="module")
def seen(bench) -> dict:
    """What a real process saw that takes memory under a budget of 300 MiB; see `misbehaving.use_memory`."""
    result = bench.misbehave("use_memory", memory_bytes=300 * MIB)
    return json.loads((bench.directory(result) / "seen.json").read_text())


def test_the_budget_is_enforced_until_it_is_relaxed(seen):
    assert 100 * MIB <= seen["peak_within"] < 110 * MIB
    assert seen["recognised"]
    assert seen["over"] == ["needed 304 MiB, more than the budget of 300 MiB"] * 2, "the limit had room for it"
    assert seen["peak_anew"] < 10 * MIB, "an attempt that was given up can be forgotten"
    assert seen["peak_relaxed"] < 100 * MIB


def test_an_environment_of_the_users_own_is_not_relaxed(monkeypatch):
    """Who sets malloc's threshold has it in training too."""
    monkeypatch.setenv("MALLOC_MMAP_THRESHOLD_", str(4 * MIB))
    with CpuGuard(1 << 50) as guard:
        guard.relax()
        limit = resource.getrlimit(resource.RLIMIT_DATA)[0]
    assert limit >= 1 << 50


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
