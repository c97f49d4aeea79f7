"""`autotune script` and `autotune resume`: what they ask for, what they refuse, and where the answer is."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from exporting import answer_of
from factories import make_config, make_hardware, make_measurement, make_plan, make_result, make_workload
from own_trainings import LLAMA_SCRIPT, SCRIPT, write
from typer.testing import CliRunner

from autotune.cli.main import app
from autotune.errors import InputError
from autotune.integrations.apply import prepared, run
from autotune.search.tuner import SearchInterrupted
from autotune.storage.run_directory import RunDirectory
from autotune.tuning_result import load
from autotune.values.config import Parallelism
from autotune.values.trial import Purpose
from autotune.values.user_code import OwnCode
from autotune.verification.finals import Finals
from autotune.verification.state import SearchState
from autotune.verification.verdict import assemble

ROOT = Path(__file__).parents[2]
OWN = OwnCode(kind="script", shown="python train.py", command=("train.py",), directory="/")


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A directory with a script, which the process is in until the test ends."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", sys.argv)
    monkeypatch.setattr(sys, "path", sys.path[:])
    write(tmp_path, SCRIPT)
    return tmp_path


@pytest.fixture
def answer(here):
    """Write the answer of a search of own code whose best is a configuration; return its path."""

    def written(best):
        workload = make_workload(own_code=OWN, global_batch_size=16)
        baseline = make_config(attn_implementation=None)
        trials = [
            make_result(baseline, 10.0, purpose=Purpose.BASELINE, workload=workload),
            make_result(best, make_measurement(20.0), number=1, workload=workload),
        ]
        plan = make_plan(workload=workload, hardware=make_hardware(), baseline=baseline)
        found = assemble(Finals(SearchState(plan, trials)), 1.0)
        assert found is not None
        found.save(here / "best.json")
        return here / "best.json"

    return written


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["torchrun", "train.py"], "torchrun: a script is tuned on one device"),
        (["--", "python", "missing.py"], "missing.py: no such script"),
        (["--apply", "none.json", "--", "python", "train.py"], "none.json: No such file or directory"),
        (["--space", "nowhere.yaml", "--device", "cpu", "--", "python", "train.py"], "nowhere.yaml"),
    ],
    ids=str,
)
def test_what_can_not_be_tuned_is_one_line(here, monkeypatch, words, message):
    monkeypatch.setattr("signal.signal", lambda *_: None)  # this process keeps its handlers
    done = CliRunner().invoke(app, ["script", *words])
    assert done.exit_code == 2
    assert message in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert not list(here.glob("runs/*"))


def test_options_behind_the_script_are_the_scripts(here, monkeypatch):
    asked = {}
    monkeypatch.setattr("autotune.api.find", lambda **given: asked.update(given) or sys.exit(0))
    CliRunner().invoke(app, ["script", "--effort", "quick", "python", "train.py", "--effort", "none", "--json"])
    assert (asked["effort"], asked["script"]) == ("quick", ["python", "train.py", "--effort", "none", "--json"])


@pytest.mark.usefixtures("one_thread")
def test_an_applied_answer_trains_the_unchanged_script_to_its_end_and_says_how_fast(answer, here, capfd):
    best = make_config(4, attn_implementation=None, precision="bf16", optim="adafactor")
    words = ["python", "train.py", "--output_dir", "out", "--max_steps", "16", "--disable_tqdm", "True"]
    run(prepared(answer(best), words))
    told = capfd.readouterr()
    assert "trained to step 16" in told.out
    assert "samples/s over" in told.err
    assert "promised" in told.err
    state = json.loads((here / "out" / "checkpoint-16" / "trainer_state.json").read_text())
    assert state["train_batch_size"] == 4
    production = json.loads((here / "out" / "autotune-production.jsonl").read_text())
    assert production["samples_per_step"] == 16
    assert not [r for r in production["reasons"] if "optim" in r or "bf16" in r]


@pytest.mark.parametrize(
    ("best", "message"),
    [
        ({"parallelism": Parallelism(world_size=2)}, "trains on several devices"),
        ({"packing": True}, "packs samples, which your script puts into batches by itself"),
        ({"quantization": "nf4", "adapter": {"rank": 4}}, "packed base weights"),
    ],
    ids=str,
)
def test_what_can_not_be_laid_over_a_script_is_refused(answer, best, message):
    path = answer(make_config(8, attn_implementation=None, **best))
    with pytest.raises(InputError, match=message):
        prepared(path, ["python", "train.py"])


def test_one_process_of_several_is_refused(answer, monkeypatch):
    path = answer(make_config(16, attn_implementation=None))
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(InputError, match="this is one of several"):
        prepared(path, ["python", "train.py"])


@pytest.mark.slow
def test_a_script_is_tuned_gone_on_with_and_trained_with_the_answer(autotune, tmp_path):
    write(tmp_path, LLAMA_SCRIPT)
    words = ("--", "python", "train.py", "--output_dir", "out", "--use_cpu", "True", "--max_steps", "12")
    how = ("--effort", "quick", "--max-trials", "2", "--device", "cpu", "--run-dir", "run")
    done = autotune("script", *how, *words, timeout=400, OMP_NUM_THREADS="1")
    assert done.returncode == 0, done.stderr
    assert "train with it: autotune script --apply run/best-config.json -- python train.py" in done.stdout
    assert not (tmp_path / "out").exists()
    result = load(tmp_path / "run" / "best-config.json")
    assert result.workload.model.model_type == "llama"
    assert result.baseline.config.per_device_train_batch_size == 8
    assert any(t.prediction is not None for t in result.trials)

    again = autotune("resume", "run", timeout=400, OMP_NUM_THREADS="1")
    assert again.returncode == 0, again.stderr
    assert "going on after" in again.stderr

    applied = autotune("script", "--apply", "run", *words, OMP_NUM_THREADS="1")
    assert applied.returncode == 0, applied.stderr
    assert "samples/s over" in applied.stderr
    assert (tmp_path / "out" / "model.safetensors").is_file()


@pytest.mark.slow
def test_a_scripts_own_failure_and_exit_code_stay_its_own(autotune, answer, here):
    path = answer(make_config(16, attn_implementation=None))
    write(here, "raise SystemExit(7)", "exits.py")
    write(here, "1 / 0", "fails.py")
    assert autotune("script", "--apply", path, "--", "python", "exits.py").returncode == 7
    failed = autotune("script", "--apply", path, "--", "python", "fails.py")
    assert failed.returncode == 1
    assert "ZeroDivisionError" in failed.stderr


@pytest.mark.slow
def test_a_function_that_makes_a_trainer_is_tuned(autotune, tmp_path):
    """From a program of the user's own, in which the function and what it uses are of the main module."""
    program = SCRIPT.partition("\nimport sys\n")[0] + (
        "\nimport autotune\n\n"
        "def build():\n"
        "    args = TrainingArguments('out', use_cpu=True, report_to='none', remove_unused_columns=False)\n"
        "    return NetTrainer(model=Net(), args=args, train_dataset=Rows())\n\n"
        "if __name__ == '__main__':\n"
        "    how = {'effort': 'quick', 'max_trials': 1, 'device': 'cpu', 'run_dir': 'run'}\n"
        "    result = autotune.find(make_trainer=build, **how)\n"
        "    print(result.workload.model.name, result.training_arguments('out').per_device_train_batch_size)\n"
    )
    write(tmp_path, program, "program.py")
    done = subprocess.run(
        [sys.executable, "program.py"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=400,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])},
    )
    assert done.returncode == 0, done.stderr
    best = load(tmp_path / "run" / "best-config.json").best.config
    assert done.stdout.split()[-2:] == ["Net", str(best.per_device_train_batch_size)]
    assert not (tmp_path / "out").exists()


