"""`autotune dashboard`: who may reach it, why it can't be started, the real one on a real search, and its studies."""

import json
import os
import select
import signal
import socket
import subprocess
import sys
import urllib.request

import optuna
import pytest
from factories import OUT_OF_MEMORY, Clock, make_config, make_measurement, make_plan, make_result, make_space_file
from finished_searches import make_search, without_memory
from optuna.distributions import CategoricalDistribution, IntDistribution
from optuna.trial import TrialState
from typer.testing import CliRunner

from autotune.cli.main import app
from autotune.integrations.dashboard import Following, ShownStudy, is_loopback
from autotune.units import GIB
from autotune.values.trial import Memory, Prediction, Purpose


@pytest.mark.parametrize(
    ("host", "expected"),
    [("127.0.0.1", True), ("127.9.9.9", True), ("::1", True), ("localhost", True), ("0.0.0.0", False),
     ("10.0.0.5", False), ("::", False), ("node7", False)],
)  # fmt: skip
def test_which_addresses_are_this_machines_own(host, expected):
    assert is_loopback(host) is expected


def test_a_directory_without_a_search_is_refused(tmp_path):
    done = CliRunner().invoke(app, ["dashboard", str(tmp_path)])
    assert done.exit_code == 2
    assert f"autotune: {tmp_path}: holds no search" in done.stderr


def test_a_missing_package_is_said_in_one_line(tmp_path, monkeypatch):
    make_search(tmp_path / "run", without_memory)
    monkeypatch.setitem(sys.modules, "optuna_dashboard", None)
    done = CliRunner().invoke(app, ["dashboard", str(tmp_path / "run")])
    assert done.exit_code == 3
    assert done.stderr == (
        "autotune: dashboard: needs the package optuna-dashboard: pip install 'autotune-train[dashboard]'\n"
    )


class Directory:
    """A run directory with as many results as a test says."""

    def __init__(self) -> None:
        self.found = []
        self.looks = 0

    def results(self):
        self.looks += 1
        return self.found


def test_a_search_is_looked_at_when_the_page_asks_and_not_too_often():
    clock, directory, seen = Clock(), Directory(), []
    shown = type("Shown", (), {"add": staticmethod(lambda results: seen.append(len(results)))})
    page = Following(lambda environ, start_response: [b"page"], shown, directory, clock)
    assert directory.looks == 0
    assert page({}, None) == [b"page"]
    directory.found = [make_result()]
    page({}, None)
    assert seen == [0]
    clock.now_s = 60.0
    page({}, None)
    assert seen == [0, 1]


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
    started = []

    def serve(*arguments: str) -> Served:
        started.append(Served(str(tmp_path / "run"), *arguments))
        return started[-1]

    yield serve
    for each in started:
        each.process.kill()
        each.process.communicate()


def contents(directory) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


@pytest.mark.slow
def test_the_dashboard_shows_a_search_and_changes_nothing_of_it(served, tmp_path):
    before = contents(tmp_path / "run")
    dashboard = served()
    studies = dashboard.get("api/studies")["study_summaries"]
    assert [s["study_name"] for s in studies] == ["tiny", "tiny: speed and memory"]
    detail = dashboard.get(f"api/studies/{studies[0]['study_id']}")
    assert detail["objective_names"] == ["samples/s"]
    assert {a["key"]: a["value"] for a in detail["user_attrs"]}["device"] == "a CPU"
    assert {p["name"] for p in detail["union_search_space"]} == {"precision", "optim", "per_device_train_batch_size"}
    states = {t["state"] for t in detail["trials"]}
    assert states == {"Complete", "Pruned"}
    best = max((t for t in detail["trials"] if t["state"] == "Complete"), key=lambda t: t["values"][0])
    attributes = {a["key"]: a["value"] for a in best["user_attrs"]}
    assert {p["name"]: p["param_external_value"] for p in best["params"]}["precision"] == "bf16"
    assert "micro-batch 16, bf16" in attributes["configuration"]
    importances = dashboard.get(f"api/studies/{studies[0]['study_id']}/param_importances")
    assert importances["param_importances"]
    dashboard.process.send_signal(signal.SIGINT)
    assert dashboard.process.wait(timeout=20) == 0
    assert contents(tmp_path / "run") == before


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
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = autotune("dashboard", "run", "--port", port)
    assert done.returncode == 2
    assert done.stderr == f"autotune: --port {port}: is in use; name another, or 0 for any that is free\n"


