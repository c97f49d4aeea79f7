"""`find(step=...)`: what is asked of a user's function, and which space its knobs make."""

from __future__ import annotations

import dataclasses
import threading

import pytest
from factories import VERSIONS, make_gpu, make_hardware, make_plan, make_request
from plans import Looked

import autotune
from autotune.errors import InputError
from autotune.planning.options import SearchOptions
from autotune.planning.plan import request_of
from autotune.planning.planner import start_of
from autotune.planning.user_loop import UserLoop, space_of
from autotune.storage.run_directory import RunDirectory
from autotune.values.config import Allowance, TrainConfig
from autotune.values.model import Task
from autotune.values.trial import Purpose, TrialStatus
from autotune.values.workload import STEP_FILE, Workload

KNOBS = ["per_device_train_batch_size", "precision"]


def make_step(config, accumulation_steps):
    return lambda: None


def asked(step=make_step, knobs=KNOBS, **options):
    return UserLoop(SearchOptions(model="", device="cpu", **options), step, knobs).own


def test_the_accumulation_goes_to_who_takes_it():
    assert asked().takes_accumulation
    assert not asked(lambda config: print).takes_accumulation
    assert not asked(lambda config, rate=0.1: print).takes_accumulation


@pytest.mark.parametrize(
    ("step", "said"),
    [
        (42, "expected a function that takes a TrainConfig, not int"),
        (lambda: None, "can't be called with a configuration"),
        (lambda config, other: None, "can't be called with a configuration"),
    ],
)
def test_what_is_no_such_function_is_refused(step, said):
    with pytest.raises(InputError, match=said):
        asked(step)


@pytest.mark.parametrize(
    ("knobs", "said"),
    [
        (None, "say what your function honours"),
        ([], "say what your function honours"),
        ("precision", "expected a list of names"),
        (["precison"], "'precison' is no field of TrainConfig.*did you mean 'precision'"),
        (["packing"], "your function makes the batches"),
        (["parallelism"], "one process on one device"),
        ({"precision": ["fp23"]}, "knobs: precision: 'fp23' is no value for it"),
        ({"precision": "fp32"}, "knobs: precision: expected a list of values"),
        ({"precision": []}, "knobs: precision: expected a list of values"),
    ],
)
def test_knobs_that_cant_be_are_refused(knobs, said):
    with pytest.raises(InputError, match=said):
        asked(knobs=knobs)


@pytest.mark.parametrize(
    "option",
    [
        {"data": "x"},
        {"check_loss": 20},
        {"engine": "ray"},
        {"devices": 2},
        {"task": "causal-lm"},
        {"images": 1},
        {"image_size": 64},
        {"freeze_vision": True},
    ],
    ids=str,
)
def test_what_goes_with_no_loop_of_ones_own_is_refused(option):
    with pytest.raises(
        InputError, match=f"{next(iter(option))}.*(can't be used with a step|a step of your own|own loop)"
    ):
        asked(**option)


def test_knobs_and_a_space_are_one_too_many():
    with pytest.raises(InputError, match="both say what is varied"):
        asked(space="cpu")
    assert asked(knobs=None, space="cpu").knobs == {}


def test_a_knob_has_the_choices_of_the_devices_space_in_its_order():
    space = space_of(asked(knobs=["optim", "precision"]), "cpu")
    assert list(space.parameters) == ["precision", "optim"]
    assert space.parameters["precision"].choices == ("bf16", "fp32", "pure_bf16")


def test_a_knob_has_its_own_choices_where_they_are_named():
    space = space_of(asked(knobs={"precision": ["fp32", "bf16", "fp32"], "optim": None}), "cpu")
    assert space.parameters["precision"].choices == ("fp32", "bf16")
    assert "adafactor" in space.parameters["optim"].choices


def test_what_was_named_is_tried_whatever_the_effort():
    space = space_of(asked(knobs=["torch_compile_backend"]), "cpu")
    assert space.parameters["torch_compile_backend"].from_effort is autotune.Effort.QUICK


