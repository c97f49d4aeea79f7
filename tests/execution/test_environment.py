"""What the processes of trials see of the machine."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from autotune.execution.environment import ENVIRONMENT, cold_compile_cache, launcher_environment, trial_device


@pytest.mark.parametrize(
    ("device", "visible", "expected"),
    [
        ("cpu", None, ""),
        ("cpu", "0,1", ""),
        ("cuda", None, "0"),
        ("cuda:0", None, "0"),
        ("cuda:3", None, "3"),
        ("cuda:1", "4,6", "6"),
        ("cuda:1", " 4 , 6 ", "6"),
        ("cuda:0", "GPU-8932f937,GPU-1f22a253", "GPU-8932f937"),
        ("cuda:0", "MIG-5f0c4a", "MIG-5f0c4a"),
    ],
)
def test_a_trial_sees_the_device_of_the_search_alone(device, visible, expected):
    present = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    assert launcher_environment(device, {}, present)["CUDA_VISIBLE_DEVICES"] == expected


@pytest.mark.parametrize(("device", "inside"), [("cpu", "cpu"), ("cuda", "cuda:0"), ("cuda:3", "cuda:0")])
def test_the_only_device_is_the_first(device, inside):
    assert trial_device(device) == inside


def test_the_libraries_are_told_how_to_behave():
    made = launcher_environment("cpu", {}, {})
    assert ENVIRONMENT.items() <= made.items()


def test_malloc_maps_small_blocks_only_where_the_hosts_memory_is_measured():
    """A GPU's trial collates its batches as the user's training does."""
    assert "MALLOC_MMAP_THRESHOLD_" in launcher_environment("cpu", {}, {})
    assert "MALLOC_MMAP_THRESHOLD_" not in launcher_environment("cuda:0", {}, {})
    assert launcher_environment("cuda:0", {}, {"MALLOC_MMAP_THRESHOLD_": "1"})["MALLOC_MMAP_THRESHOLD_"] == "1"


def test_what_the_user_has_set_stays():
    made = launcher_environment("cpu", {}, {"TRANSFORMERS_VERBOSITY": "info", "HF_HOME": "/models"})
    assert (made["TRANSFORMERS_VERBOSITY"], made["HF_HOME"]) == ("info", "/models")


def test_the_password_of_the_record_is_not_handed_on():
    made = launcher_environment("cpu", {}, {"AUTOTUNE_RECORD": "postgresql://ann:secret@db/team", "HOME": "/home/ann"})
    assert "secret" not in str(made)
    assert made["HOME"] == "/home/ann"


def test_the_mark_is_handed_on():
    assert launcher_environment("cpu", {"MARK": "1"}, {})["MARK"] == "1"


def test_modules_are_searched_where_the_parent_searches(monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "path", ["", str(tmp_path)])
    path = launcher_environment("cpu", {}, {"PYTHONPATH": "/elsewhere"})["PYTHONPATH"]
    assert path.split(os.pathsep) == [str(Path.cwd()), str(tmp_path)]


def test_a_cold_compile_finds_nothing_and_leaves_nothing(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "/the/users/own")
    monkeypatch.delenv("TRITON_CACHE_DIR", raising=False)
    with cold_compile_cache(tmp_path):
        cache = Path(os.environ["TORCHINDUCTOR_CACHE_DIR"])
        assert not cache.exists()
        Path(os.environ["TRITON_CACHE_DIR"]).mkdir(parents=True)
        assert cache.parent == tmp_path
    assert not cache.exists()
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == "/the/users/own"
    assert "TRITON_CACHE_DIR" not in os.environ
