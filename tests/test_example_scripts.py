"""The scripts as users have them run as they stand, on tiny models and data, and learn."""

import importlib.util
import json
import math

import pytest
from running_examples import run_example

pytestmark = pytest.mark.slow

COMMON = ("--output_dir", "out", "--max_steps", 8, "--report_to", "none", "--disable_tqdm", True)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """The folder that make_tiny.py makes."""
    folder = tmp_path_factory.mktemp("examples") / "tiny"
    run_example("make_tiny.py", folder, "--texts", 300, cwd=folder.parent)
    return folder


def test_run_glue_trains_and_says_how_often_it_is_right(tiny, tmp_path):
    run_example(
        "scripts/run_glue.py",
        *("--model_name_or_path", tiny / "bert", "--train_file", tiny / "pairs-train.csv"),
        *("--validation_file", tiny / "pairs-validation.csv", "--do_train", "--do_eval", *COMMON),
        cwd=tmp_path,
    )
    metrics = json.loads((tmp_path / "out" / "all_results.json").read_text())
    assert 0 <= metrics["eval_accuracy"] <= 1
    assert (tmp_path / "out" / "model.safetensors").is_file()


def test_run_clm_learns(tiny, tmp_path):
    run_example(
        "scripts/run_clm.py",
        *("--model_name_or_path", tiny / "llama", "--train_file", tiny / "texts.json", "--block_size", 64),
        *("--learning_rate", 0.01, "--do_train", "--do_eval", *COMMON),
        cwd=tmp_path,
    )
    metrics = json.loads((tmp_path / "out" / "all_results.json").read_text())
    assert metrics["eval_loss"] < math.log(2000)  # that of a guess among the vocabulary
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
