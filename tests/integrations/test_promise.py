"""What is said of a training beside its promise: figures, and the reasons that can be seen."""

from __future__ import annotations

import dataclasses
import math
from types import SimpleNamespace

import pytest
from finished_searches import make_search

from autotune.integrations.promise import Production, Promise, other_arguments, other_course, other_machine, other_model
from autotune.units import GIB
from autotune.values.trial import Interval, Memory


@pytest.fixture(scope="module")
def result(tmp_path_factory):
    _, found = make_search(tmp_path_factory.mktemp("search") / "run")
    return found


def make_promise(**fields):
    usual = {
        "samples_per_second": 100.0,
        "interval": Interval(low=95.0, high=105.0),
        "memory": Memory(reserved_bytes=3 * GIB),
        "data_wait_share": 0.01,
        "samples_per_step": 16,
    }
    return Promise(**{**usual, **fields})


def make_production(rate: float | None, **fields):
    usual = {
        "when": "2026-01-01T08:00:00+00:00",
        "model": "tiny",
        "config_id": "abc",
        "promise": make_promise(),
        "steps": 40,
        "samples_per_step": 16,
        "samples_per_second": rate,
        "memory": Memory(),
    }
    return Production(**{**usual, **fields})


def arguments_of(result, **changes):
    """TrainingArguments as a dataclass with the promised values."""
    names = {**result.arguments.training_arguments, "gradient_checkpointing": False, "report_to": "none", **changes}
    made = dataclasses.make_dataclass("Arguments", [(n, object, dataclasses.field(default=None)) for n in names])
    return made(**names)


def test_the_promise_is_the_measurement_of_the_best(result):
    promise = Promise.of(result)
    assert promise.samples_per_second == result.best.measurement.samples_per_second
    assert promise.samples_per_step == 16
    nothing = result.model_copy(update={"best": result.best.model_copy(update={"measurement": None})})
    assert Promise.of(nothing) is None


def test_within_the_interval_it_is_as_promised():
    assert str(make_production(97.0, reasons=("torch 2.14",))) == (
        "97 samples/s over 40 steps, as promised: 100 (95 to 105)"
    )


def test_below_the_interval_the_reasons_are_named():
    seen = make_production(80.0, reasons=("optim sgd (promised adamw_torch)", "steps wait for data 30% of their time"))
    assert seen.is_slower
    assert str(seen) == (
        "80 samples/s over 40 steps, 0.80 times the promised 100 (95 to 105): "
        "optim sgd (promised adamw_torch); steps wait for data 30% of their time"
    )
    assert "no reason was seen" in str(make_production(80.0))


def test_above_the_interval_there_is_nothing_to_explain():
    seen = make_production(130.0, reasons=("torch 2.14",))
    assert not seen.is_slower
    assert str(seen).endswith("1.30 times the promised 100 (95 to 105)")


def test_too_few_steps_tell_nothing():
    seen = make_production(None, steps=0)
    assert seen.ratio is None
    assert not seen.is_slower
    assert str(seen) == "too few steps to tell the throughput; promised: 100 (95 to 105) samples/s"


def test_an_interval_without_end():
    promise = make_promise(interval=Interval(low=0.0, high=math.inf))
    assert str(make_production(10.0, promise=promise)).endswith("which can't be told from the promised about 100")


def test_memory_is_compared_where_both_are_of_a_device():
    assert str(make_production(100.0, memory=Memory(reserved_bytes=4 * GIB))).endswith(
        "; peak 4.00 GiB reserved (promised 3.00 GiB)"
    )
    assert "peak" not in str(make_production(100.0, memory=Memory(resident_bytes=GIB)))


def test_it_survives_being_written():
    seen = make_production(80.0, reasons=("a", "b"), memory=Memory(resident_bytes=GIB))
    assert Production.model_validate_json(seen.model_dump_json()) == seen


def test_the_promised_arguments_differ_in_nothing(result):
    assert list(other_arguments(result, arguments_of(result))) == []


def test_arguments_that_cost_time_are_named_and_others_arent(result):
    changed = arguments_of(result, optim="sgd", bf16=False, learning_rate=1.0, per_device_eval_batch_size=99)
    assert list(other_arguments(result, changed)) == ["bf16 False (promised True)", "optim sgd (promised adamw_torch)"]


def test_what_was_switched_on_without_being_promised_is_named(result):
    on = dataclasses.make_dataclass(
        "Arguments",
        [
            *((f.name, f.type, f) for f in dataclasses.fields(arguments_of(result))),
            ("torch_compile", bool, dataclasses.field(default=False)),
        ],
    )(**dataclasses.asdict(arguments_of(result)), torch_compile=True)
    assert list(other_arguments(result, on)) == ["torch_compile True (promised False)"]


def test_the_older_name_of_checkpointing_isnt_told_twice(result):
    changed = arguments_of(result, gradient_checkpointing=True, activation_checkpointing=True)
    assert list(other_arguments(result, changed)) == ["activation_checkpointing True (promised False)"]


def a_model(dtype: str = "torch.float32", **fields):
    config = SimpleNamespace(_attn_implementation="sdpa")
    weights = SimpleNamespace(dtype=dtype)
    return SimpleNamespace(**{"config": config, "parameters": lambda: iter([weights]), **fields})


def test_a_model_of_another_kind_is_named(result):
    assert list(other_model(result, a_model())) == []
    assert list(other_model(result, a_model("torch.bfloat16"))) == ["weights in bfloat16 (promised float32)"]
    eager = a_model(config=SimpleNamespace(_attn_implementation="eager"))
    assert list(other_model(result, eager)) == ["eager attention (promised sdpa)"]
    assert list(other_model(result, a_model(peft_config={}))) == ["with an adapter (promised without)"]
    adapted = result.model_copy(
        update={"arguments": result.arguments.model_copy(update={"adapter": {"peft_type": "LORA"}})}
    )
    assert list(other_model(adapted, a_model())) == ["without the adapter (result.prepare_model)"]


def test_another_machine_is_named(result):
    then = result.hardware
    assert list(other_machine(result, then.name, then.cores, then.versions)) == []
    assert list(other_machine(result, "another", 99, then.versions)) == [f"on another (promised on {then.name})"]
    assert list(other_machine(result, then.name, 99, then.versions)) == [f"on 99 cores (promised on {then.cores})"]
    assert list(other_machine(result, then.name, then.cores, {"torch": "3.0"})) == [
        f"torch 3.0 (promised with {then.versions['torch']})"
    ]


def test_another_course_is_named():
    promise = make_promise()
    assert list(other_course(promise, 16, 0.02)) == []
    assert list(other_course(promise, 32, None)) == ["32 samples a step (promised 16)"]
    assert list(other_course(promise, 16, 0.3)) == ["steps wait for data 30% of their time (promised 1%)"]
    unknown = make_promise(data_wait_share=None)
    assert list(other_course(unknown, 16, 0.3)) == ["steps wait for data 30% of their time"]
