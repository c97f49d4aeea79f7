"""The user's own TrainingArguments in exports: each is carried with its value, or told to be lost."""

import dataclasses
import json
from typing import Any

import pytest
from exporting import constant, drafted
from transformers import TrainingArguments

from autotune.exports.launch_files import DEFAULTS
from autotune.training.arguments import SEARCHED_ARGUMENTS
from autotune.training.baseline import _REFUSED, PLACES_AND_SECRETS, read_arguments

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

# Their places in files where they have other names, or are no plain arguments.
LOOP = {
    "learning_rate": '"lr": 0.25005', "adam_beta1": '"betas": (0.8, ', "adam_beta2": ", 0.998)",
    "adam_epsilon": '"eps": 1e-07', "weight_decay": "WEIGHT_DECAY = 0.25", "max_grad_norm": "MAX_GRAD_NORM = 1.25",
    "warmup_steps": "num_warmup_steps=37", "lr_scheduler_type": '        "cosine",\n        optimizer,',
    "lr_scheduler_kwargs": 'scheduler_specific_kwargs={"num_cycles": 0.75}', "seed": "set_seed(45)",
    "max_steps": '"--steps", type=int, default=321',
}  # fmt: skip


def other(field):
    """Return a value of JSON that isn't the default."""
    if field.name in VALUES:
        return VALUES[field.name]
    default = field.default
    if isinstance(default, bool) or "bool" in str(field.type):
        return not default
    if isinstance(default, int | float):
        return default + (3 if isinstance(default, int) else 0.25)
    return 7 if "int" in str(field.type) else "other"


@pytest.fixture
def own(tmp_path):
    """Every argument that a baseline may have, and that isn't a knob of the search."""
    left = SEARCHED_ARGUMENTS | PLACES_AND_SECRETS | set(_REFUSED)
    values = {f.name: other(f) for f in dataclasses.fields(TrainingArguments) if f.name not in left}
    (tmp_path / "args.json").write_text(json.dumps(values))
    found = read_arguments(tmp_path / "args.json").fixed
    assert found.keys() == values.keys()
    return found


def carried(target, content, name, value):
    if target == "accelerate-loop" or name == "max_steps":
        return LOOP.get(name, "no such line") in content
    told = constant(content, "SFT_ARGUMENTS" if target == "trl" else "TRAINING_ARGUMENTS")
    return name in told and told[name] == value


@pytest.mark.parametrize("target", ["python", "accelerate-loop", "trl"])
def test_each_of_the_users_arguments_is_carried_or_told(target, own):
    made = drafted(target, own=own)
    told = {line.removeprefix("your own argument ").partition("=")[0] for line in made.lost}
    told |= {"optim_args"} if any("optimizer" in line and "rank=64" in line for line in made.lost) else set()
    missing = [name for name, value in own.items() if name not in told and not carried(target, made.text, name, value)]
    assert not missing
    both = [name for name in told & set(own) if carried(target, made.text, name, own[name])]
    assert not both


@pytest.mark.parametrize("target", ["python", "accelerate-loop", "trl"])
def test_arguments_that_all_are_the_defaults_are_not_told(target, tmp_path):
    path = tmp_path / "args.json"
    path.write_text(TrainingArguments(str(tmp_path), use_cpu=True, disable_tqdm=False).to_json_string())
    assert drafted(target, own=read_arguments(path).fixed).lost == ()


@pytest.mark.parametrize(
    ("target", "own", "line"),
    [
        ("python", {"num_train_epochs": 5.0}, "your own argument num_train_epochs=5.0"),
        ("trl", {"eval_strategy": "epoch"}, "your own argument eval_strategy='epoch'"),
        ("accelerate-loop", {"max_steps": 1}, "your own argument max_steps=1"),
    ],
)
def test_a_value_that_a_target_can_not_say_is_told(target, own, line):
    assert drafted(target, own=own).lost == (line,)


def test_defaults_that_are_written_out_are_those_of_the_trainer(tmp_path):
    assert {name: getattr(TrainingArguments(str(tmp_path), use_cpu=True), name) for name in DEFAULTS} == DEFAULTS
