"""Trackers are told of each trial once, whatever happens; what is wrong with one costs a search a line."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest
from factories import OUT_OF_MEMORY, make_config, make_failure, make_measurement, make_plan, make_result
from finished_searches import BEST, make_search
from search_events import Heard
from typer.testing import CliRunner

from autotune.cli.main import app
from autotune.errors import InputError, MachineError
from autotune.integrations.trackers import Tracking, answer_of, check, params_of, run_of
from autotune.output.gather import command
from autotune.planning.options import SearchOptions
from autotune.storage.run_directory import RunDirectory
from autotune.units import GIB
from autotune.value import write_value
from autotune.values.events import TrialEnded
from autotune.values.trial import Memory, Prediction, TrialStatus

PLAN = make_plan()


# A tracker's process: writes down the runs that it is told of, and answers by its name.
PROCESS = """
import sys, time
from pathlib import Path
name, told = sys.argv[1], Path(sys.argv[2])
for number, line in enumerate(sys.stdin):
    with told.open("a") as file:
        file.write(line)
    if name == "silent":
        time.sleep(60)
    if name == "dying":
        break
    print("ConnectionError: no route to host" if name == "failing" and number == 1 else "", flush=True)
"""


@pytest.fixture
def directory(tmp_path) -> RunDirectory:
    (tmp_path / "run").mkdir()
    return RunDirectory(tmp_path / "run")


@pytest.fixture
def told(tmp_path, monkeypatch):
    """Return a function that says what a tracker's process was told: the names of runs."""

    def command(name: str, search: Path) -> list[str]:
        return [sys.executable, "-c", PROCESS, name, str(tmp_path / name)]

    monkeypatch.setattr("autotune.integrations.trackers.command", command)

    def names(tracker: str) -> list[str]:
        file = tmp_path / tracker
        return [json.loads(line)["name"] for line in file.read_text().splitlines()] if file.exists() else []

    return names


def ended(number: int) -> TrialEnded:
    return TrialEnded(result=make_result(number=number), changes=())


def on_disk(directory: RunDirectory, *numbers: int) -> None:
    for number in numbers:
        folder = directory.path / "trials" / f"{number:04d}"
        folder.mkdir(parents=True)
        write_value(make_result(number=number), folder / "result.json")


def tell(directory: RunDirectory, trackers: tuple[str, ...], *numbers: int) -> Heard:
    """Run a search of these trials with these trackers."""
    heard = Heard()
    with Tracking(make_plan(report_to=trackers), directory, heard) as made:
        for number in numbers:
            made(ended(number))
    return heard


def test_each_trial_is_told_when_it_ends_and_passed_on(directory, told):
    heard = tell(directory, ("good",), 0, 1)
    assert told("good") == ["trial-0000", "trial-0001"]
    assert [event.result.request.number for event in heard] == [0, 1]


def test_a_search_that_goes_on_tells_what_was_missed_and_nothing_twice(directory, told):
    tell(directory, ("good",), 0, 1)
    on_disk(directory, 0, 1, 2)  # the search was killed before the third was told
    tell(directory, ("good",), 3)
    assert told("good") == ["trial-0000", "trial-0001", "trial-0002", "trial-0003"]


def test_a_tracker_that_fails_is_a_note_and_is_told_of_no_further_trial(directory, told):
    heard = tell(directory, ("failing",), 0, 1, 2)
    assert told("failing") == ["trial-0000", "trial-0001"]
    (note,) = heard.notes
    assert note.startswith("failing: ConnectionError: no route to host; the search goes on without it, and `autotune ")
    assert sum(isinstance(event, TrialEnded) for event in heard) == 3
    on_disk(directory, 0, 1, 2)
    tell(directory, ("failing",))
    assert told("failing")[2:] == ["trial-0001", "trial-0002"]


def test_a_tracker_that_falls_silent_is_given_up(directory, told, monkeypatch):
    monkeypatch.setattr("autotune.integrations.trackers.LIMIT_S", 0.05)
    heard = tell(directory, ("silent",), 0, 1)
    (note,) = heard.notes
    assert note.startswith("silent: no answer for 0 s; ")


def test_a_tracker_whose_process_ends_is_given_up(directory, told):
    heard = tell(directory, ("dying",), 0, 1)
    (note,) = heard.notes
    assert note.startswith("dying: its process ended; ")


def test_one_that_fails_leaves_the_others_alone(directory, told):
    tell(directory, ("failing", "good"), 0, 1, 2)
    assert told("good") == ["trial-0000", "trial-0001", "trial-0002"]


def test_a_trackers_process_is_no_rank_of_a_launcher(directory, monkeypatch):
    code = "import os; input(); print(os.environ.get('WORLD_SIZE', ''))"
    monkeypatch.setattr("autotune.integrations.trackers.command", lambda name, search: [sys.executable, "-c", code])
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert tell(directory, ("good",), 0).notes == []


def test_the_answer_is_told(directory, told, tmp_path):
    _, result = make_search(tmp_path / "finished")
    for _ in range(2):  # a finished search may be gone on with
        with Tracking(make_plan(report_to=("good",)), directory, Heard()) as made:
            made.end(result)
    assert told("good") == [answer_of(PLAN, result).name]


def test_without_trackers_nothing_is_written(directory):
    tell(directory, (), 0)
    assert list(directory.path.iterdir()) == []


