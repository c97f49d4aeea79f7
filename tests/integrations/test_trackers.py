"""Trackers are told of each trial once, whatever happens; what is wrong with one costs a search a line."""

from __future__ import annotations

import os

import pytest
from factories import OUT_OF_MEMORY, make_config, make_failure, make_measurement, make_plan, make_result, make_workload
from finished_searches import BEST, make_search
from search_events import Heard

from autotune.errors import MachineError
from autotune.integrations.trackers import Run, Tracking, answer_of, check
from autotune.storage.run_directory import RunDirectory
from autotune.units import GIB
from autotune.value import write_value
from autotune.values.model import Task
from autotune.values.problem import TrialEnded
from autotune.values.trial import Memory, Prediction, TrialStatus

PLAN = make_plan()


@pytest.fixture
def told(monkeypatch):
    """Trackers that note the names of runs; "failing" raises at its second, and prints to stdout."""
    names = {name: [] for name in ("good", "failing")}

    def write(name):
        def tracker(run, search):
            print("a word of thanks")
            names[name].append(run.name)
            if name == "failing" and len(names[name]) == 2:
                raise ConnectionError("no route\nto host")

        return tracker

    monkeypatch.setattr("autotune.integrations.trackers.TRACKERS", {name: write(name) for name in names})
    return names.__getitem__


def on_disk(directory: RunDirectory, *numbers: int) -> None:
    for number in numbers:
        folder = directory.path / "trials" / f"{number:04d}"
        folder.mkdir(parents=True)
        write_value(make_result(number=number), folder / "result.json")


def tell(directory: RunDirectory, trackers: tuple[str, ...], *numbers: int) -> Heard:
    """Run a search of these trials with these trackers."""
    heard = Heard()
    made = Tracking(make_plan(report_to=trackers), directory, heard)
    for number in numbers:
        made(TrialEnded(result=make_result(number=number), changes=()))
    return heard


def test_each_trial_is_told_when_it_ends_and_passed_on(directory, told, capsys):
    heard = tell(directory, ("good",), 0, 1)
    assert capsys.readouterr() == ("", "a word of thanks\n" * 2), "stdout is the answer's"
    assert told("good") == ["trial-0000", "trial-0001"]
    assert [event.result.request.number for event in heard] == [0, 1]
    assert "WANDB_FINISH_TIMEOUT" not in os.environ, "runs of the user's own wait as long as before"


def test_a_search_that_goes_on_tells_what_was_missed_and_nothing_twice(directory, told):
    tell(directory, ("good",), 0, 1)
    on_disk(directory, 0, 1, 2)  # the search was killed before the third was told
    tell(directory, ("good",), 3)
    assert told("good") == ["trial-0000", "trial-0001", "trial-0002", "trial-0003"]


def test_a_tracker_that_fails_is_a_note_and_is_told_of_no_further_trial(directory, told):
    heard = tell(directory, ("failing", "good"), 0, 1, 2)
    assert told("good") == ["trial-0000", "trial-0001", "trial-0002"]
    assert told("failing") == ["trial-0000", "trial-0001"]
    (note,) = heard.notes
    assert note.startswith("failing: ConnectionError: no route to host; the search goes on without it, and `autotune ")
    assert sum(isinstance(event, TrialEnded) for event in heard) == 3
    on_disk(directory, 0, 1, 2)
    tell(directory, ("failing",))
    assert told("failing")[2:] == ["trial-0001", "trial-0002"]


def test_without_trackers_nothing_is_written(directory):
    tell(directory, (), 0)
    assert list(directory.path.iterdir()) == []


def test_a_missing_library_is_said_before_the_search_though_a_folder_is_called_so(monkeypatch, tmp_path):
    (tmp_path / "wandb").mkdir()
    monkeypatch.setattr("sys.path", [str(tmp_path)])
    with pytest.raises(MachineError, match="the package wandb is not installed; pip install wandb"):
        check(("wandb",))


@pytest.mark.parametrize(
    ("config", "shown"),
    [
        (make_config(), {"adapter": "none", "torch_compile_backend": "none", "tf32": False}),
        (make_config(adapter={"rank": 8}), {"adapter": "lora", "adapter.rank": 8}),
        (make_config(parallelism={"world_size": 2}), {"parallelism.world_size": 2}),
    ],
)
def test_a_run_has_the_configuration_as_plain_parameters_and_says_what_its_search_is_about(config, shown):
    written = Run.of(PLAN, make_result(config)).config
    assert shown.items() <= written.items()
    assert any(name.startswith("parallelism") for name in written) == (not config.parallelism.is_single)
    assert (written["model"], written["memory_budget_gib"]) == ("tiny", 8.0)


PREDICTION = Prediction(samples_per_second=12.0, peak_bytes=2 * GIB, mfu=0.24)
OWN_LOOP = make_measurement(data_wait_share=None, loss=None)
FAILURE = make_failure(TrialStatus.OUT_OF_MEMORY, "x" * 5000, memory=Memory(resident_bytes=GIB))


@pytest.mark.parametrize(
    ("result", "config", "metrics", "left_out"),
    [
        (
            make_result(make_config(16), 10.0, number=7, prediction=PREDICTION),
            {"per_device_train_batch_size": 16, "status": "completed", "changes": "micro-batch 16"},
            {"samples_per_second": 10.0, "peak_memory_gib": 1.0, "predicted_samples_per_second": 12.0,
             "predicted_peak_memory_gib": 2.0, "tokens_per_second": 1280.0, "mfu": pytest.approx(0.2)},
            {"cause"},
        ),
        (make_result(outcome=FAILURE, number=7), {"status": "out of memory", "cause": "x" * 500},
         {"peak_memory_gib": 1.0}, {"samples_per_second"}),
        (make_result(outcome=OUT_OF_MEMORY, number=7), {}, {}, {"peak_memory_gib", "mfu"}),
        (make_result(outcome=OWN_LOOP, number=7), {}, {}, {"data_wait_share", "loss"}),
    ],
    ids=["completed", "failed", "of unknown memory", "own loop"],
)  # fmt: skip
def test_a_run_has_what_is_known_of_its_trial(result, config, metrics, left_out):
    run = Run.of(PLAN, result)
    assert (run.name, run.step) == ("trial-0007", 7)
    assert config.items() <= run.config.items()
    assert metrics.items() <= run.metrics.items()
    assert not left_out & {*run.config, *run.metrics}


def test_samples_without_tokens_have_no_rate_of_them():
    plan = make_plan(workload=make_workload(task=Task.OWN))
    assert "tokens_per_second" not in Run.of(plan, make_result(outcome=OWN_LOOP)).metrics


def test_the_answer_is_told_once(directory, told, tmp_path):
    _, result = make_search(tmp_path / "finished")
    for _ in range(2):  # a finished search may be gone on with
        Tracking(make_plan(report_to=("good",)), directory, Heard()).end(result)
    run = answer_of(PLAN, result)
    assert told("good") == [run.name] == [f"answer-{sum(trial.number is not None for trial in result.trials):04d}"]
    assert (run.config["config_id"], run.config["status"]) == (BEST.config_id, "faster")
    assert run.metrics["speedup"] == result.speedup.ratio
    assert run.metrics["baseline_samples_per_second"] == pytest.approx(10.0)
    assert run.metrics["tokens_per_second"] == result.best.tokens_per_second
    assert run.metrics["mfu"] == pytest.approx(run.metrics["samples_per_second"] / 100)
    assert run.metrics["baseline_mfu"] == pytest.approx(0.1)
