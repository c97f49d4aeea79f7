"""Whole searches with real trials on the CPU, minutes each: `pytest -m slow`."""

import json
from pathlib import Path

import pytest
from conftest import write_model
from running import python
from tiny_models import TINY

import autotune
from autotune.storage.record import VARIABLE
from autotune.storage.run_directory import RunDirectory
from autotune.tuning_result import TuningResult
from autotune.values.config import TrainConfig
from autotune.values.time_spent import wall_s
from autotune.values.trial import TrialStatus

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]


def assert_sound(result):
    """The answer is at least as fast as the baseline, both measured again, or honestly the baseline itself."""
    assert result.best.confirmed
    assert result.baseline.confirmed
    if result.verdict == "faster":
        assert result.speedup.interval.low > 1
    else:
        assert result.verdict in ("no_clear_winner", "undecided")
        assert result.best.config == result.baseline.config


def assert_kept_to_what_was_left(run: Path, limit_s: float, starting_s: float):
    """No trial was given more time than start and earlier trials had left of the search's; a second is the least."""
    results = RunDirectory(run).results()
    assert results
    for result in results:
        first = min(result.request.in_turn_with, default=result.request.number)
        spent_s = wall_s([earlier for earlier in results if earlier.request.number < first])
        assert result.request.limits.timeout_s <= max(1.0, limit_s - starting_s - spent_s)


@pytest.mark.parametrize("model", ["t5-small", "gpt2", "bert-base-uncased", "resnet-18", "vit-small"])
def test_a_quick_search_gives_a_sound_answer_within_the_five_minutes_it_has(model, tmp_path):
    result = autotune.find(model, effort="quick", device="cpu", run_dir=tmp_path / "run")
    assert_sound(result)
    assert_kept_to_what_was_left(tmp_path / "run", 300.0, sum(result.spent.starting.values()))


def test_experts_from_a_local_directory(tmp_path):
    directory = write_model(tmp_path / "tiny-mixtral", TINY["mixtral"])
    assert_sound(autotune.find(str(directory), effort="quick", device="cpu", run_dir=tmp_path / "run"))


STEPS = """
import time

def make(config):
    def step():
        time.sleep({seconds} * ({factor} if config.precision == "bf16" else 1))
    return step
"""

COMMAND = """
import autotune
from loop import make
autotune.find(step=make, knobs={{"precision": ["fp32", "bf16"], "tf32": [False, True]}}, device="cpu",
              max_time={limit_s}, run_dir="run")
"""


@pytest.mark.parametrize(
    ("step_s", "limit_s", "factor"), [(0.1, 30.0, 3), (2.0, 45.0, 3), (10.0, 90.0, 3), (0.1, 60.0, 36_000)]
)
def test_no_trial_outlasts_what_is_left_of_the_search(step_s, limit_s, factor, tmp_path):
    """bf16 takes `factor` times as long, in the last case an hour for each step."""
    (tmp_path / "loop.py").write_text(STEPS.format(seconds=step_s, factor=factor))
    (tmp_path / "program.py").write_text(COMMAND.format(limit_s=limit_s))
    done = python("program.py", cwd=tmp_path, timeout=900)
    starting_s = 0.0
    if done.returncode == 0:
        result = autotune.load(tmp_path / "run" / "best-config.json")
        assert result.baseline.measurement is not None
        starting_s = sum(result.spent.starting.values())
    else:  # a busy machine, on which the start left too little
        assert "no trial completed; trial 0 timed out" in done.stderr
    assert_kept_to_what_was_left(tmp_path / "run", limit_s, starting_s)
    if factor > 1000:
        endless = [r for r in RunDirectory(tmp_path / "run").results() if r.request.config.precision == "bf16"]
        assert {r.status for r in endless} <= {TrialStatus.TIMED_OUT}


def explored(result: TuningResult) -> list[TrainConfig]:
    return [t.config for t in result.trials if t.purpose is not None and t.purpose.explores]


def test_a_second_search_measures_the_baseline_and_the_old_winner_and_ends_if_that_holds(
    tiny_llama, tmp_path, monkeypatch
):
    monkeypatch.setenv(VARIABLE, f"sqlite:///{tmp_path / 'record.db'}")
    slow = tmp_path / "one-by-one.json"  # a baseline that something is sure to beat
    slow.write_text(json.dumps({"per_device_train_batch_size": 1, "gradient_accumulation_steps": 16}))

    def find(run: str, **fields) -> TuningResult:
        return autotune.find(
            str(tiny_llama), effort="quick", device="cpu", seq_len=32, max_trials=3, baseline=slow,
            run_dir=tmp_path / run, **fields,
        )  # fmt: skip

    first = find("first")
    assert first.verdict == "faster"
    assert not [note for note in first.notes if "record" in note]
    second = find("second", seed=7)
    assert explored(second)[0] == first.baseline.config
    assert explored(second)[1] in explored(first)[1:]
    assert len([note for note in second.notes if "the record knows" in note]) == 1
    refused = {t.config for t in second.trials if t.cause is not None and "(record)" in t.cause}
    assert not refused & set(explored(second))
