"""The answer as a value: saved, loaded, and turned into training arguments."""

import json
import math

import pytest
import torch
from answers import BASE, answer
from factories import OUT_OF_MEMORY, make_config, make_measurement

from autotune.errors import InputError
from autotune.training.arguments import parallel_variables, training_plan
from autotune.tuning_result import TuningResult, load, with_methods
from autotune.values.config import Allowance, Parallelism
from autotune.values.hardware import detect
from autotune.values.problem import Change
from autotune.values.result import Contender
from autotune.values.trial import Interval

BEST = make_config(16, precision="bf16", optim="adafactor", adapter={"rank": 4})


@pytest.fixture
def result() -> TuningResult:
    """The answer of a search on this machine's CPU in which BEST was seen once, with an interval without an end."""
    unsure = make_measurement(20.0, samples_per_second_interval=Interval(low=0.0, high=math.inf))
    found = answer([(BASE, 10.0), (BEST, unsure), (make_config(16), OUT_OF_MEMORY)], hardware=detect("cpu"))
    assert found.best.config == BEST
    return with_methods(found)


def test_what_is_saved_is_loaded_without_an_end_of_an_interval_too(result, tmp_path):
    result.save(tmp_path / "best.json")
    assert load(tmp_path / "best.json") == result
    interval = load(tmp_path / "best.json").best.measurement.samples_per_second_interval
    assert (interval.low, interval.high) == (0.0, math.inf)


def test_training_arguments_are_what_the_mapping_says_but_for_those_of_the_caller(result, tmp_path):
    arguments = result.training_arguments(tmp_path / "out")
    tuned = training_plan(BEST, result.workload, result.hardware).tuned
    assert result.arguments.training_arguments == tuned
    assert {name: getattr(arguments, name) for name in tuned} == tuned
    assert arguments.output_dir == str(tmp_path / "out")
    arguments = result.training_arguments(tmp_path, learning_rate=1e-3, per_device_train_batch_size=2)
    assert (arguments.learning_rate, arguments.per_device_train_batch_size) == (1e-3, 2)


def changed(result: TuningResult, **fields) -> TuningResult:
    """The result with other fields of `best` (a config), `arguments`, or of its own."""
    if "config" in fields:
        fields = {"best": result.best.model_copy(update={"config": fields["config"]})}
    elif "arguments" in fields:
        fields = {"arguments": result.arguments.model_copy(update=fields["arguments"])}
    return result.model_copy(update=fields)


def test_expandable_segments_that_the_environment_does_not_ask_for_are_said(result, tmp_path, monkeypatch):
    expanding = changed(result, config=make_config(8, expandable_segments=True))
    with pytest.warns(UserWarning, match="PYTORCH_ALLOC_CONF=expandable_segments:True"):
        expanding.training_arguments(tmp_path)
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "garbage_collection_threshold:0.8,expandable_segments:True")
    expanding.training_arguments(tmp_path)  # a warning is an error in the tests


def test_ranks_that_would_not_share_tokens_are_said(result, tmp_path, monkeypatch):
    config = make_config(8, parallelism=Parallelism(world_size=2, sequence_parallel=2, sharding="zero_3"))
    shared = changed(result, config=config)
    for name, value in parallel_variables(config).items():
        if name != "PARALLELISM_CONFIG_SP_SIZE":
            monkeypatch.setenv(name, value)
    monkeypatch.setattr("transformers.TrainingArguments", dict)  # it would need DeepSpeed
    with pytest.warns(UserWarning, match="measured with PARALLELISM_CONFIG_SP_SIZE=2"):
        shared.training_arguments(tmp_path)


def test_checkpointing_of_a_result_follows_the_version_that_is_installed_now(result, tmp_path):
    old_hardware = result.hardware.model_copy(update={"versions": {"transformers": "5.17.0"}})
    old = changed(changed(result, config=make_config(8, checkpointing="full")), hardware=old_hardware)
    assert old.training_arguments(tmp_path).gradient_checkpointing


