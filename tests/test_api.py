"""Whole searches with real trials on the CPU: what a user sees, and what survives."""

import json
import re
import signal
import subprocess
from pathlib import Path
from typing import NamedTuple

import psutil
import pytest
from running import process, until

import autotune
from autotune.execution.job import marked
from autotune.tuning_result import TuningResult
from autotune.tuning_result import load as load_result
from autotune.values.problem import TrialEnded
from autotune.values.trial import TrialStatus

EXPLORING = ("baseline", "search")
QUICK = ("--effort", "quick", "--device", "cpu", "--seq-len", 32)

# Of a search of little work: two kinds of configurations are soon traced, and something is sure to beat the baseline.
FEW_KINDS = """
description: micro-batches and two kernels
parameters:
  per_device_train_batch_size: {choices: lattice}
  attn_implementation: {choices: [sdpa, eager]}
"""
ONE_BY_ONE = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 4}


def results(run: Path) -> dict[int, dict]:
    return {int(p.parent.name): json.loads(p.read_text()) for p in sorted(run.glob("trials/*/result.json"))}


# `autotune` with finals, and a measuring of operators, of seconds.
SHORTLY = """
from autotune.values.budget import _BUDGETS
_BUDGETS["quick"] = _BUDGETS["quick"].model_copy(update={"measure_time_s": 1.0, "max_time_s": 150.0})
from autotune.cli.main import main
main()
"""


class Found(NamedTuple):
    """A search of the command line that was killed in mid-trial, and gone on with from Python."""

    result: TuningResult
    run: Path
    before: dict[int, dict]  # what it had finished when it was killed
    events: list
    orphans: list[psutil.Process]


@pytest.fixture(scope="module")
def found(thin_llama, bench, tmp_path_factory) -> Found:
    folder, events = tmp_path_factory.mktemp("found"), []
    run, space, baseline = folder / "run", folder / "few-kinds.yaml", folder / "one-by-one.json"
    space.write_text(FEW_KINDS)
    baseline.write_text(json.dumps(ONE_BY_ONE))
    files = ("--space", space, "--baseline", baseline)
    search = _start(thin_llama, run, "--max-trials", 2, *files, code=SHORTLY)
    try:
        until((run / "trials/0002/process.json").exists, while_runs=search)
        below = psutil.Process(search.pid).children(recursive=True)
    finally:
        search.kill()
        search.communicate()
    _, orphans = psutil.wait_procs(below, timeout=10)
    before = results(run)
    with bench.lent():
        result = autotune.resume(run, observer=events.append)
    return Found(result, run, before, events, orphans)


def test_sigkill_in_mid_trial_loses_no_finished_trial_and_resume_repeats_none(found):
    assert found.orphans == [], "the killed search left processes behind"
    assert marked(json.loads((found.run / "processes.json").read_text())["mark"]) == []
    assert {0, 1} <= set(found.before)
    after = results(found.run)
    assert {n: after[n] for n in found.before} == found.before
    requests = [r["request"] for r in after.values() if r["request"]["purpose"] in EXPLORING]
    searched = [json.dumps(request["config"]) for request in requests]
    assert len(searched) == len(set(searched))


def test_the_users_baseline_is_trial_0_every_trial_does_the_same_step_and_samples_together_are_faster(found):
    result, run = found.result, found.run
    first = results(run)[0]["request"]
    assert (first["purpose"], first["config"]["precision"]) == ("baseline", "fp32")
    assert first["config"]["per_device_train_batch_size"] == 1
    assert {result.workload.samples_per_step(trial.config) for trial in result.trials} == {4}
    assert result.verdict == "faster"
    assert result.speedup.interval.low > 1
    assert result.best.config.per_device_train_batch_size > 1


def test_winner_and_baseline_are_both_measured_again_with_the_true_accumulation(found):
    result, run = found.result, found.run
    assert result.best.confirmed
    assert result.baseline.confirmed
    finals = [r["request"] for r in results(run).values() if r["request"]["purpose"] == "final"]
    assert {f["accumulation_steps"] for f in finals if f["config"]["per_device_train_batch_size"] == 1} == {4}
    for number in result.best.trials[1:]:
        request = results(run)[number]["request"]
        assert request["accumulation_steps"] == 4 // request["config"]["per_device_train_batch_size"]


def test_every_trial_is_told_and_on_disk_as_is_the_answer(found):
    told = [e.result.request.number for e in found.events if isinstance(e, TrialEnded)]
    assert told == sorted(results(found.run).keys() - found.before)
    assert autotune.load(found.run / "best-config.json") == found.result


def test_what_is_exported_is_what_the_best_trial_was_given_and_has_been_checked(found):
    result, run = found.result, found.run
    arguments, size = result.training_arguments("out"), result.best.config.per_device_train_batch_size
    for name, value in result.arguments.training_arguments.items():
        if not name.endswith("_kwargs"):
            assert getattr(arguments, name) == value or name == "activation_checkpointing"
    assert arguments.per_device_train_batch_size * arguments.gradient_accumulation_steps == 4
    assert result.soaked.eval_batch_size in (size, 2 * size, 4 * size, 8 * size)
    assert arguments.per_device_eval_batch_size == result.soaked.eval_batch_size
    assert result.soaked.checkpoint_bytes > 12 * result.facts.parameters
    assert not list(run.rglob("*.safetensors"))


