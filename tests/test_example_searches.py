"""The examples that search, and the scripts that users tune, each run as a user would on tiny models and data."""

import importlib.util
import json
import re
from typing import get_args

import pytest
import torch
from running import run_example

import autotune
from autotune.exports.targets import TARGETS
from autotune.values.result import Verdict

pytestmark = [pytest.mark.slow, pytest.mark.timeout(500)]

SHORT = ("--max-time", "100s")
COMMON = ("--output_dir", "out", "--max_steps", 8, "--report_to", "none", "--disable_tqdm", True)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """The folder that make_tiny.py makes."""
    folder = tmp_path_factory.mktemp("examples") / "tiny"
    run_example("make_tiny.py", folder, "--texts", 300, cwd=folder.parent)
    return folder


def line_with(text, lines):
    (found,) = (line for line in lines if text in line)
    return found


def test_own_data_tells_the_lengths_and_the_padding(tiny, tmp_path):
    lines = run_example("own_data.py", tiny / "texts.json", "--model", tiny / "llama", *SHORT, cwd=tmp_path)
    result = autotune.load(tmp_path / "best-config.json")
    assert lines[0].startswith(f"{result.workload.lengths.samples} texts of {result.workload.lengths.minimum} to")
    share = int(re.search(r"(\d+)% of the positions are padding", line_with("baseline: ", lines))[1])
    assert 0 < share < 100


def test_lora_trains_few_parameters_if_an_adapter_won(tiny, tmp_path):
    lines = run_example("lora.py", tiny / "llama", *SHORT, cwd=tmp_path)
    result = autotune.load(tmp_path / "best-config.json")
    trained = int(re.search(r"trains ([\d,]+) of", lines[-1])[1].replace(",", ""))
    assert (trained < result.facts.parameters) == (result.best.config.adapter is not None)
    assert any(trial.config.adapter is not None for trial in result.trials)


def test_moe_compares_the_ways_to_run_experts(tiny, tmp_path):
    lines = run_example("moe.py", tiny / "mixtral", *SHORT, cwd=tmp_path)
    result = autotune.load(tmp_path / "best-config.json")
    for way in {trial.config.experts_implementation for trial in result.trials}:
        rates = [t.samples_per_second or 0 for t in result.trials if t.config.experts_implementation == way]
        assert line_with(f"{way}: ", lines).endswith(f" {max(rates):.1f} samples/s" if any(rates) else "completed")


def test_estimates_tell_what_fits_a_card(tmp_path):
    lines = run_example("estimate_for_a_card.py", "llama-3-8b", "--gpu", "rtx-4090", cwd=tmp_path)
    assert lines[0].startswith("rtx-4090")
    assert "DOES NOT FIT" in line_with("all weights", lines)
    assert "fits" in line_with("in 4 bits", lines)


def test_a_killed_search_keeps_its_trials(tiny, tmp_path):
    lines = run_example("resume.py", tiny / "llama", "--run-dir", "run", *SHORT, cwd=tmp_path)
    killed = int(re.search(r"killed after (\d+) finished", line_with("killed after", lines))[1])
    told = re.search(r"resumed: (\d+) trials in all, (\d+) of the first", line_with("resumed: ", lines))
    assert killed >= 2
    assert int(told[2]) == killed
    assert int(told[1]) > killed


@pytest.mark.cuda
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two devices")
def test_several_workers_share_the_trials(tiny, tmp_path):
    lines = run_example("several_workers.py", tiny / "llama", *SHORT, cwd=tmp_path)
    places = {match[1] for line in lines if (match := re.match(r"trial \d+ on (.+): ", line))}
    assert len(places) == 2
    assert (tmp_path / "best-config.json").is_file()


