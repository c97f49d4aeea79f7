"""The launcher by its protocol: how it starts and ends, and what it hands on to a child."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest
import torch
from benches import Asked

from autotune.execution.guard import CpuGuard
from autotune.execution.launch import _failure
from autotune.values.trial import TrialStatus


@pytest.fixture
def made(tmp_path, light_launchers) -> Iterator[Asked]:
    asked = Asked(tmp_path, "cuda:3", "cuda:1")
    yield asked
    asked.launcher.end()


def test_it_ends_when_its_parent_closes_the_connection(made):
    made.launcher._connection.close()
    assert made.launcher._process.wait(timeout=60) == 0


def test_a_child_sees_only_the_devices_of_its_job(made):
    _, directory = made.run("misbehaving:tell_the_environment", visible="1")
    assert "CUDA_VISIBLE_DEVICES='1'" in (directory / "log.txt").read_text()


def test_a_child_cannot_reach_the_connection(made):
    """A grandchild that outlives a killed launcher would otherwise keep the parent waiting."""
    _, directory = made.run("misbehaving:tell_its_open_files")
    log = (directory / "log.txt").read_text()
    assert "pipe" in log
    assert "socket" not in log


@pytest.fixture(scope="module")
def hindered(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Asked]:
    """A launcher as a search starts it, for a CUDA device that can't be used, and without bitsandbytes."""
    startup = tmp_path_factory.mktemp("startup")
    (startup / "sitecustomize.py").write_text("import sys; sys.modules['bitsandbytes'] = None  # not installed")
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(sys, "path", [str(startup), *sys.path])
        patched.setenv("CUDA_VISIBLE_DEVICES", "-1")
        asked = Asked(tmp_path_factory.mktemp("jobs"), "cuda:0")
    yield asked
    asked.launcher.end()


def test_a_missing_library_that_only_some_trials_need_stops_none_of_the_others(hindered):
    assert hindered.run("misbehaving:print_and_end")[0].returncodes == [0]


def test_where_a_forked_child_cannot_use_the_device_every_trial_is_a_fresh_interpreter(hindered):
    assert hindered.launcher.forkable is False
    _, directory = hindered.run("misbehaving:tell_what_is_imported")
    assert (directory / "log.txt").read_text().strip() == "torch was imported before: False"


@pytest.mark.parametrize(
    ("sticking", "status"),
    [
        ("CUDA error: an illegal memory access was encountered", TrialStatus.CRASHED),
        ("CUDA error: out of memory", TrialStatus.OUT_OF_MEMORY),
        (None, TrialStatus.OUT_OF_MEMORY),
    ],
    ids=str,
)
def test_a_handle_that_cannot_be_made_after_an_error_of_the_device_is_no_lack_of_memory(monkeypatch, sticking, status):
    def synchronize() -> None:
        if sticking is not None:
            raise RuntimeError(sticking)

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
    error = RuntimeError("CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`")
    failure = _failure(error, CpuGuard(1 << 30), 1 << 30)
    assert failure.status is status
    assert ("illegal" in failure.cause) is (status is TrialStatus.CRASHED)
