"""A Ray cluster whose two nodes have addresses of their own, and a line between them that can be cut: needs root."""

import contextlib
import os
import secrets
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from ray_makers import is_of_a_trial
from running import process

import autotune
from autotune.execution.environment import interface_to
from autotune.values.trial import TrialStatus

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

OWN = os.getpid() % 250  # of each process that runs tests
SPACE, LINE, FAR_END = f"autotune-{OWN}", f"autotune-{OWN}-0", f"autotune-{OWN}-1"
HERE, THERE = f"10.77.{OWN}.1", f"10.77.{OWN}.2"


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


@pytest.fixture
def line() -> Iterator[None]:
    """A network namespace, another machine as far as addresses go, at the other end of a line."""
    if os.getuid() or shutil.which("ip") is None:
        pytest.skip("needs root, and the command ip")
    try:
        ip("netns", "add", SPACE)
        ip("link", "add", LINE, "type", "veth", "peer", "name", FAR_END, "netns", SPACE)
    except subprocess.CalledProcessError as error:
        subprocess.run(["ip", "netns", "del", SPACE], capture_output=True)
        pytest.skip(f"needs network namespaces: {error.stderr!r}")
    try:
        ip("addr", "add", f"{HERE}/24", "dev", LINE)
        ip("-n", SPACE, "addr", "add", f"{THERE}/24", "dev", FAR_END)
        for words in (["link", "set", LINE], ["-n", SPACE, "link", "set", FAR_END], ["-n", SPACE, "link", "set", "lo"]):
            ip(*words, "up")
        yield
    finally:
        ip("link", "del", LINE)
        ip("netns", "del", SPACE)


@pytest.fixture
def cluster(line, tmp_path) -> Iterator[tuple[str, dict[str, str]]]:
    """Address and environment of a cluster of two nodes, one at each end."""
    pytest.importorskip("ray")
    with socket.create_server((HERE, 0)) as free:
        address = f"{HERE}:{free.getsockname()[1]}"
    token = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32), "RAY_USAGE_STATS_ENABLED": "0"}
    start = [str(Path(sys.executable).with_name("ray")), "start", "--block", "--num-cpus", "1"]
    port = address.rpartition(":")[2]
    head = [*start, "--head", "--node-ip-address", HERE, "--port", port, "--include-dashboard", "false"]
    node = ["ip", "netns", "exec", SPACE, *start, "--address", address, "--node-ip-address", THERE]
    environment = process(**token)["env"]
    with contextlib.ExitStack() as stack, (tmp_path / "ray.txt").open("w") as log:
        for command in (head, node):
            running = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
            stack.callback(running.wait)
            stack.callback(running.terminate)  # and all that it has started
            while "Ray runtime started" not in (tmp_path / "ray.txt").read_text().rpartition("Local node IP")[2]:
                assert running.poll() is None, (tmp_path / "ray.txt").read_text()
                time.sleep(0.1)
        yield address, token


def test_gloo_takes_the_network_that_leads_to_the_other_machine(line):
    assert interface_to(THERE) == interface_to(HERE) == LINE
    assert interface_to("127.0.0.1") == "lo"


def test_a_search_outlives_a_line_between_its_nodes_that_is_cut_for_20_seconds(cluster, tiny_llama, tmp_path):
    address, token = cluster
    options = ["--device", "cpu", "--devices", 2, "--nodes", 2, "--address", address, "--effort", "quick"]
    command = ("-m", "autotune", "find", "--model", tiny_llama, *options, "--max-trials", 2, "--run-dir", "run")
    with (tmp_path / "log.txt").open("w") as log:
        search = subprocess.Popen(**process(*command, cwd=tmp_path, **token), stdout=log, stderr=log)
        while not any(map(is_of_a_trial, psutil.process_iter())):
            assert search.poll() is None, (tmp_path / "log.txt").read_text()
            time.sleep(0.1)
        ip("link", "set", LINE, "down")
        time.sleep(20.0)
        ip("link", "set", LINE, "up")
        assert search.wait() == 0, (tmp_path / "log.txt").read_text()
    result = autotune.load(tmp_path / "run" / "best-config.json")
    assert result.best.measurement.effects["parallelism"].startswith("DDP over 2")
    assert {trial.status for trial in result.trials if trial.number is not None} == {TrialStatus.COMPLETED}
    assert not any(map(is_of_a_trial, psutil.process_iter()))