PLAN = make_plan(
    space=make_space_file(
        {
            "precision": ["fp32", "bf16"],
            "per_device_train_batch_size": {"choices": "lattice"},
            "torch_compile_backend": [None, "inductor"],
            "adapter": [None, "lora"],
            "adapter.rank": {"choices": [8, 64], "when": {"adapter": ["lora"]}},
        }
    )
)


@pytest.fixture
def shown() -> ShownStudy:
    return ShownStudy(PLAN, words=lambda c: f"a batch of {c.optim}")


def studies(shown: ShownStudy) -> list[optuna.Study]:
    names = optuna.get_all_study_names(shown.storage)
    return [optuna.load_study(study_name=name, storage=shown.storage) for name in names]


def test_there_is_a_study_of_speed_and_one_of_speed_and_memory(shown):
    speed, both = studies(shown)
    assert (speed.study_name, speed.metric_names) == ("tiny", ["samples/s"])
    assert (both.study_name, both.metric_names) == ("tiny: speed and memory", ["samples/s", "peak memory GiB"])
    assert [d.name for d in both.directions] == ["MAXIMIZE", "MINIMIZE"]
    assert speed.user_attrs == both.user_attrs
    assert speed.user_attrs == {
        "device": "a CPU", "memory budget GiB": 8.0, "baseline": "a batch of adamw_torch_fused"
    }  # fmt: skip


def test_a_trial_has_its_parameters_by_name_and_its_figures(shown):
    measured = make_measurement(30.0, memory=Memory(resident_bytes=3 * GIB), tokens_per_second=3840.0)
    prediction = Prediction(samples_per_second=33.0, peak_bytes=2 * GIB)
    shown.add([make_result(make_config(16, precision="bf16"), measured, number=4, prediction=prediction)])
    speed, both = studies(shown)
    (trial,) = speed.trials
    assert trial.params == {
        "precision": "bf16",
        "per_device_train_batch_size": 16,
        "torch_compile_backend": None,
        "adapter": None,
    }
    assert trial.value == pytest.approx(30.0)
    assert trial.user_attrs == {
        "trial": 4,
        "purpose": "search",
        "status": "completed",
        "configuration": "a batch of adamw_torch_fused",
        "peak memory GiB": 3.0,
        "tokens/s": 3840.0,
        "predicted samples/s": 33.0,
        "predicted peak GiB": 2.0,
        "seconds": 10.0,
    }
    assert both.trials[0].values == pytest.approx([30.0, 3.0])


def test_numbers_are_drawn_on_a_scale_and_words_as_categories(shown):
    shown.add([make_result(PLAN.search_space().config({"adapter": "lora", "adapter.rank": 64}))])
    (trial,) = studies(shown)[0].trials
    assert trial.distributions["per_device_train_batch_size"] == IntDistribution(1, 16, log=True)
    assert trial.distributions["adapter.rank"] == IntDistribution(8, 64, log=True)
    assert trial.distributions["precision"] == CategoricalDistribution(["fp32", "bf16"])


def test_a_trial_that_ran_out_of_memory_says_why(shown):
    shown.add([make_result(make_config(16), OUT_OF_MEMORY)])
    speed, both = (study.trials[0] for study in studies(shown))
    assert (speed.state, both.state) == (TrialState.PRUNED, TrialState.FAIL)
    assert speed.user_attrs["status"] == "out of memory"
    assert speed.user_attrs["cause"] == "no memory left"


def test_finals_are_shown_and_checks_are_not(shown):
    purposes = (Purpose.BASELINE, Purpose.FINAL, Purpose.SOAK, Purpose.LOSS_CHECK)
    shown.add([make_result(purpose=purpose, number=number) for number, purpose in enumerate(purposes)])
    assert [t.user_attrs["purpose"] for t in studies(shown)[0].trials] == ["baseline", "final"]


def test_trials_are_added_once(shown):
    first, second = make_result(number=0), make_result(make_config(4), 12.0, number=1)
    shown.add([first])
    shown.add([first, second])
    assert [t.user_attrs["trial"] for t in studies(shown)[0].trials] == [0, 1]


def test_a_trial_has_the_time_at_which_it_ran(shown):
    shown.add([make_result().model_copy(update={"began": 1_790_000_000.0})])
    (trial,) = studies(shown)[0].trials
    assert trial.datetime_start.timestamp() == 1_790_000_000.0
    assert trial.duration.total_seconds() == pytest.approx(10.0)
