"""From a command line or a Trainer to a plan: what can't be tuned is refused, what the code decides is held."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

import pytest
from factories import make_facts, make_hardware, make_spec
from own_trainings import write
from plans import Looked

from autotune.api import subject_of
from autotune.errors import InputError
from autotune.output.gather import command
from autotune.planning.options import SearchOptions
from autotune.planning.planner import start_of
from autotune.planning.user_code import UserTrainer, code_of
from autotune.values.model import Task
from autotune.values.trial import Description
from autotune.values.workload import LengthProfile, OwnCode, OwnFound

SCRIPT = ["python", "train.py"]


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write(tmp_path, "", "train.py")
    return tmp_path


@pytest.mark.parametrize(
    ("words", "command", "is_module"),
    [
        (["python", "train.py", "--bf16"], ("train.py", "--bf16"), False),
        (["python3.11", "-u", "train.py"], ("train.py",), False),
        (["train.py", "-m", "x"], ("train.py", "-m", "x"), False),
        (["python", "-m", "pack.train", "--a", "1"], ("pack.train", "--a", "1"), True),
        ([sys.executable, "train.py"], ("train.py",), False),
    ],
    ids=str,
)
def test_a_command_line_names_a_script_and_its_arguments(words, command, is_module, here):
    code = code_of(words)
    assert (code.command, code.is_module, code.directory) == (command, is_module, str(here))


def test_the_command_line_of_a_script_can_be_typed_again():
    assert code_of(["python", "train.py", "--name", "a b"]).command_line == "python train.py --name 'a b'"
    assert code_of(["python", "-m", "pack.train"]).command_line == "python -m pack.train"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "no script: write its command line after --"),
        (["torchrun", "--nproc_per_node", "2", "train.py"], "torchrun: a script is tuned on one device"),
        (["accelerate", "launch", "train.py"], "accelerate: a script is tuned on one device"),
        (["python"], "python: expected a script"),
        (["python", "-c", "print(1)"], "expected a script"),
        (["python", "missing.py"], "missing.py: no such script"),
        (["/somewhere/else/bin/python", "train.py"], "another Python than autotune's"),
    ],
    ids=str,
)
def test_what_starts_no_script_of_this_python_is_refused(words, message):
    with pytest.raises(InputError, match=message):
        code_of(words)


def test_two_trainings_at_once_are_refused():
    with pytest.raises(InputError, match="make_trainer and script are each a training of its own"):
        subject_of(SearchOptions(model=""), make_trainer=lambda: None, script=SCRIPT)


@pytest.mark.parametrize(
    "options",
    [
        *({"data": "x.jsonl"}, {"baseline": "a.json"}, {"model": "gpt2"}, {"images": 1}, {"seq_len": 1}),
        *({"global_batch": 1}, {"trust_remote_code": True}, {"devices": 2}, {"workers": 2}, {"engine": "ray"}),
    ],
    ids=str,
)
def test_options_that_the_code_decides_are_refused_whatever_their_value(options):
    (name,) = options
    with pytest.raises(InputError, match=f"{name}: can't be used with script: "):
        subject_of(SearchOptions(**{"model": "", **options}), script=SCRIPT)
    assert UserTrainer(SearchOptions(model="", devices=1, workers=1), script=SCRIPT)


def found(**fields):
    defaults = {
        "spec": make_spec(source="own"),
        "task": Task.CAUSAL_LM,
        "sequence_length": 48,
        "arguments": {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "optim": "adamw_torch"},
        "fixed": {"learning_rate": 0.1},
        "held": {"optim": "it hands over an optimizer", "adapter": "it has one"},
        "weights": "float32",
        "reorders": True,
        "pads": True,
        "normalizes": True,
    }
    return OwnFound(**{**defaults, **fields})


def plan(fix=(), **fields):
    options = SearchOptions(model="", device="cpu", fix=fix)
    lengths = LengthProfile(samples=96, mean=20.0, minimum=4, median=20, p95=44, maximum=48)
    description = Description(facts=make_facts(), lengths=lengths, own=found(**fields))
    start = dataclasses.replace(start_of(options), hardware=make_hardware())
    return UserTrainer(options, script=SCRIPT).plan(start, lambda: Looked(found=description))


def test_the_codes_own_arguments_are_the_baseline_at_which_what_it_decides_is_held():
    made = plan()
    assert (made.baseline.per_device_train_batch_size, made.baseline.optim) == (4, "adamw_torch")
    assert (made.workload.global_batch_size, made.workload.tokens_per_sample) == (8, 20.0)
    assert made.workload.fixed_arguments == {"learning_rate": 0.1}
    held = made.workload.own_code.held
    assert (held["optim"].value, held["optim"].reason) == ("adamw_torch", "it hands over an optimizer")
    assert held["adapter"].value is None
    assert {p["optim"] for p in made.search_space.points()} == {"adamw_torch"}
    assert type(made).model_validate_json(made.model_dump_json()) == made
    assert made.record is False


def test_weights_in_bf16_stay_so():
    held = {"precision": "the weights are bfloat16, as your code makes them"}
    made = plan(weights="bfloat16", held=held)
    assert made.baseline.precision == "pure_bf16"
    assert {p["precision"] for p in made.search_space.points()} == {"pure_bf16"}
    mixed = plan(weights="bfloat16", held=held, arguments={**found().arguments, "bf16": True})
    assert mixed.baseline.precision == "bf16"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"optim": "magic"}, "optim: transformers has no optimizer 'magic'"),
        (
            {"per_device_train_batch_size": 2048, "gradient_accumulation_steps": 2048},
            "the global batch .*: use at most 1048576",
        ),
    ],
    ids=str,
)
def test_arguments_that_no_search_can_start_from_are_refused_by_name(arguments, said):
    with pytest.raises(InputError, match=f"your TrainingArguments: {said}"):
        plan(arguments=arguments)


def test_the_command_that_started_a_search_is_told_for_scripts_alone():
    options, code = SearchOptions(model="", memory_bytes=1 << 30), code_of(["python", "train.py", "--lr", "1"])
    assert command(options, code) == "autotune script --memory 1GiB -- python train.py --lr 1"
    assert command(options, OwnCode(kind="pickle", shown="trainer Trainer", directory=str(Path.cwd()))) is None


def test_what_the_code_decides_can_not_be_fixed_at_another_value():
    assert plan(fix="optim=adamw_torch").baseline.optim == "adamw_torch"
    with pytest.raises(InputError, match="--fix optim=sgd: optim stays as it is: it hands over an optimizer"):
        plan(fix="optim=sgd")
