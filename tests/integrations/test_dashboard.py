"""`autotune dashboard`: who may reach it, why it can't be started, and the real one on a real search."""

import json
import select
import signal
import socket
import subprocess
import sys
import urllib.request

import pytest
from finished_searches import make_search, without_memory
from running import process

from autotune.errors import InputError, MachineError
from autotune.integrations.dashboard import Guard, application, is_loopback, server
from autotune.storage.run_directory import RunDirectory, read_plan
from autotune.storage.writer import RecordWriter
from autotune.values.problem import ignore


def test_which_addresses_are_this_machines_own():
    assert [is_loopback(host) for host in ("127.0.0.1", "127.9.9.9", "::1", "localhost")] == [True] * 4
    assert [is_loopback(host) for host in ("0.0.0.0", "10.0.0.5", "::", "node7")] == [False] * 4


def test_a_missing_package_is_said(tmp_path, monkeypatch):
    make_search(tmp_path / "run", without_memory)
    (tmp_path / "run" / "study.journal").touch()
    monkeypatch.setitem(sys.modules, "optuna_dashboard", None)
    with pytest.raises(MachineError, match=r"optuna-dashboard: pip install 'autotune-train\[dashboard\]'$"):
        application(tmp_path / "run", "localhost")


@pytest.mark.slow
def test_the_dashboard_shows_the_study_of_a_search_and_warns_of_another_address(tmp_path):
    pytest.importorskip("optuna_dashboard")
    run = tmp_path / "run"
    make_search(run, without_memory)
    RecordWriter(None, read_plan(run), RunDirectory(run), ignore)
    command = process(
        "-m", "autotune", "dashboard", run, "--host", "0.0.0.0", "--port", 0, "--json", PYTHONUNBUFFERED="1"
    )
    with subprocess.Popen(**command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as dashboard:
        try:
            ready, _, _ = select.select([dashboard.stdout], [], [], 60)
            assert ready, "it said nothing"
            url = json.loads("".join(dashboard.stdout.readline() for _ in range(4)))["url"]

            def get(path: str) -> dict:
                with urllib.request.urlopen(url + path, timeout=20) as answer:
                    return json.load(answer)

            (study,) = get("api/studies")["study_summaries"]
            assert study["study_name"].startswith("tiny ")
            detail = get(f"api/studies/{study['study_id']}")
            knobs = {p["name"] for p in detail["union_search_space"]}
            assert knobs == {"precision", "optim", "per_device_train_batch_size"}
            assert {t["state"] for t in detail["trials"]} == {"Complete", "Pruned"}
            best = max((t for t in detail["trials"] if t["state"] == "Complete"), key=lambda t: t["values"][0])
            assert {p["name"]: p["param_external_value"] for p in best["params"]}["precision"] == "bf16"
            assert get(f"api/studies/{study['study_id']}/param_importances")["param_importances"]
            dashboard.send_signal(signal.SIGINT)
            _, said = dashboard.communicate(timeout=20)
        finally:
            dashboard.kill()
    assert dashboard.returncode == 0
    assert said == "warning: --host 0.0.0.0: whoever reaches it sees this search; no password is asked for\n"


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


def test_a_host_whose_name_is_none_and_a_port_that_is_taken_are_refused():
    with pytest.raises(InputError, match="is no name of a host"):
        server("\u0130" * 70, 0, None)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(InputError, match=f"--port {port}: is in use; name another, or 0 for any that is free"):
            server("127.0.0.1", port, None)
