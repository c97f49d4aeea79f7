"""Trackers are told of each trial once, whatever happens; what is wrong with one costs a search a line."""

from __future__ import annotations

import time

import pytest
from factories import OUT_OF_MEMORY, make_config, make_failure, make_measurement, make_plan, make_result
from finished_searches import BEST, make_search
from search_events import Heard
from typer.testing import CliRunner

from autotune.cli.main import app
from autotune.errors import InputError, MachineError
from autotune.integrations.trackers import check
from autotune.integrations.tracking import Tracking, about, answer_of, entry_of, params_of
from autotune.output.gather import command
from autotune.planning.options import SearchOptions
from autotune.storage.run_directory import RunDirectory
from autotune.units import GIB
from autotune.value import write_value
from autotune.values.events import TrialEnded
from autotune.values.trial import Memory, Prediction, TrialStatus

PLAN = make_plan()


class Remembered:
    """A tracker that keeps what it is told, in a list that outlives it."""

    def __init__(self, told: list) -> None:
        self.told = told

    def open(self, search, known_as):
        self.told.append(("open", known_as))
        return "as this"

    def trial(self, entry):
        self.told.append(("trial", entry.step))

    def answer(self, entry):
        self.told.append(("answer", entry.name))

    def close(self):
        self.told.append(("close", None))


class Failing(Remembered):
    """A tracker whose server is away from the second trial on."""

    def trial(self, entry):
        super().trial(entry)
        if entry.step == 1:
            raise ConnectionError("no route to host")


class Silent(Remembered):
    """A tracker that never comes back."""

    def trial(self, entry):
        time.sleep(60)


class Quitting(Remembered):
    """A library that ends the process when it can't log in."""

    def open(self, search, known_as):
        raise SystemExit("log in first")


@pytest.fixture
def directory(tmp_path) -> RunDirectory:
    (tmp_path / "run").mkdir()
    return RunDirectory(tmp_path / "run")


def ended(number: int) -> TrialEnded:
    return TrialEnded(result=make_result(number=number), changes=())


def on_disk(directory: RunDirectory, *numbers: int) -> None:
    for number in numbers:
        folder = directory.path / "trials" / f"{number:04d}"
        folder.mkdir(parents=True)
        write_value(make_result(number=number), folder / "result.json")


def tell(directory, kind, told, *numbers, heard=None, limit_s=30.0) -> Heard:
    """Run a search of these trials with one tracker."""
    heard = Heard() if heard is None else heard
    made = Tracking(PLAN, directory, heard, {"one": lambda: kind(told)}, limits_s=(limit_s, limit_s))
    with made:
        for number in numbers:
            made(ended(number))
    return heard


def test_each_trial_is_told_when_it_ends_and_passed_on(directory):
    told: list = []
    heard = tell(directory, Remembered, told, 0, 1)
    assert told == [("open", ""), ("trial", 0), ("trial", 1), ("close", None)]
    assert [event.result.request.number for event in heard] == [0, 1]


def test_a_search_that_goes_on_tells_what_was_missed_and_nothing_twice(directory):
    tell(directory, Remembered, [], 0, 1)
    on_disk(directory, 0, 1, 2)  # the search was killed before the third was told
    told: list = []
    tell(directory, Remembered, told, 3)
    assert told == [("open", "as this"), ("trial", 2), ("trial", 3), ("close", None)]


def test_a_tracker_that_fails_is_a_note_and_is_told_of_no_further_trial(directory):
    told: list = []
    heard = tell(directory, Failing, told, 0, 1, 2)
    assert told == [("open", ""), ("trial", 0), ("trial", 1)]
    (note,) = heard.notes
    assert note.startswith("one: ConnectionError: no route to host; the search goes on without it, and `autotune ")
    assert sum(isinstance(event, TrialEnded) for event in heard) == 3
    again: list = []
    on_disk(directory, 0, 1, 2)
    tell(directory, Remembered, again)
    assert again == [("open", "as this"), ("trial", 1), ("trial", 2), ("close", None)]


def test_a_tracker_that_falls_silent_is_given_up(directory):
    heard = tell(directory, Silent, [], 0, 1, limit_s=0.05)
    (note,) = heard.notes
    assert note.startswith("one: no answer for 0 s; ")


