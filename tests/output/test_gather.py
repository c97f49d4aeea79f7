"""What is gathered of a run directory, whatever state it is in."""

import fcntl
import shutil

import pytest
from factories import OUT_OF_MEMORY, make_config, make_result
from finished_searches import BASE, BEST, make_search
from profiles import line, make_profile, make_storages

from autotune.cost.family import family_of
from autotune.cost.profile import ForwardPass
from autotune.errors import InputError, RunDirectoryError
from autotune.estimates.forecast import Traces
from autotune.output.gather import command, gather
from autotune.planning.options import SearchOptions
from autotune.storage.run_directory import RunDirectory, read_plan
from autotune.training.arguments import arguments_of
from autotune.tuning_result import load
from autotune.value import write_value
from autotune.values.budget import Soaked
from autotune.values.result import TrialRow
from autotune.values.trial import Purpose, TrialStatus


@pytest.fixture
def run(tmp_path):
    make_search(tmp_path / "run")
    return tmp_path / "run"


def test_a_finished_search(run):
    before = {p: p.stat().st_mtime_ns for p in run.rglob("*")}
    report = gather(run)
    assert {p: p.stat().st_mtime_ns for p in run.rglob("*")} == before
    assert report.result.best.config == BEST
    assert report.baseline == BASE
    assert not report.is_running
    assert report.nothing is None
    assert (report.breakdowns, report.no_breakdown) == ((), "the model was not traced in this search")
    assert len(report.trials) == len(RunDirectory(run).results()) + sum(t.number is None for t in report.result.trials)
    assert report.explanation.winner == BEST
    assert report.unfinished == 0
    first = report.trials[0]
    assert (first.label, first.purpose, first.status) == ("0", Purpose.BASELINE, TrialStatus.COMPLETED)
    assert (first.prediction.samples_per_second, first.peak_bytes, first.ended_s) == (pytest.approx(11.0), 1 << 30, 10)
    (run / "trials" / "0099").mkdir()
    with (run / "lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        running = gather(run)
    assert (running.is_running, running.unfinished) == (True, 1)


def test_the_winners_memory_is_predicted_with_the_batches_in_which_it_evaluates(run):
    forward = ForwardPass(storages=make_storages((0, 1, 0, 1 << 20)), outputs_bytes=line(0, 0))
    families = {family_of(config, read_plan(run).hardware) for config in (BASE, BEST)}
    (run / "trace").mkdir()
    profiles = tuple(make_profile(family, evaluation=forward) for family in families)
    write_value(Traces(profiles=profiles), run / "trace" / "answer.json")
    plan, soaked = read_plan(run), Soaked(eval_batch_size=64, checkpoint_bytes=None)
    checked = {"soaked": soaked, "arguments": arguments_of(BEST, plan.workload, plan.hardware, soaked)}
    load(run / "best-config.json").model_copy(update=checked).save(run / "best-config.json")
    baseline, winner = gather(run).breakdowns
    taken = {
        found.name: next(p.allocated_bytes for p in found.predicted.phases if p.name == "evaluation")
        for found in (baseline, winner)
    }
    assert taken["winner"] > 4 * taken["baseline"]


def test_a_search_before_its_first_answer(run):
    (run / "best-config.json").unlink()
    report = gather(run)
    assert report.result is None
    assert "autotune resume" in report.nothing
    shutil.rmtree(run / "trials")
    assert gather(run).nothing == "no trial has ended yet"


def test_a_search_in_which_nothing_fits(run):
    (run / "best-config.json").unlink()
    shutil.rmtree(run / "trials")
    for number in range(2):
        folder = run / "trials" / f"{number:04d}"
        folder.mkdir(parents=True)
        write_value(make_result(make_config(2 - number), OUT_OF_MEMORY, number=number), folder / "result.json")
    report = gather(run)
    assert report.nothing.startswith("nothing fits 8.00 GiB: the closest, micro-batch 1, still")
    assert {t.status for t in report.trials} == {TrialStatus.OUT_OF_MEMORY}
    assert report.explanation is None


def test_refused_configurations_come_with_their_reasons_and_a_trial_as_the_answer_judges_it(run):
    path = run / "best-config.json"
    answer, config = load(path), make_config(2)
    judged = answer.trials[-1].model_copy(update={"status": TrialStatus.INVALID, "cause": "learns something else"})
    refused = TrialRow(number=None, config=config, status=TrialStatus.REJECTED, cause="too slow")
    answer.model_copy(update={"trials": (*answer.trials[:-1], judged, refused)}).save(path)
    trials = gather(run).trials
    told = next(t for t in trials if t.label == str(judged.number))
    assert (told.status, told.cause) == (TrialStatus.INVALID, "learns something else")
    last = trials[-1]
    assert (last.label, last.purpose, last.config, last.cause) == ("", None, config, "too slow")
    assert [c.knob for c in last.changes] == ["per_device_train_batch_size"]


def test_a_directory_without_a_search_or_a_readable_answer_is_refused(run, tmp_path):
    with pytest.raises(RunDirectoryError, match="holds no search"):
        gather(tmp_path)
    (run / "best-config.json").write_text("{}")
    with pytest.raises(InputError, match=f"not a result of autotune.*; `autotune resume {run}` writes it again"):
        gather(run)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({}, ""), ({"effort": "quick", "allow": "method"}, " --allow method --effort quick"),
        ({"memory_bytes": 8 << 30}, " --memory 8GiB"), ({"memory_bytes": 12 << 20}, " --memory 12MiB"),
        ({"memory_bytes": (1 << 30) + 1}, " --memory 1073741825"),
        ({"max_time_s": 90.0, "seed": 7}, " --max-time 90 --seed 7"),
        ({"data": "my texts.jsonl"}, " --data 'my texts.jsonl'"), ({"record": False}, " --no-record"),
        ({"devices": 2}, " --devices 2"), ({"devices": [1, "all"]}, " --devices 1,all"),
        ({"fix": "bf16=true,micro_batch=8", "only": "optim"}, " --fix precision=bf16,micro-batch=8 --only optim"),
        ({"train_tokens": 3e8}, " --train-tokens 300000000"),
        ({"global_batch": "any", "trust_remote_code": True}, " --global-batch any --trust-remote-code"),
    ],
)  # fmt: skip
def test_the_command_says_what_differs_from_the_defaults(fields, words):
    assert command(SearchOptions(model="gpt2", **fields)) == f"autotune find --model gpt2{words}"


def test_the_command_is_kept_with_the_plan(tmp_path):
    run = tmp_path / "run"
    plan, _ = make_search(run)
    assert gather(run).command is None
    write_value(plan.model_copy(update={"options": SearchOptions(model="tiny", effort="quick")}), run / "search.json")
    assert read_plan(run).options.effort == "quick"
    assert gather(run).command == "autotune find --model tiny --effort quick"