def test_own_trainer_is_tuned_and_trains_with_the_answer(tiny, tmp_path):
    lines = run_example("own_trainer.py", tiny / "bert", tiny / "pairs-train.csv", *SHORT, cwd=tmp_path)
    verdict, rate = re.match(r"(.+): ([\d.]+) samples/s", line_with(" samples/s", lines)).groups()
    assert verdict in get_args(Verdict)
    (report,) = (tmp_path / "out" / "autotune-production.jsonl").read_text().splitlines()
    promised = json.loads(report)["promise"]["samples_per_second"]
    (run,) = (tmp_path / "runs").iterdir()
    best = autotune.load(run / "best-config.json").best
    assert best.measurement.samples_per_second == pytest.approx(float(rate), abs=0.051)
    assert promised == pytest.approx(best.measurement.samples_per_second * best.correction)


def test_own_loop_is_tuned_in_the_knobs_that_it_knows(tmp_path):
    lines = run_example("own_loop.py", "--width", 32, *SHORT, cwd=tmp_path)
    batch = int(line_with("  per_device_train_batch_size: ", lines).rpartition(" ")[2])
    assert 64 % batch == 0
    assert line_with("  precision: ", lines).endswith(("fp32", "bf16"))


def test_a_pipeline_is_tuned_in_a_knob_of_its_own(tmp_path):
    lines = run_example("pipeline_loop.py", "--width", 32, *SHORT, cwd=tmp_path)
    assert lines[-2].removeprefix("  schedule ") in ("gpipe", "1f1b", "interleaved")
    (run,) = (tmp_path / "runs").iterdir()
    found = autotune.load(run / "best-config.json")
    assert {trial.config.own.schedule for trial in found.trials if trial.samples_per_second} >= {"gpipe", "1f1b"}
    assert {trial.config.parallelism.data_parallel for trial in found.trials} == {1}


def test_every_target_is_exported_or_says_why_not(answer, tmp_path):
    lines = run_example("export_everywhere.py", answer, "exported", cwd=tmp_path)
    told = [line.removeprefix("left out: ").split(":")[0] for line in lines if not line.startswith(" ")]
    assert told == list(TARGETS)
    for line in lines:
        target, _, files = line.partition(": ")
        if target in TARGETS:
            assert {path.name for path in (tmp_path / "exported" / target).glob("*")} == set(files.split(", "))


# Scripts as users have them run as they stand, and learn


@pytest.mark.parametrize(
    ("name", "model", "files", "options", "metric", "most"),
    [
        ("run_glue", "bert", {"train": "pairs-train.csv", "validation": "pairs-validation.csv"}, (), "accuracy", 1.0),
        # less than a guess among the vocabulary, whose logarithm is 7.601
        ("run_clm", "llama", {"train": "texts.json"}, ("--block_size", 64, "--learning_rate", 0.01), "loss", 7.6),
    ],
    ids=["run_glue", "run_clm"],
)
def test_a_script_trains_evaluates_and_saves(tiny, tmp_path, name, model, files, options, metric, most):
    words = [word for kind, file in files.items() for word in (f"--{kind}_file", tiny / file)]
    words += ["--model_name_or_path", tiny / model, *options, "--do_train", "--do_eval", *COMMON]
    run_example(f"scripts/{name}.py", *words, cwd=tmp_path)
    assert 0 <= json.loads((tmp_path / "out" / "all_results.json").read_text())[f"eval_{metric}"] <= most
    assert (tmp_path / "out" / "model.safetensors").is_file()


@pytest.mark.skipif(importlib.util.find_spec("trl") is None, reason="TRL isn't installed")
@pytest.mark.parametrize("adapter", [(), ("--lora_r", 4)], ids=["all weights", "LoRA"])
def test_sft_trains(tiny, tmp_path, adapter):
    printed = run_example(
        "scripts/sft.py",
        *("--model_name_or_path", tiny / "llama", "--train_file", tiny / "chats.json", "--max_length", 64, "--use_cpu"),
        *(*adapter, *COMMON),
        cwd=tmp_path,
    )
    assert any("eval_loss" in line for line in printed)
    assert (tmp_path / "out" / ("adapter_model.safetensors" if adapter else "model.safetensors")).is_file()
