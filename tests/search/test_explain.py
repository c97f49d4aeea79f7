"""`autotune explain`: what is run, in which order, and what is not run again."""

import json
from pathlib import Path

import pytest
from factories import OUT_OF_MEMORY, Clock, ScriptedRunner, make_config, make_hardware
from finished_searches import BEST, make_search, nothing_helps, outcome, rate, without_memory
from scripted_searches import interrupted
from search_events import Heard

from autotune.errors import InputError, MachineError
from autotune.search import explain
from autotune.search.explain import Explainer
from autotune.search.tuner import Tuner
from autotune.storage.run_directory import EXPLAIN_FOLDER, RunDirectory
from autotune.values import hardware as machine
from autotune.values.config import TrainConfig
from autotune.values.problem import TrialEnded, ignore
from autotune.values.trial import Purpose

PRECISION = make_config(16, optim="adamw_torch")
OPTIMIZER = make_config(16, precision="bf16")
MICRO_BATCH = make_config(precision="bf16", optim="adamw_torch")


class Explained:
    """Explains the winner of a finished search, as often as a test wants."""

    def __init__(self, directory: Path, told=outcome, **fields) -> None:
        self.path, self.told, self.clock, self.heard = directory, told, Clock(), Heard()
        self.plan, self.result = make_search(directory, told, **fields)

    def run(self, max_time_s: float | None = None, told=None):
        directory = RunDirectory(self.path)
        folder = directory.inside(EXPLAIN_FOLDER)
        self.runner = ScriptedRunner(folder.path, told or self.told, clock=self.clock)
        limits = {"max_time_s": max_time_s, "clock": self.clock}
        explainer = Explainer(self.plan, self.result, directory.results(), folder, self.heard, **limits)
        return explainer.run(self.runner)

    @property
    def ran(self) -> list[TrainConfig]:
        return [r.config for r in self.runner.requests]


@pytest.fixture
def explained(tmp_path) -> Explained:
    return Explained(tmp_path / "run")


def test_the_winner_and_each_removal_are_run_in_turn_and_what_a_knob_brought_is_what_its_removal_costs(explained):
    found = explained.run()
    assert explained.ran == [BEST, MICRO_BATCH, PRECISION, OPTIMIZER] * 2
    assert [e.result.request.number for e in explained.heard if isinstance(e, TrialEnded)] == list(range(8))
    assert explained.heard.notes[0].startswith("3 of the winner's knobs to take away, 8 trials: roughly 80 s")
    ratios = {c.changes[0].knob: c.ratio for c in found.contributions}
    assert ratios == {
        "precision": pytest.approx(rate(BEST) / rate(PRECISION)),
        "optim": pytest.approx(1.2),
        "per_device_train_batch_size": pytest.approx(1.1),
    }
    assert {c.basis for c in found.contributions} == {"in turn"}


def test_trials_lie_apart_from_the_search_which_can_be_gone_on_with(explained):
    before = (explained.path / "best-config.json").read_bytes()
    trials = len(RunDirectory(explained.path).results())
    explained.run()
    assert len(RunDirectory(explained.path).results()) == trials
    assert [t.request.number for t in RunDirectory(explained.path / EXPLAIN_FOLDER).results()] == list(range(8))
    assert (explained.path / "best-config.json").read_bytes() == before
    runner = ScriptedRunner(explained.path, outcome)
    again = Tuner(explained.plan, RunDirectory(explained.path), runner, ignore).run()
    assert runner.requests == []
    assert again.best == explained.result.best


def test_where_nothing_has_to_be_run_no_machine_is_needed(explained, monkeypatch):
    known = explained.run()
    monkeypatch.setattr(machine, "detect", lambda device: make_hardware(name="another CPU"))
    assert explain.explain(explained.path, observer=(heard := Heard())) == known
    assert heard.notes == ["nothing has to be run: the trials so far explain the answer"]
    (explained.path / "explain" / "trials" / "0007" / "result.json").unlink()
    with pytest.raises(MachineError, match="go on where it ran"):
        explain.explain(explained.path)


def test_what_was_stopped_goes_on(explained):
    with pytest.raises(KeyboardInterrupt):
        explained.run(told=interrupted(outcome, 5))
    explained.run()
    assert explained.ran == [MICRO_BATCH, PRECISION, OPTIMIZER]


def test_a_removal_that_fails_is_run_once_and_one_that_is_known_to_fail_is_not_run(explained):
    for times in (1, 0):
        found = explained.run(told=lambda r: OUT_OF_MEMORY if r.config == PRECISION else outcome(r))
        assert explained.ran.count(PRECISION) == times
        (failed,) = (c for c in found.contributions if c.basis == "fails")
        assert failed.cause == "out of memory: no memory left (trial explain 2)"