@pytest.mark.slow
def test_the_losses_of_the_winner_are_compared_with_the_baselines(autotune, tiny_llama, tmp_path):
    slow = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 8, "gradient_checkpointing": True}
    (tmp_path / "args.json").write_text(json.dumps(slow))
    done = autotune(
        "find", "--model", tiny_llama, *QUICK, "--baseline", "args.json", "--max-trials", 1, "--check-loss", 10,
        "--run-dir", "run", OMP_NUM_THREADS="1",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "checked on the longest samples: evaluation batch " in done.stdout
    assert "checked: losses " in done.stdout
    assert json.loads((tmp_path / "run/best-config.json").read_text())["loss_check"]["passed"]
    compared = [r for r in results(tmp_path / "run").values() if r["request"]["purpose"] == "loss check"]
    assert [len(r["outcome"]["curve"]["losses"]) for r in compared] == [10, 10, 10]
    baseline, again, winner = (r["outcome"]["curve"]["losses"] for r in compared)
    assert baseline == again
    assert winner == pytest.approx(baseline, rel=1e-4)


@pytest.mark.slow
def test_a_small_memory_budget_makes_real_out_of_memory_trials_and_is_kept(wide_llama, tmp_path):
    result = autotune.find(
        str(wide_llama), effort="quick", device="cpu", seq_len=128, global_batch=16, memory="420MiB", max_trials=4,
        run_dir=tmp_path / "run",
    )  # fmt: skip
    statuses = [t.status for t in result.trials]
    assert TrialStatus.OUT_OF_MEMORY in statuses
    assert result.best.measurement.memory.peak_bytes <= 420 << 20
    assert result.verdict == "baseline_failed"
    assert result.speedup is None


@pytest.mark.slow
def test_nothing_fits_says_what_came_closest_and_exits_with_5(autotune, wide_llama):
    done = autotune("find", "--model", wide_llama, "--effort", "quick", "--device", "cpu", "--memory", "40MiB")
    assert done.returncode == 5
    line = done.stderr.strip().splitlines()[-1]
    said = r"nothing fits: micro-batch 1, .* comes nearest and takes \d+ MiB .* has 40 MiB; with --fix "
    assert re.search(said, line)
    assert "--allow method" in line


@pytest.fixture
def search(tiny_llama, tmp_path):
    """Return a function that searches for the tiny Llama with these options."""
    how = {"effort": "quick", "device": "cpu", "seq_len": 16, "run_dir": tmp_path / "run"}
    return lambda **options: autotune.find(str(tiny_llama), **{**how, **options})


@pytest.mark.slow
@pytest.mark.parametrize(("batch", "trials"), [("any", 3), (1, 1)])
def test_a_free_global_batch_never_accumulates_and_one_sample_has_one_micro_batch(search, batch, trials):
    result = search(global_batch=batch, max_trials=trials)
    assert result.arguments.training_arguments["gradient_accumulation_steps"] == 1
    assert any("global batch is free" in note for note in result.notes) == (batch == "any")
    assert batch == "any" or {t.config.per_device_train_batch_size for t in result.trials} == {1}


@pytest.mark.slow
def test_the_users_own_arguments_are_the_baseline_and_real_data_have_their_own_lengths(search, tmp_path):
    own = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "learning_rate": 3e-4, "optim": "sgd"}
    (tmp_path / "args.json").write_text(json.dumps(own))
    texts = [{"text": "word " * (1 + i % 40)} for i in range(200)]
    (tmp_path / "texts.jsonl").write_text("\n".join(json.dumps(t) for t in texts))
    result = search(baseline=tmp_path / "args.json", data=tmp_path / "texts.jsonl", max_trials=1, seq_len=None)
    assert result.workload.global_batch_size == 8
    assert result.baseline.config.optim == "sgd"
    assert result.training_arguments("out").learning_rate == 3e-4
    assert result.workload.lengths.minimum < result.workload.lengths.maximum <= 128
    assert any("ByT5" in note for note in result.notes)


def _start(model: Path, run: Path, *options: object, code: str = "") -> subprocess.Popen:
    program = ("-c", code) if code else ("-m", "autotune")
    words = (*program, "find", "--model", model, *QUICK, "--run-dir", run, *options)
    return subprocess.Popen(**process(*words), stdout=subprocess.PIPE, stderr=subprocess.PIPE)


@pytest.mark.slow
def test_a_running_search_is_alone_and_ctrl_c_writes_the_best_so_far_and_exits_with_130(autotune, tiny_llama, tmp_path):
    run = tmp_path / "run"
    search = _start(tiny_llama, run, "--effort", "standard")
    try:
        until((run / "trials/0000/result.json").exists, while_runs=search)
        running = autotune("resume", run)
        again = autotune("find", "--model", tiny_llama, *QUICK, "--run-dir", run)
        search.send_signal(signal.SIGINT)
        output, errors = search.communicate(timeout=60)
    finally:
        search.kill()
    assert (running.returncode, again.returncode) == (2, 2)
    assert "another search is running" in running.stderr
    assert "holds a search already" in again.stderr
    assert search.returncode == 130, errors
    assert "autotune resume" in errors
    assert "couldn't tell: your baseline and the fastest were not both" in output
    assert load_result(run / "best-config.json").verdict == "unconfirmed"


@pytest.mark.usefixtures("lent")
def test_resuming_a_finished_search_runs_nothing_and_json_prints_the_result_alone(command, found):
    before = results(found.run)
    done = command("resume", found.run, "--json")
    assert done.exit_code == 0, done.stderr
    assert results(found.run) == before
    assert TuningResult.model_validate_json(done.stdout).best.config == found.result.best.config