def test_model_and_adapter_are_those_that_were_measured(result):
    assert result.model_kwargs() == {"dtype": "float32", "attn_implementation": "sdpa"}
    result.model_kwargs()["dtype"] = "float64"
    assert result.model_kwargs()["dtype"] == "float32"
    assert result.peft_config().r == 4
    assert changed(result, arguments={"adapter": None}).peft_config() is None
    packed = changed(result, arguments={"quantization": {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}})
    config = packed.model_kwargs()["quantization_config"]
    assert (config.load_in_4bit, config.bnb_4bit_quant_type) == (True, "nf4")


def test_an_adapter_that_peft_has_not_is_put_on_all_the_same(result):
    biases, layer = changed(result, arguments={"adapter": {"peft_type": "BITFIT"}}), torch.nn.Linear(2, 2)
    assert biases.peft_config() is None
    assert biases.prepare_model(layer) is layer
    assert [name for name, p in layer.named_parameters() if p.requires_grad] == ["bias"]


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda d: "", "file: Invalid JSON"),
        (lambda d: "not JSON", "file: Invalid JSON"),
        (lambda d: json.dumps(d)[:100], "file: Invalid JSON"),
        (lambda d: "[]", "file: expected names with their values"),
        (lambda d: "{}", "autotune_version: is missing"),
        (lambda d: json.dumps({**d, "schema_version": 2}), "schema_version: expected 1"),
        (lambda d: json.dumps({**d, "surprise": 1}), "surprise: is unknown"),
        (lambda d: json.dumps({**d, "verdict": "great"}), "verdict: expected faster"),
        (lambda d: json.dumps({**d, "workload": {"seed": "x"}}), "workload.model: is missing"),
    ],
)
def test_a_file_that_is_no_result_is_one_line_with_the_place(result, tmp_path, spoil, said):
    path = tmp_path / "best.json"
    path.write_text(spoil(json.loads(result.model_dump_json())))
    with pytest.raises(InputError) as error:
        load(path)
    assert str(error.value).startswith(f"{path}: not a result of autotune (schema 1): {said}")
    assert "\n" not in str(error.value)
    for place in (tmp_path / "nothing.json", tmp_path):
        with pytest.raises(InputError, match="No such file or directory; a search writes its answer into its run"):
            load(place)
    result.save(tmp_path / "best-config.json")
    assert load(tmp_path) == result


@pytest.mark.parametrize(("classes", "deepest"), [((), "exact"), (("exact", "optimizer", "numerics"), "optimizer")])
def test_the_class_of_a_contender_is_that_of_its_deepest_change(classes, deepest):
    changes = tuple(Change(knob="k", before="a", after="b", allowance=c) for c in classes)
    found = Contender(config=make_config(), changes=changes, measurement=None, trials=())
    assert found.allowance is Allowance(deepest)


def test_printed_it_is_the_table_of_the_command_line_and_in_a_list_a_line(result):
    assert str(result).startswith("couldn't tell: your baseline and the fastest were not both")
    assert "precision bf16" in str(result)
    assert "\n" not in repr(result)
    assert result.verdict in repr(result)


@pytest.mark.parametrize("directory", [None, "lengths"])
def test_data_of_a_file_are_read_from_it_anew_or_by_the_lengths_of_a_directory(result, tmp_path, directory):
    (tmp_path / "texts.txt").write_text("some words\nand some more of them\n")
    of_file = result.workload.model_copy(update={"dataset": str(tmp_path / "texts.txt")})
    (tmp_path / "lengths").mkdir()
    where = None if directory is None else tmp_path / directory
    samples, collator = changed(result, workload=of_file).training_data(4, directory=where)
    batch = collator([samples[index] for index in range(4)])
    assert batch["input_ids"].shape == (4, len("and some more of them") + 1)
    assert bool([*(tmp_path / "lengths").iterdir()]) == (directory is not None)