def test_an_adapter_comes_with_its_fields():
    space = space_of(asked(knobs=["adapter"]), "cpu")
    assert list(space.parameters) == ["adapter", "adapter.rank", "adapter.target_modules"]


def test_a_knob_without_usual_values_or_without_what_it_belongs_to_is_refused():
    with pytest.raises(InputError, match="quantization has no usual values; name them"):
        space_of(asked(knobs=["quantization"]), "cpu")
    with pytest.raises(InputError, match="exists only beside dataloader_num_workers"):
        space_of(asked(knobs=["dataloader_prefetch_factor"]), "default")


def plan_of(hardware, knobs, **options):
    """The plan of a search for a function without a named model."""
    given = SearchOptions(model="", device="cpu", **options)
    start = dataclasses.replace(start_of(given), hardware=hardware)
    return UserLoop(given, make_step, knobs).plan(start, lambda: Looked())


def test_every_knob_that_was_named_is_varied_and_no_other():
    everything = [
        *KNOBS, "tf32", "optim", "checkpointing", "attn_implementation", "use_liger_kernel", "torch_compile_backend",
        "adapter", "dataloader_num_workers",
    ]  # fmt: skip
    gpu = make_gpu(versions={**VERSIONS, "flash-attn": "2.8", "triton": "3.7", "liger-kernel": "0.6"})
    plan = plan_of(gpu, everything, allow=Allowance.METHOD, global_batch=16)
    space = plan.search_space
    assert [d.name for d in space.dimensions if not d.name.startswith("adapter.")] == [
        name for name in space_of(asked(knobs=everything), "default").parameters if "adapter." not in name
    ]
    open_choices = {d.name: d.choices for d in space.dimensions}
    for name in everything:
        assert len(open_choices[name]) > 1, (name, space.left_out)


def test_a_knob_that_is_honoured_can_be_fixed_or_searched_alone():
    plan = plan_of(make_hardware(), KNOBS, global_batch=16, fix={"precision": "bf16"})
    assert {config.precision for config in plan.every_config()} == {"bf16"}
    assert {config.per_device_train_batch_size for config in plan.every_config()} > {8}
    plan = plan_of(make_hardware(), KNOBS, global_batch=16, only="precision")
    assert {config.per_device_train_batch_size for config in plan.every_config()} == {8}


@pytest.mark.parametrize(("option", "value"), [("fix", "optim=sgd"), ("only", "optim")])
def test_a_knob_that_is_not_honoured_can_not_be_fixed_or_searched(option, value):
    with pytest.raises(InputError, match=f"--{option} optim: your function isn't said to honour it"):
        plan_of(make_hardware(), KNOBS, global_batch=16, **{option: value})


def test_nothing_is_promised_that_isnt_done():
    plan = plan_of(make_hardware(), KNOBS, global_batch=16)
    assert plan.workload.task is Task.OWN
    assert not plan.soak
    assert plan.loss_steps == 0
    assert not plan.record
    assert any("taken on trust" in note for note in plan.notes)
    assert any("evaluated or saved" in note for note in plan.notes)


def test_all_micro_batches_are_run_as_none_can_be_told_apart():
    plan = plan_of(make_hardware(), KNOBS, global_batch=16)
    config = TrainConfig(per_device_train_batch_size=2)
    assert request_of(plan, config, Purpose.SEARCH, number=1, timeout_s=1.0).accumulation_steps == 8
    trainers = make_plan()
    assert request_of(trainers, config, Purpose.SEARCH, number=1, timeout_s=1.0).accumulation_steps == 2


def test_a_workload_with_a_step_survives_being_written():
    knobs = {"precision": ["fp32"], "torch_compile_backend": [None, "inductor"], "dataloader_num_workers": [0, 2]}
    own = asked(knobs={**knobs, "tf32": [True, False], "optim": None})
    workload = make_request().workload.model_copy(update={"own_step": own})
    assert Workload.model_validate_json(workload.model_dump_json()) == workload