# A process whose library prints, raises and quits, and writes the fourth run.
LIBRARY = """
import sys
from pathlib import Path
from accelerate import tracking
from autotune.integrations.trackers import main

class Library(tracking.GeneralTracker):
    name, requires_logging_directory, tracker = "trackio", False, None
    def __init__(self, run_name, name, group):
        print("a word of thanks")
        if name == "trial-0000":
            raise ConnectionError("no route\\nto host")
        if name == "trial-0001":
            sys.exit("log in first")
        self.written = {"project": run_name, "name": name, "group": group}
    def store_init_configuration(self, values):
        self.written |= values
    def log(self, values, step):
        self.written |= values | {"step": step}
    def finish(self):
        Path(sys.argv[1], "written").write_text(repr(self.written))

tracking.LOGGER_TYPE_TO_CLASS["trackio"] = Library
main("trackio", Path(sys.argv[1]))
"""


def test_a_process_answers_each_run_whatever_its_library_does(tmp_path):
    runs = "".join(run_of(PLAN, make_result(number=n)).model_dump_json() + "\n" for n in range(3))
    done = subprocess.run(
        [sys.executable, "-c", LIBRARY, str(tmp_path)], input=runs, capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines() == ["ConnectionError: no route to host", "SystemExit: log in first", ""]
    written = ast.literal_eval((tmp_path / "written").read_text())
    assert (written["project"], written["name"], written["group"]) == ("autotune", "trial-0002", tmp_path.name)
    assert (written["search"], written["step"], written["status"]) == (tmp_path.name, 2, "completed")
    assert written["samples_per_second"] == 10.0


def test_an_unknown_tracker_is_bad_input():
    with pytest.raises(
        InputError, match=r"--report-to tensorbord: expected aim, .*, tensorboard, trackio, wandb.*did you mean"
    ):
        check(("tensorbord",))


def test_a_missing_library_is_said_before_the_search(monkeypatch):
    monkeypatch.setattr("autotune.integrations.trackers.importlib.util.find_spec", lambda name: None)
    with pytest.raises(MachineError, match="the package wandb is not installed; pip install wandb"):
        check(("wandb",))


def test_a_folder_called_like_a_library_is_none(monkeypatch, tmp_path):
    (tmp_path / "wandb").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr("sys.path", [str(tmp_path)])
    with pytest.raises(MachineError, match="is not installed"):
        check(("wandb",))


def test_an_unknown_tracker_ends_the_command_with_2(tmp_path):
    run = tmp_path / "run"
    done = CliRunner().invoke(app, ["find", "--model", "gpt2", "--report-to", "nonesuch", "--run-dir", str(run)])
    assert done.exit_code == 2
    assert "--report-to nonesuch: expected aim, clearml, comet_ml" in done.output
    assert not run.exists()


def test_the_command_of_a_search_names_its_trackers():
    options = SearchOptions(model="gpt2", report_to=("wandb", "mlflow"))
    assert command(options) == "autotune find --model gpt2 --report-to wandb,mlflow"


def test_a_completed_trial():
    prediction = Prediction(samples_per_second=12.0, peak_bytes=2 * GIB)
    run = run_of(PLAN, make_result(make_config(16), 10.0, number=7, prediction=prediction))
    assert (run.name, run.step) == ("trial-0007", 7)
    assert run.config["per_device_train_batch_size"] == 16
    assert run.metrics["samples_per_second"] == 10.0
    assert run.metrics["peak_memory_gib"] == 1.0
    assert run.metrics["predicted_samples_per_second"] == 12.0
    assert run.metrics["predicted_peak_memory_gib"] == 2.0
    assert run.config["status"] == "completed"
    assert run.config["changes"] == "micro-batch 16"


def test_a_trial_that_failed_says_why():
    failure = make_failure(TrialStatus.OUT_OF_MEMORY, "x" * 5000, memory=Memory(resident_bytes=GIB))
    run = run_of(PLAN, make_result(outcome=failure))
    assert run.config["status"] == "out of memory"
    assert len(run.config["cause"]) == 500
    assert run.metrics["peak_memory_gib"] == 1.0
    assert "samples_per_second" not in run.metrics
    assert "peak_memory_gib" not in run_of(PLAN, make_result(outcome=OUT_OF_MEMORY)).metrics


def test_what_cant_be_told_is_left_out():
    own_loop = make_measurement(data_wait_share=None, loss=None)
    metrics = run_of(PLAN, make_result(outcome=own_loop)).metrics
    assert not {"data_wait_share", "loss", "tokens_per_second"} & set(metrics)


@pytest.mark.parametrize(
    ("config", "shown"),
    [
        (make_config(), {"adapter": "none", "torch_compile_backend": "none", "tf32": False}),
        (make_config(adapter={"rank": 8}), {"adapter": "lora", "adapter.rank": 8}),
        (make_config(parallelism={"world_size": 2}), {"parallelism.world_size": 2}),
    ],
)
def test_a_configuration_is_plain_parameters(config, shown):
    params = params_of(config)
    assert {name: params[name] for name in shown} == shown
    assert any(name.startswith("parallelism") for name in params) == (not config.parallelism.is_single)


def test_the_answer(tmp_path):
    _, result = make_search(tmp_path / "run")
    run = answer_of(PLAN, result)
    assert run.name == f"answer-{sum(trial.number is not None for trial in result.trials):04d}"
    assert params_of(BEST).items() <= run.config.items()
    assert run.metrics["speedup"] == result.speedup.ratio
    assert run.metrics["baseline_samples_per_second"] == pytest.approx(10.0)
    assert run.config["status"] == "faster"


def test_a_run_says_what_its_search_is_about():
    config = run_of(PLAN, make_result()).config
    assert (config["model"], config["memory_budget_gib"]) == ("tiny", 8.0)
    assert not {"model", "device", "effort", "search", "status"} & set(params_of(make_config()))