@pytest.fixture
def resume(tmp_path, monkeypatch):
    """Return a function that resumes a search whose answer is there at once; it gives the output and what was asked."""
    monkeypatch.setattr(signal, "signal", lambda *_: None)  # this process keeps its handlers
    directory = RunDirectory.create(tmp_path / "run")
    directory.write_plan(make_plan(output=str(tmp_path / "wanted.json")))

    def run(*options: str, interrupted: bool = False):
        asked = {}

        def answer(run_dir, **given):
            asked.update(given)
            result = answer_of(make_config(16))
            path = directory.write_answer(result)
            if interrupted:
                raise SearchInterrupted(result, path)
            return result

        monkeypatch.setattr("autotune.api.resume", answer)
        return CliRunner().invoke(app, ["resume", str(tmp_path / "run"), *options]), asked

    return run


def test_limits_are_passed_on(resume):
    done, asked = resume("--max-time", "20m", "--max-trials", "60", "--effort", "thorough")
    assert done.exit_code == 0
    assert (asked["max_time"], asked["max_trials"], asked["effort"]) == ("20m", 60, "thorough")


def test_without_any_the_search_goes_on_within_its_own(resume):
    _, asked = resume()
    assert {asked[name] for name in ("max_time", "max_trials", "effort", "output")} == {None}


@pytest.mark.parametrize("interrupted", [False, True])
def test_the_answer_is_said_to_be_where_find_was_told_to_write_it(resume, tmp_path, interrupted):
    done, _ = resume(interrupted=interrupted)
    assert f"written: {tmp_path / 'wanted.json'}" in done.stdout
    assert done.exit_code == (130 if interrupted else 0)


def test_or_where_it_is_wanted_now(resume):
    done, asked = resume("-o", "elsewhere.json")
    assert str(asked["output"]) == "elsewhere.json"
    assert "written: elsewhere.json" in done.stdout
