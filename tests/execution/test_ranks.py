"""What a rank is told and tells; meeting and agreeing happen for real in `test_rank_trials`."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from autotune.execution.environment import launcher_environment, trial_device, visible
from autotune.execution.ranks import FOREIGN, Rank, agree, own_rank, rank_environment, threads_of_rank, wait_for_all


@pytest.fixture(autouse=True)
def no_rank(monkeypatch):
    for name in (*FOREIGN, "OMP_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)


def test_a_plain_process_is_alone_and_decides_alone():
    assert own_rank() == Rank(0, 1, is_launched=False)
    assert own_rank().is_first
    assert (agree(True), agree(False)) == (True, False)
    wait_for_all()  # nobody


def test_a_rank_knows_itself_by_its_environment(monkeypatch):
    for name, value in rank_environment(2, 4, 29500).items():
        monkeypatch.setenv(name, value)
    assert own_rank() == Rank(2, 4, is_launched=True)
    assert not own_rank().is_first


def test_the_environment_is_that_of_torchrun():
    """All that torch 2.13's agent sets for a worker, but for what is about its own restarts and its store."""
    torch = Path(importlib.util.find_spec("torch").origin).parent
    source = (torch / "distributed/elastic/agent/server/local_elastic_agent.py").read_text()
    made = rank_environment(1, 2, 29500)
    names = [name for kind in ("", "LOCAL_", "GROUP_", "ROLE_") for name in (f"{kind}RANK", f"{kind}WORLD_SIZE")]
    assert [name for name in names if f'"{name}"' not in source] == []
    assert [name for name in names if name not in made] == []
    assert (made["MASTER_ADDR"], made["MASTER_PORT"], made["LOCAL_RANK"]) == ("127.0.0.1", "29500", "1")


@pytest.mark.parametrize(
    ("cores", "ranks", "asked", "threads"),
    [(8, 2, None, 4), (2, 2, None, 1), (2, 4, None, 1), (7, 2, None, 3), (8, 2, "1", 1), (8, 2, "6", 4), (8, 2, "", 4)],
)
def test_ranks_share_the_cores(cores, ranks, asked, threads):
    assert threads_of_rank(cores, ranks, {} if asked is None else {"OMP_NUM_THREADS": asked}) == threads


def test_what_another_launcher_has_set_does_not_reach_a_trial():
    made = launcher_environment("cpu", {}, {"RANK": "3", "WORLD_SIZE": "4", "MASTER_PORT": "1", "HOME": "/home"})
    assert not set(made) & set(FOREIGN)
    assert made["HOME"] == "/home"


def test_each_rank_has_its_device_of_those_that_the_trial_sees(monkeypatch):
    made = launcher_environment("cuda:2", {}, {"CUDA_VISIBLE_DEVICES": "3,4,5,6"}, others=("cuda:0", "cuda:3"))
    assert made["CUDA_VISIBLE_DEVICES"] == "5,3,6"
    assert visible(("cuda:2", "cuda:0"), {"CUDA_VISIBLE_DEVICES": "3,4,5,6"}) == "5,3"
    for rank in (0, 1):
        for name, value in rank_environment(rank, 2, 1234).items():
            monkeypatch.setenv(name, value)
        assert trial_device("cuda:2") == f"cuda:{rank}"
        assert trial_device("cpu") == "cpu"