def test_what_cant_be_pickled_is_named(tmp_path):
    lock = threading.Lock()
    step = lambda config: lock.acquire  # noqa: E731
    with pytest.raises(InputError, match="can't be handed to another process: TypeError: cannot pickle"):
        autotune.find(step=step, knobs=KNOBS, device="cpu", run_dir=tmp_path)
    assert not (tmp_path / "data" / STEP_FILE).exists()


def test_nothing_to_tune_is_bad_input():
    with pytest.raises(InputError, match="nothing to tune"):
        autotune.find()


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """A whole search for a loop whose time is known: a micro-batch takes 5 ms in bf16, 20 ms otherwise."""
    run = tmp_path_factory.mktemp("own") / "run"

    def make(config, accumulation_steps):
        import time

        if config.precision == "pure_bf16":
            raise ValueError("weights stay in fp32")
        pause_s = accumulation_steps * (0.005 if config.precision == "bf16" else 0.02)
        return lambda: time.sleep(pause_s)

    return autotune.find(step=make, knobs=KNOBS, global_batch=16, effort="quick", device="cpu", run_dir=run), run


@pytest.mark.slow
def test_a_search_finds_the_fastest_step(found):
    result, _ = found
    assert result.verdict == "faster"
    assert result.best.config.precision == "bf16"
    assert result.best.config.per_device_train_batch_size == 16
    assert result.speedup.ratio > 2
    assert {t.status for t in result.trials if t.config.precision == "pure_bf16"} <= {
        TrialStatus.INVALID, TrialStatus.REJECTED,
    }  # fmt: skip


@pytest.mark.slow
def test_the_answer_says_what_it_doesnt_know(found):
    result, run = found
    assert any("taken on trust" in note for note in result.notes)
    assert any("losses were not compared" in note for note in result.proof_notes)
    assert result.training_arguments("out").per_device_train_batch_size == 16
    with pytest.raises(InputError, match="makes its own model and data"):
        result.build_model()
    with pytest.raises(InputError, match="makes its own model and data"):
        result.training_data(4)
    assert autotune.load(run / "best-config.json") == result
    assert "own-step.pkl" in {p.name for p in (run / "data").iterdir()}


@pytest.mark.slow
def test_a_search_for_a_loop_goes_on_where_it_was_stopped(found, tmp_path):
    import shutil

    _, run = found
    shutil.copytree(run, tmp_path / "run")
    last = sorted((tmp_path / "run" / "trials").iterdir())[-1]
    shutil.rmtree(last)
    before = len(RunDirectory(tmp_path / "run").results())
    result = autotune.resume(tmp_path / "run")
    assert len(RunDirectory(tmp_path / "run").results()) > before
    assert result.best.config.precision == "bf16"


@pytest.mark.slow
def test_with_the_model_named_the_search_is_led_by_predictions(tiny_llama, tmp_path):
    """The loop is a plain one around the same model, so predictions are of the right size."""
    config = str(tiny_llama / "config.json")

    def make(asked, accumulation_steps):
        import torch
        from transformers import AutoConfig, AutoModelForCausalLM

        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(config))
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        ids = torch.randint(0, 500, (asked.per_device_train_batch_size, 32))

        def step():
            for _ in range(accumulation_steps):
                loss = model(input_ids=ids, labels=ids).loss / accumulation_steps
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss * accumulation_steps

        return step

    result = autotune.find(
        str(tiny_llama), step=make, knobs=["per_device_train_batch_size"], seq_len=32, effort="quick", device="cpu",
        max_trials=3, run_dir=tmp_path / "run",
    )  # fmt: skip
    assert any("taken on trust" in note for note in result.notes)
    tried = [t for t in result.trials if t.number is not None]
    assert all(t.prediction is not None for t in tried)
    assert result.best.measurement.tokens_per_second == pytest.approx(32 * result.best.measurement.samples_per_second)
