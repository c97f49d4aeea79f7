"""The answer applied to an unchanged script: it trains to its end, or is refused with the reason."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import answers
import pytest
from factories import make_config, make_workload
from own_trainings import LLAMA_SCRIPT, SCRIPT, write
from transformers import TrainingArguments

from autotune.errors import InputError
from autotune.exports.launch_files import launch_commands
from autotune.integrations.apply import other_training, prepared, run
from autotune.storage.run_directory import read_result
from autotune.values.config import Parallelism
from autotune.values.workload import OwnCode

OWN = OwnCode(kind="script", shown="python train.py", command=("train.py",), directory="/")


@pytest.fixture
def answer(here):
    def written(best, own_code=OWN, **fields):
        baseline = make_config(attn_implementation=None)
        found = answers.answer(
            [(baseline, 10.0), (best, 20.0)], workload=make_workload(own_code=OWN), baseline=baseline
        )
        trained = found.workload.model_copy(update={"own_code": own_code})
        found = found.model_copy(update={"best": found.best.model_copy(update=fields), "workload": trained})
        found.save(here / "best.json")
        return here / "best.json"

    return written


def test_an_applied_answer_trains_the_unchanged_script_to_its_end_and_says_how_fast(answer, here, capfd):
    best = make_config(4, attn_implementation=None, precision="bf16", optim="adafactor")
    words = ["python", "train.py", "--output_dir", "out", "--max_steps", "16", "--disable_tqdm", "True"]
    run(*prepared(answer(best), [*words, "--gradient_accumulation_steps", "2"]))
    told = capfd.readouterr()
    assert "trained to step 16" in told.out
    assert "samples/s over" in told.err
    assert "promised" in told.err
    state = json.loads((here / "out" / "checkpoint-16" / "trainer_state.json").read_text())
    assert state["train_batch_size"] == 4
    production = json.loads((here / "out" / "autotune-production.jsonl").read_text())
    assert production["samples_per_step"] == 16
    assert not [r for r in production["reasons"] if "optim" in r or "bf16" in r]


def test_an_answer_of_another_training_is_applied_and_said_to_be_one(answer, here, capfd):
    path = answer(make_config(4, attn_implementation=None), measurement=None)
    words = ["python", "train.py", "--output_dir", "out", "--max_steps", "1", "--disable_tqdm", "True"]
    run(*prepared(path, [*words, "--gradient_accumulation_steps", "3"]))
    told = capfd.readouterr()
    parameters = 16 * 32 + 32 + 32 * 4 + 4
    assert "trained to step 1" in told.out
    said = "autotune: the answer was found for another training: "
    (line,) = [line for line in told.err.splitlines() if line.startswith(said)]
    known = read_result(path).facts.parameters
    batch = "16 samples a step, not 24 (this training keeps its own, 8 x 3)"
    assert line == f"{said}a model of {known:,} parameters, not {parameters:,}; {batch}"
    assert json.loads((here / "out" / "checkpoint-1" / "trainer_state.json").read_text())["train_batch_size"] == 8
    result = json.loads(path.read_text())
    result["facts"]["parameters"] = parameters
    path.write_text(json.dumps(result))
    run(*prepared(path, [*words, "--gradient_accumulation_steps", "2"]))
    assert said not in capfd.readouterr().err


@pytest.mark.parametrize(("accumulation", "said"), [(2, []), (1, []), (3, ["16 samples a step, not 48"])])
def test_a_winner_on_more_devices_than_the_baseline_takes_the_same_step(answer, here, accumulation, said):
    result = read_result(answer(make_config(4, attn_implementation=None, parallelism={"world_size": 2})))
    args = TrainingArguments(str(here), use_cpu=True, gradient_accumulation_steps=accumulation)
    trainer = SimpleNamespace(args=args, data_collator=None, train_dataset=[])
    told = list(other_training(result, trainer, None))
    assert [line.partition(" (")[0] for line in told] == said


SECOND = """
args = TrainingArguments("second", max_steps=1, remove_unused_columns=False, report_to="none")
args.per_device_train_batch_size = {batch}
args.gradient_accumulation_steps = 2
second = NetTrainer(model=Net(), args=args, train_dataset=Rows())
second.train()
print("split", second.args.per_device_train_batch_size, second.args.gradient_accumulation_steps, second.args.bf16)
"""


@pytest.mark.parametrize(("batch", "split"), [(8, "split 4 4 True"), (2, "split 2 2 True")], ids=["same", "smaller"])
def test_a_second_training_of_the_script_keeps_its_samples_a_step(answer, here, capfd, batch, split):
    write(here, SCRIPT + SECOND.format(batch=batch))
    path = answer(make_config(4, attn_implementation=None, precision="bf16"), measurement=None)
    words = ["python", "train.py", "--output_dir", "out", "--max_steps", "1", "--gradient_accumulation_steps", "2"]
    run(*prepared(path, words))
    assert split in capfd.readouterr().out


def test_an_answer_for_other_texts_or_another_collator_is_said_to_be_one(answer, here, capfd):
    write(here, LLAMA_SCRIPT)
    path = answer(make_config(4, attn_implementation=None, pad_to_multiple_of=16), measurement=None)
    result = json.loads(path.read_text())
    result["workload"]["lengths"] = {"samples": 7, "mean": 5, "minimum": 3, "median": 5, "p95": 9, "maximum": 9}
    path.write_text(json.dumps(result))
    run(*prepared(path, ["python", "train.py", "--output_dir", "out", "--max_steps", "1", "--disable_tqdm", "True"]))
    told = capfd.readouterr().err
    assert "; 7 samples of up to 9 tokens, not " in told
    assert "; batches in multiples of 16 tokens, which your data collator doesn't make" in told
    rows = type("Rows", (), {"__len__": lambda self: 5, "__getitem__": lambda self, at: {"text": "a"}})()
    trainer = SimpleNamespace(args=TrainingArguments("out", use_cpu=True), train_dataset=rows, data_collator=None)
    assert "7 samples, not 5" in list(other_training(read_result(path), trainer, None))


SHARED = {"parallelism": Parallelism(world_size=2)}


@pytest.mark.parametrize(
    ("best", "processes", "message"),
    [
        (SHARED, None,
         r"trains in processes that a launcher starts: OMP_NUM_THREADS=\d+ torchrun .* 2 --no-python auto"),
        (SHARED, "1", r"is for 2 processes, and this is one of 1 \(WORLD_SIZE"),
        ({"packing": True}, "1", "packs samples, which your script puts into batches by itself"),
        ({"quantization": "nf4", "adapter": {"rank": 4}}, "1", "packed base weights"),
        ({"experts_per_token": 1}, "1", "other experts per token"),
        ({"parallelism": Parallelism(world_size=2, tensor_parallel=2)}, "2", "a model in parts"),
        ({}, "2", "is for 1 processes, and this is one of 2"),
        *(({}, n, f"WORLD_SIZE={n}: expected the number of processes") for n in ("x", "", "2.5")),
    ],
    ids=str,
)  # fmt: skip
def test_what_can_not_be_laid_over_a_script_is_refused(answer, monkeypatch, best, processes, message):
    path = answer(make_config(8, attn_implementation=None, **best))
    if processes is not None:
        monkeypatch.setenv("WORLD_SIZE", processes)
    with pytest.raises(InputError, match=message):
        prepared(path, ["python", "train.py"])


def test_an_answer_for_one_process_is_not_applied_by_a_launcher_of_two(answer):
    path = answer(make_config(8, attn_implementation=None))
    with pytest.raises(InputError, match=r"is for 1 processes, and this is one of 2 \(WORLD_SIZE, or your launcher\)"):
        prepared(path, ["torchrun", "--nproc_per_node", "2", "train.py"])


def test_an_answer_of_a_model_is_launched_with_the_script_that_was_given(answer):
    path = answer(make_config(8, attn_implementation=None, **SHARED), own_code=None)
    with pytest.raises(InputError, match=f"--no-python autotune script --apply {path} -- python train.py -x$"):
        prepared(path, ["python", "train.py", "-x"])


def test_an_answer_of_a_model_changes_the_scripts_as_trials_changed_theirs(answer, here, capfd):
    text = LLAMA_SCRIPT.replace("LlamaForCausalLM(config)", "LlamaForCausalLM(config).bfloat16()")
    write(here, text + 'print("in chunks:", "_loss_function" in vars(trainer.model))\n')
    path = answer(make_config(4, attn_implementation=None, chunked_loss=True), own_code=None, measurement=None)
    run(*prepared(path, ["python", "train.py", "--output_dir", "out", "--max_steps", "1"]))
    told = capfd.readouterr()
    assert "in chunks: True" in told.out
    assert "weights in float32, not bfloat16 (dtype of from_pretrained)" in told.err


@pytest.mark.slow
def test_an_answer_for_two_devices_is_laid_over_each_process_of_a_launcher(answer, here):
    write(here, LLAMA_SCRIPT)
    path = answer(make_config(4, attn_implementation=None, checkpointing="full", **SHARED))
    (command,) = launch_commands(read_result(path), str(path))
    launcher = command.split(" -- ")[0].split()[1:]  # after OMP_NUM_THREADS
    own = ["python", "train.py", "--use_cpu", "True", "--max_steps", "3", "--report_to", "none"]
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    words = [*launcher, "--", *own, "--gradient_accumulation_steps", "1"]
    done = subprocess.run(words, cwd=here, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    told = [line for line in done.stderr.splitlines() if line.startswith("autotune: ")]
    assert any("another training: a model of" in line and "samples a step" not in line for line in told)


@pytest.mark.slow
def test_a_scripts_own_failure_and_exit_code_stay_its_own(autotune, answer, here):
    path = answer(make_config(16, attn_implementation=None))
    write(here, "raise SystemExit(7)", "exits.py")
    write(here, "1 / 0", "fails.py")
    assert autotune("script", "--apply", path, "--", "python", "exits.py").returncode == 7
    failed = autotune("script", "--apply", path, "--", "python", "fails.py")
    assert failed.returncode == 1
    assert "\nZeroDivisionError" in failed.stderr
