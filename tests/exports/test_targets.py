"""Exports to other tools: each argument of an answer is carried with its value, or told to be lost."""

from __future__ import annotations

import ast
import dataclasses
import itertools
import json
from typing import Any

import pytest
from exporting import EACH_KNOB, SCRIPTS, answer_with, drafted
from transformers import TrainingArguments

from autotune.errors import InputError
from autotune.exports import targets
from autotune.training.arguments import SEARCHED_ARGUMENTS
from autotune.training.baseline import _LEFT_OUT, _REFUSED, _WITHOUT_EFFECT, read_arguments
from autotune.values.model import Task

# Where a value of another kind than the default's is wanted, or one of a few.
VALUES: dict[str, Any] = {
    "lr_scheduler_type": "cosine", "lr_scheduler_kwargs": {"num_cycles": 0.75}, "warmup_steps": 37, "max_steps": 321,
    "num_train_epochs": 7.0, "logging_strategy": "epoch", "logging_steps": 17, "save_strategy": "epoch",
    "save_steps": 123, "eval_strategy": "steps", "report_to": ["tensorboard"], "hub_strategy": "end",
    "optim_args": "rank=64", "optim_target_modules": ["q_proj"], "accelerator_config": {"split_batches": True},
    "include_num_input_tokens_seen": "all", "include_for_metrics": ["loss"], "label_names": ["labels", "others"],
    "liger_kernel_config": {"rope": False}, "neftune_noise_alpha": 5.5, "log_level": "error",
    "log_level_replica": "error", "debug": "underflow_overflow", "adam_beta1": 0.8, "adam_beta2": 0.998,
    "adam_epsilon": 1e-7,
}  # fmt: skip


def other(field: dataclasses.Field) -> Any:
    """Return a value of JSON that isn't the default."""
    if field.name in VALUES:
        return VALUES[field.name]
    default = field.default
    if isinstance(default, bool) or "bool" in str(field.type):
        return not default
    if isinstance(default, int | float):
        return default + (3 if isinstance(default, int) else 0.25)
    return 7 if "int" in str(field.type) else "other"


@pytest.fixture(scope="module")
def own(tmp_path_factory) -> dict[str, Any]:
    """Every argument that a baseline may have, and that isn't a knob of the search."""
    path = tmp_path_factory.mktemp("baseline") / "args.json"
    left = SEARCHED_ARGUMENTS | _LEFT_OUT | _WITHOUT_EFFECT | set(_REFUSED)
    fields = [field for field in dataclasses.fields(TrainingArguments) if field.name not in left]
    path.write_text(json.dumps({field.name: other(field) for field in fields}))
    found = read_arguments(path).fixed
    assert set(found) == {field.name for field in fields}
    return found


def text(draft) -> str:
    return "".join(draft.files.values())


@pytest.mark.parametrize("target", SCRIPTS)
def test_each_of_the_users_arguments_is_carried_or_told(target, own):
    made = drafted(target, own=own)
    named = "SFT_ARGUMENTS" if target == "trl" else "TRAINING_ARGUMENTS"
    (value,) = [n.value for n in ast.parse(text(made)).body if isinstance(n, ast.Assign) and n.targets[0].id == named]
    carried = {name for name, said in ast.literal_eval(value).items() if name in own and own[name] == said}
    carried |= {"max_steps"} if '"--steps", type=int, default=321' in text(made) else set()
    told = {line.removeprefix("your own argument ").partition("=")[0] for line in made.lost}
    assert carried | told == set(own)
    assert not carried & told


@pytest.mark.parametrize("target", SCRIPTS)
def test_arguments_that_all_are_the_defaults_are_not_told(target, tmp_path):
    path = tmp_path / "args.json"
    path.write_text(TrainingArguments(str(tmp_path), use_cpu=True, disable_tqdm=False).to_json_string())
    assert drafted(target, own=read_arguments(path).fixed).lost == ()


@pytest.mark.parametrize(
    ("target", "own", "line"),
    [
        ("python", {"num_train_epochs": 5.0}, "your own argument num_train_epochs=5.0"),
        ("trl", {"eval_strategy": "epoch"}, "your own argument eval_strategy='epoch'"),
        ("python", {"max_steps": 1}, "your own argument max_steps=1"),
    ],
)
def test_what_a_target_can_not_say_stands_in_its_file_and_in_the_answer(target, own, line):
    made = drafted(target, own=own)
    assert made.lost == (line,)
    assert f"\nnot expressed: {line}\n" in text(made)


@pytest.mark.parametrize(("target", "knob"), list(itertools.product(SCRIPTS, EACH_KNOB)))
def test_no_knob_is_dropped_in_silence(target, knob):
    plain, changed = drafted(target), drafted(target, **{knob: EACH_KNOB[knob]})
    assert text(changed) != text(plain)


@pytest.mark.parametrize(
    ("target", "answer", "reason"),
    [
        ("trl", {"task": Task.SEQ2SEQ_LM, "kind": "encoder-decoder"}, "SFTTrainer trains causal-lm"),
        ("fsdp", {}, "the configuration doesn't use it"),
        ("acelerate", {}, "did you mean 'accelerate'"),
    ],
)
def test_what_can_not_be_trained_there_is_refused(target, answer, reason):
    with pytest.raises(InputError, match=reason):
        drafted(target, **answer)


def test_all_writes_what_can_train_the_answer_and_says_why_others_can_not(tmp_path):
    found, left_out = targets.drafts(answer_with(task=Task.SEQ2SEQ_LM, kind="encoder-decoder"))
    assert set(found) == {"training-args", "python", "accelerate"}
    assert set(found) | set(left_out) == set(targets.TARGETS)


def test_from_python_it_is_the_same(tmp_path):
    answer = answer_with(own={"num_train_epochs": 5.0})
    exported = answer.export("python", tmp_path / "new")
    assert [path.name for path in exported.paths] == ["train.py"]
    assert exported.launch == ("CUDA_VISIBLE_DEVICES=0 python train.py",)
    assert exported.not_expressed == ("your own argument num_train_epochs=5.0",)
    told = answer.export("all", tmp_path / "new").not_expressed
    assert "python: your own argument num_train_epochs=5.0" in told
    assert (tmp_path / "new/launch.txt").read_text() == "python train.py\n"