def test_a_removal_that_failed_in_the_search_is_not_run(tmp_path):
    explained = Explained(tmp_path / "run", without_memory)
    tried = {t.request.config for t in RunDirectory(explained.path).results()}
    found = explained.run()
    assert next(c for c in found.contributions if c.changes[0].knob == "precision").basis == "fails"
    assert explained.ran.count(PRECISION) == (PRECISION not in tried)


def test_a_winner_that_fails_ends_it_and_is_tried_again_next_time(explained):
    explained.run(told=lambda request: OUT_OF_MEMORY)
    assert explained.ran == [BEST]
    assert "the winner itself failed" in explained.heard.notes[-1]
    explained.run()
    assert explained.ran == [BEST, MICRO_BATCH, PRECISION, OPTIMIZER] * 2


def test_removals_among_the_finalists_are_known(tmp_path):
    explained = Explained(tmp_path / "run", finalists=9)
    finals = {t.request.config for t in RunDirectory(explained.path).results() if t.request.purpose is Purpose.FINAL}
    assert MICRO_BATCH in finals  # a tenth slower than the winner: it was measured in turn with it
    explained.run()
    assert explained.ran == [BEST, PRECISION, OPTIMIZER] * 2


def test_no_trial_is_begun_that_would_not_end_in_time(explained):
    found = explained.run(max_time_s=45.0)  # trials take 10 s
    assert explained.clock.now_s == 40.0
    assert explained.ran == [BEST, MICRO_BATCH, PRECISION, OPTIMIZER]
    assert "4 trials were not run" in explained.heard.notes[-1]
    assert found.is_settled  # one round tells, less surely


def test_time_in_which_others_computed_is_not_expected_again(tmp_path):
    explained = Explained(tmp_path / "run")
    for path in explained.path.glob("trials/*/result.json"):  # as if all had run in turn
        result = json.loads(path.read_text())
        result["duration_s"], result["outcome"]["phases"] = 300.0, {"waited_s": 290.0}
        path.write_text(json.dumps(result))
    explained.run(max_time_s=45.0)
    assert len(explained.ran) == 4


def test_a_search_without_an_answer_or_that_the_baseline_won_is_refused(tmp_path):
    make_search(tmp_path / "run", nothing_helps)
    with pytest.raises(InputError, match="nothing to explain: the baseline itself is the best"):
        explain.explain(tmp_path / "run")
    (tmp_path / "run" / "best-config.json").unlink()
    with pytest.raises(InputError, match=f"no trial has completed .`autotune resume {tmp_path}/run` goes on"):
        explain.explain(tmp_path / "run")


def test_trials_beside_a_winner_of_before_are_put_aside(explained, monkeypatch):
    explained.run()
    folder, answer = RunDirectory(explained.path).inside(EXPLAIN_FOLDER).path, explained.result
    other = answer.best.model_copy(update={"config": MICRO_BATCH})
    monkeypatch.setattr(RunDirectory, "answer", lambda directory: answer.model_copy(update={"best": other}))
    monkeypatch.setattr(machine, "detect", lambda device: make_hardware(name="another CPU"))
    with pytest.raises(MachineError, match="go on where it ran"):
        explain.explain(explained.path)
    (aside,) = folder.glob("trials-until-*")
    assert len(list(aside.iterdir())) == 8


@pytest.mark.slow
def test_a_real_winner_is_explained_and_reported(autotune, tiny_llama, tmp_path):
    """Beside a micro-batch of 1 with checkpointing, nearly anything wins."""
    slow = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 16, "gradient_checkpointing": True}
    (tmp_path / "slow.json").write_text(json.dumps(slow))
    words = ("--effort", "quick", "--max-trials", 4, "--device", "cpu", "--seq-len", 32, "--baseline", "slow.json")
    done = autotune("find", "--model", tiny_llama, *words, "--run-dir", "run", timeout=400)
    assert done.returncode == 0, done.stderr
    done = autotune("explain", "run", "--json", timeout=400)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["settled"]
    assert found["contributions"]
    explained = RunDirectory(tmp_path / "run" / EXPLAIN_FOLDER).results()
    assert all(t.request.purpose is Purpose.EXPLAIN for t in explained)
    again = autotune("explain", "run", "--json")
    assert "nothing has to be run" in again.stderr
    assert json.loads(again.stdout) == found
    assert len(RunDirectory(tmp_path / "run" / EXPLAIN_FOLDER).results()) == len(explained)
    assert autotune("report", "run").returncode == 0
    page = (tmp_path / "run" / "report.html").read_text()
    assert "measured in turn with the winner" in page
    assert "autotune find --model" in page  # the command that the search was started with
    assert '<th scope="row">activations</th>' in page  # the memory, traced
