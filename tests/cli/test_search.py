"""`autotune script` and `autotune resume`: what they ask for, what they refuse, and where the answer is."""

from __future__ import annotations

import json
import re
import sys
from unittest.mock import Mock

import pytest
from exporting import answer_of
from factories import make_config, make_plan
from own_trainings import LLAMA_SCRIPT, write

from autotune.search.run import Preview, preview
from autotune.search.tuner import SearchInterrupted
from autotune.storage.run_directory import RunDirectory
from autotune.tuning_result import load


@pytest.mark.usefixtures("here")
def test_options_behind_the_script_are_the_scripts(command, monkeypatch):
    asked = {}
    monkeypatch.setattr("autotune.api.find", lambda **given: asked.update(given) or sys.exit(0))
    command("script", "--effort", "quick", "python", "train.py", "--effort", "none", "--json")
    assert (asked["effort"], asked["script"]) == ("quick", ["python", "train.py", "--effort", "none", "--json"])


@pytest.mark.usefixtures("lent")
def test_a_dry_run_shows_what_would_be_tried_and_leaves_nothing(command, tiny_llama, tmp_path, monkeypatch):
    (tmp_path / "temporary").mkdir()
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temporary"))
    words = ["--model", tiny_llama, "--device", "cpu", "--effort", "quick", "--only", "optim,micro-batch", "--dry-run"]
    words += ["--max-time", "1s"]  # that of the search: a preview itself takes longer
    done = command("find", *words)
    assert done.exit_code == 0, done.stderr
    assert "16 configurations (--allow optimizer); at most 1 s and 12 trials" in done.stdout
    assert "micro-batch 8, precision fp32, optim adamw_torch_fused" in done.stdout
    assert re.search(r"0 │ +[\d.,]+ │ +[\d.]+ │ the baseline", done.stdout)
    assert "predicting ..." in done.stderr
    nothing = command("find", *words, "--memory", "1MiB")
    assert (nothing.exit_code, "nothing fits" in nothing.stderr) == (5, True)  # as the search would end
    assert not any((tmp_path / "here").iterdir())
    assert not list((tmp_path / "temporary").glob("autotune-*"))


@pytest.mark.usefixtures("here")
def test_a_dry_run_is_printed_as_json(command, monkeypatch):
    asked = {}
    found = preview(make_plan(), None)
    monkeypatch.setattr("autotune.api.preview", lambda **given: asked.update(given) or found)
    done = command("script", "--dry-run", "--json", "--quiet", "python", "train.py")
    assert Preview.model_validate_json(done.stdout) == found
    assert (asked["script"], done.stderr) == (["python", "train.py"], "")


@pytest.mark.slow
def test_a_script_is_tuned_gone_on_with_and_trained_with_the_answer(autotune, tmp_path):
    write(tmp_path, LLAMA_SCRIPT)
    words = ("--", "python", "train.py", "--output_dir", "out", "--use_cpu", "True", "--max_steps", "12")
    how = ("--effort", "quick", "--max-trials", "2", "--device", "cpu", "--run-dir", "run")
    done = autotune("script", *how, *words, timeout=400)
    assert done.returncode == 0, done.stderr
    assert "train with it: autotune script --apply run/best-config.json -- python train.py" in done.stdout
    assert not (tmp_path / "out").exists()
    result = load(tmp_path / "run" / "best-config.json")
    assert result.workload.model.model_type == "llama"
    assert result.baseline.config.per_device_train_batch_size == 8
    assert any(t.prediction is not None for t in result.trials)

    again = autotune("resume", "run", timeout=400)
    assert again.returncode == 0, again.stderr
    assert "going on after" in again.stderr

    applied = autotune("script", "--apply", "run", *words)
    assert applied.returncode == 0, applied.stderr
    assert "samples/s over" in applied.stderr
    assert (tmp_path / "out" / "model.safetensors").is_file()


@pytest.fixture
def resume(command, tmp_path, monkeypatch):
    """Return a function that resumes a search whose answer is there at once; it gives the output and what was asked."""
    directory = RunDirectory.create(tmp_path / "run")
    plan = make_plan(output=str(tmp_path / "wanted.json"))

    def run(*options: str, interrupted: bool = False, against=None):
        asked = {}
        directory.write_plan(plan.model_copy(update={"earlier": against}))

        def answer(run_dir, **given):
            asked.update(given)
            result = answer_of(make_config(16))
            directory.write_answer(result)
            if interrupted:
                raise SearchInterrupted(result, tmp_path / "run" / "best-config.json")
            return result

        monkeypatch.setattr("autotune.api.resume", answer)
        return command("resume", "run", *options), asked

    return run


def test_limits_are_passed_on_and_stay_without_any(resume):
    done, asked = resume("--max-time", "20m", "--max-trials", "60", "--effort", "thorough", "-o", "elsewhere.json")
    assert done.exit_code == 0
    assert (asked["max_time"], asked["max_trials"], asked["effort"]) == ("20m", 60, "thorough")
    assert str(asked["output"]) == "elsewhere.json"
    assert "written: elsewhere.json" in done.stdout
    _, asked = resume()
    assert {asked[name] for name in ("max_time", "max_trials", "effort", "output")} == {None}


def test_a_search_against_an_earlier_answer_prints_how_its_winner_does_now(resume):
    done, _ = resume(against=answer_of(make_config(16)))
    assert done.exit_code == 0, done.stderr
    assert "the same speed, as far as can be told: 1.00" in done.stdout.partition("all of it:")[2]
    done, _ = resume("--json", against=answer_of(make_config(16)))
    assert json.loads(done.stdout)["verdict"]
    assert "the same speed, as far as can be told: 1.00" in done.stderr
    failed = answer_of(make_config(1, optim="sgd"))
    alone = failed.baseline.model_copy(update={"config": make_config(2, optim="sgd")})
    done, _ = resume(against=failed.model_copy(update={"baseline": alone}))
    assert done.exit_code == 0, done.stderr
    assert "measured no configuration in common" in done.stdout


@pytest.mark.parametrize(
    ("has_begun", "said"), [(True, "interrupted; `autotune resume run` goes on"), (False, "interrupted")]
)
def test_an_interruption_before_the_first_trial_says_how_to_go_on(command, tmp_path, monkeypatch, has_begun, said):
    directory = RunDirectory.create(tmp_path / "run")
    if has_begun:
        directory.write_plan(make_plan())
    monkeypatch.setattr("autotune.api.resume", Mock(side_effect=KeyboardInterrupt))
    done = command("resume", "run")
    assert (done.exit_code, done.stderr.strip()) == (130, f"autotune: {said}")


@pytest.mark.parametrize("interrupted", [False, True])
def test_the_answer_is_said_to_be_where_find_was_told_to_write_it(resume, tmp_path, interrupted):
    done, _ = resume(interrupted=interrupted)
    assert f"written: {tmp_path / 'wanted.json'}" in done.stdout
    assert done.exit_code == (130 if interrupted else 0)