def test_a_library_that_wants_to_end_the_process_doesnt(directory):
    heard = tell(directory, Quitting, [], 0)
    assert heard.notes[0].startswith("one: SystemExit: log in first; ")


def test_one_that_fails_leaves_the_others_alone(directory):
    good: list = []
    makers = {"bad": lambda: Failing([]), "good": lambda: Remembered(good)}
    with Tracking(PLAN, directory, Heard(), makers) as made:
        for number in range(3):
            made(ended(number))
    assert good == [("open", ""), ("trial", 0), ("trial", 1), ("trial", 2), ("close", None)]


def test_the_answer_is_told(directory, tmp_path):
    from finished_searches import make_search

    _, result = make_search(tmp_path / "finished")
    told: list = []
    for _ in range(2):  # a finished search may be gone on with
        with Tracking(PLAN, directory, Heard(), {"one": lambda: Remembered(told)}) as made:
            assert made.end(result) is result
    assert told.count(("answer", "answer")) == 1


def test_without_trackers_nothing_is_written(directory):
    with Tracking(PLAN, directory, Heard(), {}) as made:
        made(ended(0))
    assert list(directory.path.iterdir()) == []


def test_an_unknown_tracker_is_bad_input():
    with pytest.raises(InputError, match=r"--report-to tensorbord: expected tensorboard, wandb, mlflow.*did you mean"):
        check(("tensorbord",))


def test_a_missing_library_is_said_before_the_search(monkeypatch):
    monkeypatch.setattr("autotune.integrations.trackers.importlib.util.find_spec", lambda name: None)
    with pytest.raises(MachineError, match=r'wandb is not installed; pip install "autotune-train\[wandb\]"'):
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
    assert "--report-to nonesuch: expected tensorboard, wandb, mlflow" in done.output
    assert not run.exists()


def test_the_command_of_a_search_names_its_trackers():
    options = SearchOptions(model="gpt2", report_to=("wandb", "mlflow"))
    assert command(options) == "autotune find --model gpt2 --report-to wandb,mlflow"


def test_a_completed_trial():
    prediction = Prediction(samples_per_second=12.0, peak_bytes=2 * GIB)
    entry = entry_of(PLAN, make_result(make_config(16), 10.0, number=7, prediction=prediction))
    assert (entry.name, entry.step, entry.completed) == ("trial-0007", 7, True)
    assert entry.params["per_device_train_batch_size"] == 16
    assert entry.metrics["samples_per_second"] == 10.0
    assert entry.metrics["peak_memory_gib"] == 1.0
    assert entry.metrics["predicted_samples_per_second"] == 12.0
    assert entry.metrics["predicted_peak_memory_gib"] == 2.0
    assert entry.tags["status"] == "completed"
    assert entry.tags["changes"] == "micro-batch 16"


def test_a_trial_that_failed_says_why():
    failure = make_failure(TrialStatus.OUT_OF_MEMORY, "x" * 5000, memory=Memory(resident_bytes=GIB))
    entry = entry_of(PLAN, make_result(outcome=failure))
    assert not entry.completed
    assert entry.tags["status"] == "out of memory"
    assert len(entry.tags["cause"]) == 1000
    assert entry.metrics["peak_memory_gib"] == 1.0
    assert "samples_per_second" not in entry.metrics
    assert "peak_memory_gib" not in entry_of(PLAN, make_result(outcome=OUT_OF_MEMORY)).metrics


def test_what_cant_be_told_is_left_out():
    own_loop = make_measurement(data_wait_share=None, loss=None)
    metrics = entry_of(PLAN, make_result(outcome=own_loop)).metrics
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
    entry = answer_of(result)
    assert entry.name == "answer"
    assert entry.params == params_of(BEST)
    assert entry.metrics["speedup"] == result.speedup.ratio
    assert entry.metrics["baseline_samples_per_second"] == pytest.approx(10.0)
    assert entry.tags["status"] == "faster"


def test_what_a_search_is_about():
    assert about(PLAN)["model"] == "tiny"
    assert about(PLAN)["memory_budget_gib"] == "8.00"
