"""`autotune dashboard`: who may reach it, why it can't be started, and the real one on a real search."""

import json
import os
import select
import signal
import socket
import subprocess
import sys
import urllib.request

import pytest
from finished_searches import make_search, without_memory
from typer.testing import CliRunner

from autotune.cli.main import app
from autotune.integrations.dashboard import Guard, is_loopback
from autotune.storage.run_directory import RunDirectory, read_plan
from autotune.storage.writer import RecordWriter
from autotune.values.problem import ignore


@pytest.mark.parametrize(
    ("host", "expected"),
    [("127.0.0.1", True), ("127.9.9.9", True), ("::1", True), ("localhost", True), ("0.0.0.0", False),
     ("10.0.0.5", False), ("::", False), ("node7", False)],
)  # fmt: skip
def test_which_addresses_are_this_machines_own(host, expected):
    assert is_loopback(host) is expected


def test_a_missing_package_is_said_in_one_line(tmp_path, monkeypatch):
    make_search(tmp_path / "run", without_memory)
    (tmp_path / "run" / "study.journal").touch()
    monkeypatch.setitem(sys.modules, "optuna_dashboard", None)
    done = CliRunner().invoke(app, ["dashboard", str(tmp_path / "run")])
    assert done.exit_code == 3
    assert done.stderr == (
        "autotune: dashboard: needs the package optuna-dashboard: pip install 'autotune-train[dashboard]'\n"
    )


class Served:
    """`autotune dashboard` in a process of its own, on any port that is free."""

    def __init__(self, *arguments: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "autotune", "dashboard", *arguments, "--port", "0", "--json"],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONUNBUFFERED": "1"},
        )
        ready, _, _ = select.select([self.process.stdout], [], [], 60)
        assert ready, "it said nothing"
        said = [self.process.stdout.readline() for _ in range(4)]
        self.url = json.loads("".join(said))["url"]

    def get(self, path: str) -> dict:
        with urllib.request.urlopen(self.url + path, timeout=20) as answer:
            return json.load(answer)


@pytest.fixture
def served(tmp_path):
    """Return a function that serves a finished search; the server is ended after the test."""
    pytest.importorskip("optuna_dashboard")
    make_search(tmp_path / "run", without_memory)
    RecordWriter(None, read_plan(tmp_path / "run"), RunDirectory(tmp_path / "run"), ignore)
    started: list[Served] = []

    def serve(*arguments: str) -> Served:
        started.append(Served(str(tmp_path / "run"), *arguments))
        return started[-1]

    yield serve
    for each in started:
        each.process.kill()
        each.process.communicate()


@pytest.mark.slow
def test_the_dashboard_shows_the_study_of_a_search(served):
    dashboard = served()
    (study,) = dashboard.get("api/studies")["study_summaries"]
    assert study["study_name"].startswith("tiny ")
    detail = dashboard.get(f"api/studies/{study['study_id']}")
    assert {p["name"] for p in detail["union_search_space"]} == {"precision", "optim", "per_device_train_batch_size"}
    assert {t["state"] for t in detail["trials"]} == {"Complete", "Pruned"}
    best = max((t for t in detail["trials"] if t["state"] == "Complete"), key=lambda t: t["values"][0])
    assert {p["name"]: p["param_external_value"] for p in best["params"]}["precision"] == "bf16"
    assert dashboard.get(f"api/studies/{study['study_id']}/param_importances")["param_importances"]
    dashboard.process.send_signal(signal.SIGINT)
    assert dashboard.process.wait(timeout=20) == 0


def answered(listening: str, **headers: str) -> str:
    """The status that a dashboard, which listens there, gives to a request."""
    said = []
    guard = Guard(lambda environ, start_response: [start_response("200 OK", []) or b""], listening)
    guard({f"HTTP_{name.upper()}": value for name, value in headers.items()}, lambda status, _: said.append(status))
    return said[0][:3]


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "::1"])
@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"host": "127.0.0.1:8080"}, "200"),
        ({"host": "localhost:8080", "origin": "http://localhost:8080", "sec_fetch_site": "same-origin"}, "200"),
        ({"host": "[::1]:8080"}, "200"),
        ({"host": "evil.example:8080"}, "403"),
        ({"host": "10.0.0.5:8080"}, "403"),
        ({}, "403"),
        ({"host": "localhost:8080", "origin": "http://evil.example"}, "403"),
        ({"host": "localhost:8080", "origin": "null"}, "403"),
        ({"host": "localhost:8080", "sec_fetch_site": "cross-site"}, "403"),
    ],
)
def test_pages_from_elsewhere_and_other_names_are_refused(host, headers, status):
    assert answered(host, **headers) == status


@pytest.mark.parametrize(
    ("asked", "status"), [("10.0.0.5:8080", "200"), (f"{socket.gethostname()}:8080", "200"), ("evil.example", "403")]
)
def test_where_all_addresses_are_listened_at_an_address_or_the_machine_is_named(asked, status):
    assert answered("0.0.0.0", host=asked) == status


def test_a_search_without_a_study_is_told_what_makes_it(tmp_path):
    make_search(tmp_path / "run", without_memory)
    done = CliRunner().invoke(app, ["dashboard", str(tmp_path / "run")])
    assert done.exit_code == 2
    assert "`autotune resume" in done.stderr


@pytest.mark.slow
def test_another_address_is_warned_of(served):
    dashboard = served("--host", "0.0.0.0")
    dashboard.process.send_signal(signal.SIGINT)
    _, said = dashboard.process.communicate(timeout=20)
    assert said == "warning: --host 0.0.0.0: whoever reaches it sees this search; no password is asked for\n"


@pytest.mark.slow
def test_a_port_that_is_taken_is_said_in_one_line(autotune, tmp_path):
    pytest.importorskip("optuna_dashboard")
    make_search(tmp_path / "run", without_memory)
    (tmp_path / "run" / "study.journal").touch()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = autotune("dashboard", "run", "--port", port)
    assert done.returncode == 2
    assert done.stderr == f"autotune: --port {port}: is in use; name another, or 0 for any that is free\n"
