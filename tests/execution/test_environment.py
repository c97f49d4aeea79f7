"""The environment of the processes of trials, and the files that libraries share or leave."""

import _ctypes
import importlib
import importlib.util
import mmap
import os
import sys
import time
from pathlib import Path

import pytest
from factories import make_config, make_request

from autotune.execution import environment
from autotune.values.config import Parallelism
from autotune.values.trial import Rendezvous


@pytest.mark.parametrize(
    ("device", "there", "expected"),
    [
        ("cpu", None, ""), ("cpu", "0,1", ""), ("cuda", None, "0"), ("cuda:0", None, "0"), ("cuda:3", None, "3"),
        ("cuda:1", "4,6", "6"), ("cuda:1", " 4 , 6 ", "6"), ("cuda:0", "GPU-8932f937,GPU-1f22a253", "GPU-8932f937"),
        ("cuda:0", "MIG-5f0c4a", "MIG-5f0c4a"),
    ],
)  # fmt: skip
def test_a_trial_sees_the_device_of_the_search_alone(device, there, expected):
    present = {} if there is None else {"CUDA_VISIBLE_DEVICES": there}
    assert environment.launcher_environment(device, {}, present)["CUDA_VISIBLE_DEVICES"] == expected


def test_libraries_have_settings_of_ours_and_the_users_and_none_of_another_launcher(monkeypatch, tmp_path):
    usual = environment.launcher_environment("cpu", {}, {})
    assert environment.ENVIRONMENT.items() <= usual.items()
    assert "TOKENIZERS_PARALLELISM" not in usual  # a collator tokenizes with as many threads as in the real training
    own = {"TRANSFORMERS_VERBOSITY": "info", "HF_HOME": "/models", "TOKENIZERS_PARALLELISM": "false"}
    foreign = {"RANK": "3", "WORLD_SIZE": "4", "MASTER_PORT": "1", "PYTHONPATH": "/elsewhere"}
    monkeypatch.setattr(sys, "path", ["", str(tmp_path)])
    made = environment.launcher_environment("cpu", {}, {**own, **foreign})
    assert own.items() <= made.items()
    assert not set(made) & set(environment.FOREIGN)
    assert made["PYTHONPATH"].split(os.pathsep) == [str(Path.cwd()), str(tmp_path)]  # where the parent searches


@pytest.mark.parametrize(
    ("device", "spread", "operators"),
    [
        ("cpu", {}, ()),
        ("cpu", {"sharding": "fsdp_full", "offload": "parameters"}, ()),
        ("cpu", {"sharding": "zero_1"}, ("ShareMemCommBuilder",)),
        ("cpu", {"sharding": "zero_2", "offload": "optimizer"}, ("ShareMemCommBuilder", "CPUAdamBuilder")),
        ("cuda:0", {"sharding": "zero_3"}, ()),
        ("cuda:0", {"sharding": "zero_3", "offload": "parameters"}, ("CPUAdamBuilder",)),
    ],
)
def test_deepspeed_compiles_the_messages_of_a_cpu_and_the_optimizer_of_what_is_offloaded(device, spread, operators):
    config = make_config(parallelism=Parallelism(world_size=2, **spread))
    assert environment.operators_of(make_request(config, device=device)) == operators


def test_a_lock_of_torchs_builders_is_removed_unless_a_process_holds_it(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    (tmp_path / "cpu_adam").mkdir()
    with (lock := tmp_path / "cpu_adam" / "lock").open("w"):
        environment.remove_unused_locks()
        assert lock.exists()
    environment.remove_unused_locks()
    assert not lock.exists()


def test_libraries_that_a_killed_compiler_left_are_removed_and_whole_ones_stay(tmp_path, monkeypatch):
    importlib.import_module("torch")  # as in the launcher
    whole = Path(_ctypes.__file__).read_bytes()
    names = {"whole": whole, "empty": b"", "cut": whole[:-1], "begun": whole[:1000], "old": b"", "another's": b""}
    for name, content in names.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "main.so").write_bytes(content)
    now = time.time()
    os.utime(tmp_path / "old" / "main.so", (1, 1))
    os.utime(tmp_path / "another's" / "main.so", (now - 90, now - 90))  # who may be writing it
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    with (tmp_path / "begun" / "main.so").open("r+b"):  # another worker links it
        environment.forget_unfinished(since=now - 60)
        assert {path.parent.name for path in tmp_path.glob("*/*.so")} == {"whole", "another's", "begun"}
    environment.forget_unfinished(since=now - 60)
    assert {path.parent.name for path in tmp_path.glob("*/*.so")} == {"whole", "another's"}


