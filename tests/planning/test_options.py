"""Options are fields of one model: the command line is made from them, and the signature of `find` agrees."""

import inspect
import re
import runpy
from pathlib import Path

import numpy
import pytest
import torch
import typer
from pydantic import ValidationError

import autotune
from autotune.cli.main import app
from autotune.errors import InputError
from autotune.planning.options import EstimateOptions, SearchOptions, fields_by_name, options_of
from autotune.values.budget import Effort


def written(command: str, *arguments: str) -> dict[str, str]:
    """Return the options of a command with their help."""
    found = typer.main.get_command(app).commands[command]
    context = found.make_context(command, [*arguments], resilient_parsing=True)
    return {p.opts[0].removeprefix("--no-").removeprefix("--"): p.help for p in found.get_params(context)}


@pytest.mark.parametrize("function", ["find", "estimate"])
def test_a_function_describes_each_argument_and_takes_no_other(function):
    called = getattr(autotune, function)
    arguments = inspect.getdoc(called).partition("Args:")[2].partition("Raises:")[0]
    taken = inspect.signature(called).parameters
    assert re.findall(r"^    (\w+): ", arguments, re.MULTILINE) == list(taken)
    assert function == "estimate" or taken.keys() >= fields_by_name(SearchOptions).keys()
    said = f"{function}() got an unexpected keyword argument 'modle' (did you mean 'model'"
    with pytest.raises(TypeError, match=re.escape(said)):
        called(modle="gpt2")


def test_editors_are_told_the_same():
    made = runpy.run_path(str(Path(__file__).parents[2] / "docs" / "hooks" / "stub.py"))
    assert made["PATH"].read_text() == made["stub"](), "run docs/hooks/stub.py"


@pytest.mark.parametrize(("command", "kind"), [("find", SearchOptions), ("estimate", EstimateOptions)])
def test_a_command_has_each_option_with_its_help(command, kind):
    helps = written(command)
    for name, field in fields_by_name(kind).items():
        if name != "knobs":
            assert helps[name.replace("_", "-")].startswith(field.description)


def test_a_script_has_the_options_that_it_does_not_decide():
    assert written("script").keys() >= {"allow", "device", "memory", "max-time", "report-to", "seed", "output"}
    assert not written("script").keys() & {"model", "task", "seq-len", "data", "baseline", "global-batch", "workers"}


def test_text_and_objects_of_libraries_are_read_as_values():
    given = {"memory": "24GiB", "max_time": "10m", "train_tokens": "20B", "seq_len": "12", "effort": "quick"}
    objects = {"data": Path("texts.jsonl"), "devices": numpy.int64(2), "device": torch.device("cpu")}
    read = options_of(SearchOptions, {"model": "m", **objects, **given})
    assert (read.memory_bytes, read.max_time_s, read.train_tokens, read.seq_len) == (24 << 30, 600.0, 20e9, 12)
    assert (read.effort, read.data, read.devices, read.device) == (Effort.QUICK, "texts.jsonl", (2,), "cpu")
    assert SearchOptions.model_validate_json(read.model_dump_json()) == read


FIXED = ("precision=bf16", "adapter-target-modules=all-linear")


@pytest.mark.parametrize(
    ("option", "given", "read"),
    [
        ("report_to", "wandb, MLflow,wandb", ("wandb", "mlflow")),
        ("report_to", ["tensorboard"], ("tensorboard",)),
        ("report_to", "", ()),
        ("only", ["optim, per_device_train_batch_size", "optim"], ("optim", "micro-batch")),
        ("fix", "precision=bf16,adapter-target-modules=all-linear", FIXED),
        ("fix", ["precision=bf16", "adapter_target_modules=all-linear"], FIXED),
        ("fix", {"bf16": True, "adapter.target_modules": "all-linear"}, FIXED),
    ],
    ids=str,
)
def test_several_values_are_read_as_text_list_or_mapping(option, given, read):
    options = options_of(SearchOptions, {"model": "m", option: given})
    assert getattr(options, option) == read
    assert SearchOptions.model_validate_json(options.model_dump_json()) == options


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"memory": "24 bananas"}, "--memory 24 bananas: expected an amount of memory such as 24GiB"),
        ({"memory": 0}, "--memory 0: expected a number above 0"),
        ({"seq_len": "9" * 25}, f"--seq-len {'9' * 25}: expected 10000000 or less"),
        ({"target_len": 10**25}, f"--target-len {10**25}: expected 10000000 or less"),
        ({"generations": 1}, "--generations 1: expected 2 or more"),
        ({"max_time": "-3m"}, "--max-time -3m: expected a time such as 90s"),
        ({"train_tokens": "many"}, "--train-tokens many: expected a number above 0, such as 20B"),
        ({"effort": "heroic"}, "--effort heroic: expected quick, standard or thorough"),
        ({"only": "optm"}, "--only optm: no such knob (did you mean 'optim'?)"),
        ({"global_batch": "9" * 5000}, f"--global-batch {'9' * 100}: expected a whole number or any"),
    ],
)
def test_what_can_not_be_read_is_said_with_the_option(given, said):
    with pytest.raises(InputError) as caught:
        options_of(SearchOptions, {"model": "m", **given})
    assert str(caught.value).startswith(said)


@pytest.mark.parametrize(
    ("field", "values"),
    [
        *((name, (0, -1)) for name in ("seq_len", "target_len", "memory_bytes", "max_trials", "train_tokens")),
        ("global_batch", (0, "many")), ("train_steps", (0, 10**400)), ("max_time_s", (0.0, float("inf"), float("nan"))),
        ("allow", ("everything",)), ("effort", ("enormous",)),
    ],
)  # fmt: skip
def test_options_out_of_range_are_refused_when_made(field, values):
    for value in values:
        with pytest.raises(ValidationError, match=field):
            SearchOptions(model="gpt2", **{field: value})