def test_new_files_of_the_libraries_in_shared_memory_are_removed_once_nobody_uses_them(tmp_path, monkeypatch):
    (tmp_path / "torch_1_old_0").write_bytes(b"x")
    before = environment.shared_files(tmp_path)
    names = {"torch_open", "torch_mapped", "nccl-AbCdEf", "deepspeed_allreduce_buffer_0", "sem.mp-1"}
    for name in names:
        (tmp_path / name).write_bytes(b"x" * 4096)
    (tmp_path / "torch_folder").mkdir()
    stay = {"torch_1_old_0", "torch_folder", "sem.mp-1"}
    with (tmp_path / "torch_mapped").open("r+b") as file:
        mapped = mmap.mmap(file.fileno(), 4096)
    with (tmp_path / "torch_open").open("rb"), mapped, monkeypatch.context() as patched:
        patched.setattr("psutil.pids", lambda: [])  # as from another container with the host's shared memory
        environment.remove_orphans(before, tmp_path)
        assert {file.name for file in tmp_path.iterdir()} == stay | {"torch_open", "torch_mapped"}
    environment.remove_orphans(before, tmp_path)
    assert {file.name for file in tmp_path.iterdir()} == stay
    assert environment.shared_files(tmp_path / "none") == set()


MEETING = Rendezvous(address="127.0.0.1", port=29500)


@pytest.fixture
def _no_rank(monkeypatch):
    for name in (*environment.FOREIGN, "OMP_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.usefixtures("_no_rank")
def test_a_plain_process_is_alone_and_a_rank_knows_itself_by_its_environment(monkeypatch):
    assert environment.own_rank() == environment.Rank(0, 1, is_launched=False)
    assert (environment.agree(True), environment.agree(False)) == (True, False)
    environment.wait_for_all(None)  # for nobody
    machines = Rendezvous(address="10.0.0.1", port=29500, nodes=2, node_rank=1)
    for here, meeting, rank in ((4, MEETING, (2, 4, True, 2)), (2, machines, (2, 4, True, 0))):
        found = environment.rank_environment(2, here, meeting)
        for name, value in found.items():
            monkeypatch.setenv(name, value)
        assert environment.own_rank() == environment.Rank(*rank)
        assert (found["GROUP_RANK"], found["GROUP_WORLD_SIZE"]) == (str(meeting.node_rank), str(meeting.nodes))
        assert (found["MASTER_ADDR"], found["MASTER_PORT"]) == (meeting.address, "29500")


def test_gloo_takes_the_network_that_leads_to_the_other_machines_unless_the_user_names_one(monkeypatch):
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    machines = Rendezvous(address="127.0.0.1", port=29500, nodes=2, node_rank=1)
    assert environment.rank_environment(1, 1, machines)["GLOO_SOCKET_IFNAME"] == "lo"
    assert "GLOO_SOCKET_IFNAME" not in environment.rank_environment(1, 2, MEETING)
    assert environment.interface_to("no address") == ""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth7")
    assert environment.rank_environment(1, 1, machines)["GLOO_SOCKET_IFNAME"] == "eth7"


@pytest.mark.parametrize(
    ("cores", "ranks", "asked", "threads"),
    [(8, 2, None, 4), (2, 2, None, 1), (2, 4, None, 1), (7, 2, None, 3), (8, 2, "1", 1), (8, 2, "6", 4), (8, 2, "", 4)],
)
def test_ranks_share_the_cores(cores, ranks, asked, threads):
    assert environment.threads_of_rank(cores, ranks, {} if asked is None else {"OMP_NUM_THREADS": asked}) == threads


@pytest.mark.usefixtures("_no_rank")
def test_each_rank_has_its_device_of_those_that_the_trial_sees(monkeypatch):
    present = {"CUDA_VISIBLE_DEVICES": "3,4,5,6"}
    made = environment.launcher_environment("cuda:2", {}, present, others=("cuda:0", "cuda:3"))
    assert made["CUDA_VISIBLE_DEVICES"] == "5,3,6"
    for rank in (0, 1):
        for name, value in environment.rank_environment(rank, 2, MEETING).items():
            monkeypatch.setenv(name, value)
        assert environment.trial_device("cuda:2") == f"cuda:{rank}"
        assert environment.trial_device("cpu") == "cpu"
